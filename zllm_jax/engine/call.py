"""One running request: ids come in from the scheduler, text and calls go out."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator

from zllm_jax.engine.output import Output
from zllm_jax.scheduler import Event, Outcome, Ticket
from zllm_jax.values import Delta, Envelope


class Call:
    """One running request: iterate over its `Delta`s; the last one carries the envelope. `cancel` from any thread.

    at_end: sees the envelope before anybody else, and returns the one to hand out; called once, in whatever thread.
    """

    def __init__(
        self,
        request_id: str,
        ticket: Ticket,
        output: Output,
        at_end: Callable[[Envelope], Envelope],
    ) -> None:
        self.request_id = request_id
        self._ticket, self._at_end = ticket, at_end
        self._taken: deque[Event] = deque()
        self._draining = threading.Lock()
        self._output = output

    def cancel(self) -> None:
        self._ticket.cancel()

    def __iter__(self) -> Iterator[Delta]:
        while True:
            if not self._taken:
                self._taken += self._ticket.wait()
            for delta in self._next():
                yield delta
                if delta.envelope is not None:
                    return

    async def stream(self) -> AsyncGenerator[Delta, None]:
        """The same deltas without blocking the event loop. Closing the generator cancels the request."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            loop.call_soon_threadsafe(arrived.set)

        self._ticket.on_event(notify)
        done = False
        try:
            while not done:
                await arrived.wait()
                arrived.clear()
                self._taken += self._ticket.take()
                while self._taken:
                    ends = isinstance(self._taken[0], Outcome)  # what is done then may take milliseconds
                    for delta in await asyncio.to_thread(self._next) if ends else self._next():
                        done = delta.envelope is not None
                        yield delta
        finally:
            self._ticket.on_event(_nothing if done else self._drain)
            if not done:
                self.cancel()

    def _drain(self) -> None:
        """Nobody listens any more, but the end must still be seen."""
        with self._draining:
            self._taken += self._ticket.take()
            while self._taken:
                self._next()

    def _next(self) -> list[Delta]:
        """What the oldest event that was taken shows."""
        event = self._taken.popleft()
        if isinstance(event, Outcome):
            rest = self._output.close()
            return [*rest, Delta(envelope=self._at_end(self._output.envelope(self.request_id, event)))]
        deltas = self._output.feed(event)
        if deltas and self._output.stopped:
            self._ticket.stop_after(len(self._output.tokens))
        return deltas


def _nothing() -> None:
    return None
