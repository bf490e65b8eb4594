"""The device loop: plan -> run -> commit, in one thread that nothing else blocks."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from zllm_jax.cache import Lease, PrefixCache
from zllm_jax.cache.prefix_cache import Progress
from zllm_jax.errors import BudgetExceeded, CacheError, CorruptSnapshot, DeviceLost, Overloaded
from zllm_jax.fence import HostMatcher, TokenTables
from zllm_jax.metrics import Metrics
from zllm_jax.runtime import Backend, Chunk, Drawn
from zllm_jax.scheduler.outcome import outcome_of
from zllm_jax.scheduler.plan import Plan, plan
from zllm_jax.scheduler.sequence import Job, Sequence, Ticket, clock, row_of, takes_runs, uses_history
from zllm_jax.scheduler.share import FairShare
from zllm_jax.values import Status, Tier

log = logging.getLogger(__name__)
R = TypeVar("R")

GROUPS_BESIDE_DECODE = 1  # of a restore that a round copies while other sequences wait for their next token
MIN_RESTORE_SHARE = 0.1  # of the time to the first token of a restored prompt, however slow its new tokens were


class Scheduler:
    """Runs jobs on a backend. `submit` and `call` may be used from any thread.

    max_seq_tokens: the most tokens (prompt and output) of one sequence. max_queue: waiting jobs before `Overloaded`.
    checkpoint_tokens: of a state that cannot be cut, keep one each so many tokens of a prompt (0: none).
    healthy: False once the device's state is lost.
    """

    def __init__(
        self,
        backend: Backend,
        cache: PrefixCache,
        *,
        max_seq_tokens: int,
        max_queue: int = 256,
        checkpoint_tokens: int = 0,
        metrics: Metrics | None = None,
    ) -> None:
        self._backend, self._cache, self._metrics = backend, cache, metrics or cache.metrics
        self._capacity = backend.capacity
        self.budget_tokens = min(max_seq_tokens, self._capacity.max_pages * self._capacity.page_tokens)
        self._max_queue = max_queue
        self._checkpoint_tokens = 0 if self._capacity.truncatable else checkpoint_tokens
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._share = FairShare()
        self._slots = list(range(self._capacity.num_slots))[::-1]
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._kicked = False
        self._full = False  # no room for whose turn it is, until something changes
        self._closing = False
        self.healthy = True
        self._metrics.watch("zllm_waiting_requests", "Requests in the queue", lambda: len(self._waiting))
        self._metrics.watch("zllm_running_requests", "Requests on the device", lambda: len(self._running))
        cache.wake = self._wake
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
            self._share.arrive(job.tenant)
        self._wake()
        return ticket

    def call(self, work: Callable[[], R]) -> R:
        """Run `work` on the device thread between two rounds, and wait for it."""
        future: Future[R] = Future()
        with self._changed:
            if self._closing:
                raise Overloaded("the engine is closed")
            self._calls.append((work, future))
        self._wake()
        return future.result()

    def close(self, *, save: bool = False, progress: Progress | None = None) -> None:
        """Cancel what runs and waits, save what stays if asked, then end the thread."""
        with self._changed:
            if not self._closing and save:
                self._calls.append((lambda: self._save(progress), Future()))
            self._closing = True
        self._wake()
        self._thread.join()

    def _save(self, progress: Progress | None) -> None:
        """Nobody waits for what this returns: what it raises is said here, and the rest is closed all the same."""
        try:
            self._cache.save(progress)
        except Exception:
            log.exception("not all conversations were saved before the end")

    def report(self) -> dict[str, int]:
        return {"waiting": len(self._waiting), "running": len(self._running), "budget_tokens": self.budget_tokens}

    # -- the loop --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            self._kicked = True
            self._changed.notify_all()

    def _loop(self) -> None:
        busy = False
        while True:
            with self._changed:
                while not (busy or self._kicked):
                    busy = not self._changed.wait(self._until_deadline())
                self._full = self._full and not self._kicked
                self._kicked = False
                calls = list(self._calls)
                self._calls.clear()
                closing = self._closing
            if closing:
                self._cancel_all()
            for work, future in calls:
                _run_call(work, future)
            if closing:
                self._cache.close()
                return
            busy = self._turn()

    def _until_deadline(self) -> float | None:
        """Seconds until one that waits for memory, or for a disk, has run out of time, or of patience."""
        ends = [one.job.deadline for one in (*self._running, *self._waiting) if one.job.deadline is not None]
        for one in self._running:
            if one.lease is not None and one.lease.restoring is not None:
                ends.append(one.lease.restoring.stalls_at)
        patience = self._cache.patience_ends if self._waiting else None
        if patience is not None and patience > clock():
            ends.append(patience)
        return max(0.0, min(ends) - clock()) if ends else None

    def _turn(self) -> bool:
        """One turn of the loop; whether there is more to do before something else happens."""
        self._sweep()
        with self._faults_end():
            if self._cache.advance():
                self._full = False
        self._admit()
        self._restore()
        todo = plan(
            self._share.order(self._running),
            self._capacity.chunk_sizes,
            num_stages=self._capacity.num_stages,
            decode_steps=self._capacity.decode_steps,
            waiting=bool(self._waiting),
            stride=self._checkpoint_tokens,
        )
        self._run(todo)
        return not todo.idle

    def _run(self, todo: Plan) -> None:
        one = todo.prefill
        if one is not None:
            with self._faults_end(one):
                self._prefill(one, todo)
        if todo.decode:
            with self._faults_end(*todo.decode):
                drawn_rows = self._backend.decode([row_of(one) for one in todo.decode], todo.steps)
                for one, out in zip(todo.decode, drawn_rows, strict=True):
                    self._commit(one, out)

    @contextmanager
    def _faults_end(self, *involved: Sequence) -> Iterator[None]:
        """A failing device call ends the sequences in it; it must not take the loop, nor others, with it."""
        try:
            yield
        except Exception as error:
            self.healthy = self.healthy and not isinstance(error, DeviceLost)
            log.exception("a device call failed", extra={"request_id": [one.job.request_id for one in involved]})
            for one in involved:
                if one in self._running or one in self._waiting:
                    self._fault(one, error)

    def _fault(self, one: Sequence, error: Exception) -> None:
        self._end(one, Status.FAULTED, "fault", keep=False, error=f"{type(error).__name__}: {error}")

    def _prefill(self, one: Sequence, todo: Plan) -> None:
        """The stages of a chunk that can run; after the last chunk's last, commit the first token."""
        chunk = _chunk(one, todo.start, todo.stop)
        drawn: Drawn | None
        if todo.first_stage == 0 and todo.last_stage == self._capacity.num_stages:
            drawn = self._backend.prefill(chunk)
        else:
            for stage in range(todo.first_stage, todo.last_stage):
                one.carry = self._backend.prefill_stage(chunk, stage, one.carry)
            one.stage = todo.last_stage
            if one.stage < self._capacity.num_stages:
                return
            drawn = one.carry
        one.stage, one.carry, one.computed = 0, None, todo.stop
        self._share.serve(one.job.tenant, todo.stop - todo.start)
        if drawn is not None:
            self._commit(one, [drawn])
        elif self._checkpoint_tokens and todo.stop % self._checkpoint_tokens == 0 and one.job.cache:
            assert one.lease is not None
            self._cache.checkpoint(one.lease, one.tokens(0, todo.stop))

    def _commit(self, one: Sequence, out: list[Drawn]) -> None:
        """Deliver what was drawn and end the sequence where it ends."""
        now = clock()
        if one.first is None:
            one.first = now
            self._measure(one, now)
            self._share_prompt(one)
        elif one.latest is not None and out:
            for _ in out:
                self._metrics.token_interval((now - one.latest) / len(out))
        one.latest = now
        self._share.serve(one.job.tenant, len(out))
        one.ticket.put([*map(Drawn, one.ahead), *out])
        one.take([drawn.token for drawn in out])
        if one.drawn[-1] in one.job.stop_ids and (why := one.breaks_off):
            self._end(one, Status.FAULTED, "fault", keep=False, error=why)
        elif one.drawn[-1] in one.job.stop_ids:
            self._end(one, Status.COMPLETED, "eos")
        elif one.left == 0:
            self._end(one, Status.TRUNCATED, "max_tokens")
        else:
            one.look_ahead()

    def _share_prompt(self, one: Sequence) -> None:
        """Before its caller sees the first token, and may ask for another answer to the same prompt."""
        if one.job.share_prompt and one.job.cache:
            assert one.lease is not None
            self._cache.share(one.lease, one.job.prompt)

    def _measure(self, one: Sequence, now: float) -> None:
        """Rates at the first token, from all chunks: a device may still be busy with the earlier ones when it is handed
        the last. The stages of a restored prompt compute while others are restored: what a restore took is what is
        left without the time that computing its new tokens takes.
        """
        lease, rates = one.lease, self._cache.rates
        assert lease is not None
        assert one.admitted is not None
        seconds, computed = now - one.admitted, (lease.cached_tokens, one.computed)
        if lease.tier is not Tier.DISK:
            rates.prefilled(*computed, seconds)
            return
        alone_s = rates.prefill_s(*computed) or 0.0
        self._cache.measured(lease, max(seconds - alone_s, MIN_RESTORE_SHARE * seconds))

    # -- coming and going ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Whose turn it is gets state and slot; when there is no room for it, nobody overtakes it."""
        while self._slots and not self._full:
            with self._changed:
                turns = self._share.order(self._waiting)
            if not turns:
                return
            one = turns[0]
            with self._faults_end(one):
                self._full = not self._start(one)

    def _start(self, one: Sequence) -> bool:
        """Give a waiting sequence its state and slot; False while there is no room for it."""
        job, admitted = one.job, clock()
        if not self._load_fence(one):
            return False
        lease = self._cache.acquire(
            job.prompt,
            job.max_tokens,
            look_up=job.cache,
            tenant=job.tenant,
            conversation=job.conversation,
            after=one.missed or "no_prefix",
        )
        if lease is None:
            return False
        one.lease, one.slot, one.computed = lease, self._slots.pop(), lease.cached_tokens
        one.admitted = admitted
        one.forced = job.forced if takes_runs(job, truncatable=self._capacity.truncatable) else None
        if not one.ahead:
            one.look_ahead()
        with self._changed:
            self._waiting.remove(one)
            self._running.append(one)
        if uses_history(job) or job.watch is not None:
            self._backend.begin(one.slot, job.prompt.tolist())
        if lease.restoring is None:
            one.restored = clock()
        return True

    def _load_fence(self, one: Sequence) -> bool:
        """Bring a sequence's grammar onto the device; False while those of others need the room."""
        fence = one.job.fence
        if isinstance(fence, HostMatcher):
            one.at = fence
        if not isinstance(fence, TokenTables) or one.place is not None:
            return True
        try:
            one.place = self._backend.load_fence(fence)
        except Overloaded:
            return False
        one.at = fence.machine.begin
        return True

    def _restore(self) -> None:
        """Take the restores further, a little at a time while others wait for their next token."""
        decoding = any(not one.prefilling for one in self._running)
        limit = GROUPS_BESIDE_DECODE if decoding else None
        for one in list(self._running):
            lease = one.lease
            if lease is None or lease.restoring is None:
                continue
            with self._faults_end(one):
                try:
                    lease.restoring.advance(limit)
                except CacheError as error:
                    self._restart(one, lease, error)
                    continue
                if lease.restoring.done:
                    one.restored = clock()
                    self._cache.restored(lease)

    def _restart(self, one: Sequence, lease: Lease, error: CacheError) -> None:
        """A snapshot that could not be restored is a miss: the sequence waits again, in its old place."""
        self._cache.failed(lease, error)
        self._slots.append(one.slot)
        one.missed = "corrupt" if isinstance(error, CorruptSnapshot) else "unavailable"
        one.lease, one.slot, one.computed, one.stage, one.carry, one.admitted = None, -1, 0, 0, None, None
        with self._changed:
            self._running.remove(one)
            self._waiting.append(one)
        self._wake()

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
        watched = one.watch is not None and one.lease is not None
        loops_broken = self._backend.loops_broken(one.slot) if watched else 0
        with self._changed:
            (self._running if one in self._running else self._waiting).remove(one)
            self._share.leave(one.job.tenant)
        if one.place is not None and isinstance(one.job.fence, TokenTables):
            self._backend.release_fence(one.job.fence)
            self._full = False
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
            self._full = False
        else:
            self._metrics.looked_up(Tier.COLD, "not_admitted", one.prompt_tokens, 0)
        outcome = outcome_of(
            one, self._capacity, status, finish, generated, conversation, error, loops_broken=loops_broken
        )
        self._metrics.ended(status, outcome.usage, outcome.timing)
        one.ticket.put(outcome)


def _chunk(one: Sequence, start: int, stop: int) -> Chunk:
    assert one.lease is not None
    return Chunk(
        tokens=one.tokens(start, stop).tolist(),
        start=start,
        pages=one.lease.pages,
        ring=one.lease.ring,
        slot=one.slot,
        sampling=one.job.sampling,
        seed=one.job.seed,
        last=stop == one.known_tokens,
        fence=one.fenced,
        watch=one.watch,
    )


def _run_call(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
