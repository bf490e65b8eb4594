"""The device loop: plan -> run -> commit, in one thread that nothing else blocks."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from zllm_jax.cache import PrefixCache
from zllm_jax.errors import BudgetExceeded, Overloaded
from zllm_jax.runtime import Backend, Chunk, Drawn, Row
from zllm_jax.scheduler.plan import plan
from zllm_jax.scheduler.sequence import Job, Outcome, Sequence, Ticket, clock
from zllm_jax.values import Status, Telemetry

log = logging.getLogger(__name__)
R = TypeVar("R")


class Scheduler:
    """Runs jobs on a backend. `submit` and `call` may be used from any thread.

    max_seq_tokens: the most tokens (prompt and output) of one sequence. max_queue: waiting jobs before `Overloaded`.
    """

    def __init__(self, backend: Backend, cache: PrefixCache, *, max_seq_tokens: int, max_queue: int = 256) -> None:
        self._backend, self._cache = backend, cache
        self._capacity = backend.capacity
        self.budget_tokens = min(max_seq_tokens, self._capacity.max_pages * self._capacity.page_tokens)
        self._max_queue = max_queue
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._slots = list(range(self._capacity.num_slots))[::-1]
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="zllm-device", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Ticket:
        """Queue a job. Raises `BudgetExceeded` or `Overloaded` before anything is queued."""
        if len(job.prompt) + job.max_tokens > self.budget_tokens:
            raise BudgetExceeded(len(job.prompt), job.max_tokens, self.budget_tokens)
        ticket = Ticket(self._wake)
        with self._changed:
            if self._closing:
                raise Overloaded("the engine is closed and takes no more requests")
            if len(self._waiting) >= self._max_queue:
                raise Overloaded(f"{len(self._waiting)} requests are waiting already; try again in a moment")
            self._waiting.append(Sequence(job, ticket))
            self._changed.notify_all()
        return ticket

    def call(self, work: Callable[[], R]) -> R:
        """Run `work` on the device thread between two rounds, and wait for it."""
        future: Future[R] = Future()
        with self._changed:
            if self._closing:
                raise Overloaded("the engine is closed")
            self._calls.append((work, future))
            self._changed.notify_all()
        return future.result()

    def close(self) -> None:
        """Cancel what runs and waits, then end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def report(self) -> dict[str, int]:
        return {"waiting": len(self._waiting), "running": len(self._running), "budget_tokens": self.budget_tokens}

    # -- the loop --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting or self._running or self._calls)
                calls = list(self._calls)
                self._calls.clear()
            for work, future in calls:
                _run_call(work, future)
            if self._closing:
                self._cancel_all()
                return
            self._sweep()
            self._admit()
            if self._running:
                self._round()

    def _round(self) -> None:
        todo = plan(self._running, self._capacity.chunk_sizes, self._capacity.decode_steps, bool(self._waiting))
        one = todo.prefill
        if one is not None:
            with self._faults_end(one):
                drawn = self._prefill(one, todo.start, todo.stop)
                if drawn is not None:
                    self._commit(one, [drawn])
        if todo.decode:
            with self._faults_end(*todo.decode):
                drawn_rows = self._backend.decode([_row(one) for one in todo.decode], todo.steps)
                for one, out in zip(todo.decode, drawn_rows, strict=True):
                    self._commit(one, out)

    @contextmanager
    def _faults_end(self, *involved: Sequence) -> Iterator[None]:
        """A failing device call ends the sequences in it; it must not take the loop, nor others, with it."""
        try:
            yield
        except Exception as error:
            log.exception("a device call failed")
            for one in involved:
                if one in self._running:
                    self._fault(one, error)

    def _fault(self, one: Sequence, error: Exception) -> None:
        self._end(one, Status.FAULTED, "fault", keep=False, error=f"{type(error).__name__}: {error}")

    def _prefill(self, one: Sequence, start: int, stop: int) -> Drawn | None:
        assert one.lease is not None
        drawn = self._backend.prefill(
            Chunk(
                tokens=one.job.prompt[start:stop].tolist(),
                start=start,
                pages=one.lease.pages,
                ring=one.lease.ring,
                slot=one.slot,
                sampling=one.job.sampling,
                seed=one.job.seed,
                last=stop == one.prompt_tokens,
            )
        )
        one.computed = stop
        return drawn

    def _commit(self, one: Sequence, out: list[Drawn]) -> None:
        """Deliver what was drawn and end the sequence where it ends."""
        now = clock()
        if one.first is None:
            one.first = now
            self._measure_prefill(one, now)
        one.latest = now
        one.drawn += [drawn.token for drawn in out]
        one.ticket.put(out)
        if one.drawn[-1] in one.job.stop_ids:
            self._end(one, Status.COMPLETED, "eos")
        elif one.left == 0:
            self._end(one, Status.TRUNCATED, "max_tokens")

    def _measure_prefill(self, one: Sequence, now: float) -> None:
        """From all chunks: a device may still be busy with the earlier ones when the last is handed to it."""
        assert one.lease is not None
        assert one.restored is not None
        self._cache.rates.prefilled(one.prompt_tokens - one.lease.cached_tokens, now - one.restored)

    # -- coming and going ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and self._slots:
            one = self._waiting[0]
            try:
                if not self._start(one):
                    return
            except Exception as error:
                log.exception("admission failed")
                self._fault(one, error)

    def _start(self, one: Sequence) -> bool:
        """Give a waiting sequence its state and slot; False while there is no room for it."""
        admitted = clock()
        lease = self._cache.acquire(one.job.prompt, one.job.max_tokens, look_up=one.job.cache)
        if lease is None:
            return False
        one.lease, one.slot, one.computed = lease, self._slots.pop(), lease.cached_tokens
        one.admitted = admitted
        if _uses_history(one.job):
            self._backend.begin(one.slot, one.job.prompt.tolist())
        one.restored = clock()
        with self._changed:
            self._waiting.remove(one)
            self._running.append(one)
        return True

    def _sweep(self) -> None:
        """End what was cancelled, stopped by its caller, or has run out of time."""
        now = clock()
        for one in self._all():
            late = one.job.deadline is not None and now > one.job.deadline
            if one.ticket.cancelled:
                self._end(one, Status.CANCELED, "canceled", keep=False)
            elif one.ticket.keep_tokens is not None:
                self._end(one, Status.COMPLETED, "stop")
            elif late:
                self._end(one, Status.TRANSPORT_FAILURE, "deadline", keep=False)

    def _cancel_all(self) -> None:
        for one in self._all():
            self._end(one, Status.CANCELED, "canceled", keep=False, error="the engine was closed")

    def _all(self) -> list[Sequence]:
        with self._changed:
            return [*self._running, *self._waiting]

    def _end(self, one: Sequence, status: Status, finish: str, *, keep: bool = True, error: str | None = None) -> None:
        generated, conversation = len(one.drawn), None
        with self._changed:
            if one in self._running:
                self._running.remove(one)
            elif one in self._waiting:
                self._waiting.remove(one)
        if one.lease is not None:
            state = one.state_tokens()
            if one.ticket.keep_tokens is not None:
                generated = min(generated, one.ticket.keep_tokens)
                wanted = one.prompt_tokens + generated
                keep = keep and (self._capacity.truncatable or len(state) <= wanted)
                state = state[:wanted]
            if keep and one.job.cache:
                conversation = self._cache.finish(one.lease, state)
            else:
                self._cache.abort(one.lease)
            self._slots.append(one.slot)
        one.ticket.put(self._outcome(one, status, finish, generated, conversation, error))

    def _outcome(
        self, one: Sequence, status: Status, finish: str, generated: int, conversation: str | None, error: str | None
    ) -> Outcome:
        ended = clock()
        saved = one.job.max_tokens - len(one.drawn)
        c = self._capacity
        return Outcome(
            status=status,
            usage=one.usage(generated),
            timing=one.timing(ended),
            telemetry=Telemetry(
                sampling=one.job.sampling,
                seed=one.job.seed,
                finish=finish,
                bytes_read=one.lease.bytes_read if one.lease else 0,
                bytes_copied=one.lease.bytes_copied if one.lease else 0,
                deadline_exceeded=finish == "deadline",
                saved_steps=saved,
                saved_bytes=saved * c.page_bytes // c.page_tokens,
                termination="fault" if status is Status.FAULTED else "ok",
            ),
            conversation=conversation,
            ended=ended,
            error=error,
        )


def _row(one: Sequence) -> Row:
    assert one.lease is not None
    return Row(
        token=one.drawn[-1],
        position=one.prompt_tokens + len(one.drawn) - 1,
        pages=one.lease.pages,
        ring=one.lease.ring,
        slot=one.slot,
        sampling=one.job.sampling,
        seed=one.job.seed,
        budget=one.left,
        stop_ids=one.job.stop_ids,
    )


def _uses_history(job: Job) -> bool:
    one = job.sampling
    return (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) != (1.0, 0.0, 0.0)


def _run_call(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
