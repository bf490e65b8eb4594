"""One running request: ids come in from the scheduler, text goes out.

Text goes out only when it can no longer be part of a stop sequence or of an unfinished character.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace

from zllm_jax.dialect import Detokenizer, Tokenizer
from zllm_jax.runtime import Drawn
from zllm_jax.scheduler import Event, Outcome, Ticket, clock
from zllm_jax.values import Delta, Envelope, Request, Status, TokenLogprob


class Call:
    """One running request: iterate over its `Delta`s; the last one carries the envelope. `cancel` from any thread.

    at_end: sees the envelope before anybody else, and returns the one to hand out; called once, in whatever thread.
    """

    def __init__(
        self,
        request_id: str,
        request: Request,
        ticket: Ticket,
        tokenizer: Tokenizer | None,
        at_end: Callable[[Envelope], Envelope],
    ) -> None:
        self.request_id = request_id
        self._ticket, self._at_end = ticket, at_end
        self._taken: deque[Event] = deque()
        self._draining = threading.Lock()
        self._output = _Output(request, tokenizer)

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
            envelope = self._at_end(self._output.envelope(self.request_id, event))
            return [*([Delta(text=rest)] if rest else []), Delta(envelope=envelope)]
        delta = self._output.feed(event)
        if delta is None:
            return []
        if self._output.stopped:
            self._ticket.stop_after(len(self._output.tokens))
        return [delta]


class _Output:
    """What a request has put out so far: ids, text, and how much of the text may already be shown."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._stop = request.stop
        self._text = Detokenizer(tokenizer, continuing=True) if tokenizer is not None else None
        self.tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._shown, self._held = "", ""
        self.stop_text: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_text is not None

    def feed(self, drawn: list[Drawn]) -> Delta | None:
        """The visible part of new tokens; tokens after a stop sequence are dropped."""
        fresh: list[Drawn] = []
        for one in drawn:
            if self.stopped:
                break
            fresh.append(one)
            if self._text is not None:
                self._held += self._text.feed([one.token])
                self._look_for_stop()
        if not fresh:
            return None
        return self._delta(fresh, self._visible())

    def close(self) -> str:
        """The text that was held back to the end."""
        if self._text is not None and not self.stopped:
            self._held += self._text.close()
        rest, self._held = ("" if self.stopped else self._held), ""
        self._shown += rest
        return rest

    def envelope(self, request_id: str, outcome: Outcome) -> Envelope:
        stopped = self.stopped and outcome.status in (Status.COMPLETED, Status.TRUNCATED)
        telemetry = outcome.telemetry
        if stopped:  # the sequence may have ended in another way before the scheduler heard of the stop
            telemetry = replace(telemetry, finish="stop", stop_text=self.stop_text)
        timing = outcome.timing
        return Envelope(
            request_id=request_id,
            status=Status.COMPLETED if stopped else outcome.status,
            tokens=tuple(self.tokens),
            text=self._shown,
            usage=replace(outcome.usage, generated_tokens=len(self.tokens)),
            timing=replace(timing, post_s=timing.post_s + clock() - outcome.ended),
            telemetry=telemetry,
            logprobs=tuple(self._logprobs),
            conversation=outcome.conversation,
            error=outcome.error,
        )

    def _delta(self, drawn: list[Drawn], text: str) -> Delta:
        logprobs = tuple(one.logprob for one in drawn if one.logprob is not None)
        self.tokens += [one.token for one in drawn]
        self._logprobs += logprobs
        return Delta(text=text, tokens=tuple(one.token for one in drawn), logprobs=logprobs)

    def _look_for_stop(self) -> None:
        found = [(at, text) for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            at, self.stop_text = min(found)
            self._held = self._held[:at]

    def _visible(self) -> str:
        """Everything held but the longest suffix that may begin a stop sequence."""
        keep = 0
        if not self.stopped:
            keep = max((_overlap(self._held, text) for text in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self._shown += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _nothing() -> None:
    return None
