"""A sequence: one request on its way through the device, with the instants at which it moved on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import numpy as np

from zllm_jax.cache import Lease
from zllm_jax.fence import ForcedRuns, HostMatcher, Place, Position, TokenTables
from zllm_jax.runtime import Drawn, Fenced, Row, Watched
from zllm_jax.values import Sampling, Status, Telemetry, Tier, Timing, Usage

log = logging.getLogger(__name__)
clock = time.perf_counter


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the scheduler is asked to compute: token ids in, token ids out.

    prompt: i32[S]. stop_ids: ids that end the output. single_step: decode one step a call, for a caller that may
    stop at any token of a state that cannot be truncated. fence: what the output must obey: tables for the device, or
    a matcher at the beginning of the text. forced: appends what it leaves no choice about; None: that is drawn as all
    the rest. watch: the loop guard sees it; `inside` as the prompt ends. deadline: on `clock`, or None. The tenant, the
    priority, the conversation and `share_prompt` are those of `values.Request`.
    """

    request_id: str
    prompt: np.ndarray
    max_tokens: int
    sampling: Sampling
    seed: int
    stop_ids: tuple[int, ...] = ()
    cache: bool = True
    tenant: str = ""
    priority: int = 0
    conversation: str | None = None
    share_prompt: bool = False
    fence: TokenTables | HostMatcher | None = None
    watch: Watched | None = None
    forced: ForcedRuns | None = None
    single_step: bool = False
    started: float = field(default_factory=clock)
    deadline: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a sequence ended; `ended` on `clock`, so that the caller can add its own time after it."""

    status: Status
    usage: Usage
    timing: Timing
    telemetry: Telemetry
    conversation: str | None
    ended: float
    error: str | None = None


Event = list[Drawn] | Outcome


class Ticket:
    """The caller's end of a sequence: tokens come out in order, then one `Outcome`. Any thread may use it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events: deque[Event] = deque()
        self._ready = threading.Condition()
        self._notify: Callable[[], None] | None = None
        self._wake = wake
        self.cancelled = False
        self.keep_tokens: int | None = None

    def put(self, event: Event) -> None:
        with self._ready:
            self._events.append(event)
            self._ready.notify_all()
            notify = self._notify
        if notify is not None:
            self._tell(notify)

    def _tell(self, notify: Callable[[], None]) -> None:
        """The scheduler outlives its callers: one whose event loop is gone has gone away itself."""
        try:
            notify()
        except Exception as error:
            log.warning("a caller that cannot be told of its tokens is taken as gone: %s", error)
            self.cancelled = True

    def on_event(self, notify: Callable[[], None]) -> None:
        """Call `notify` (from the scheduler's thread) whenever `take` may have something new."""
        with self._ready:
            self._notify = notify
        notify()

    def take(self) -> list[Event]:
        """Everything that has come so far, without waiting."""
        with self._ready:
            events = list(self._events)
            self._events.clear()
        return events

    def wait(self) -> list[Event]:
        """At least one event."""
        with self._ready:
            self._ready.wait_for(lambda: self._events)
        return self.take()

    def cancel(self) -> None:
        """End within one decode call; what was computed is kept out of the cache."""
        self.cancelled = True
        self._wake()

    def stop_after(self, num_tokens: int) -> None:
        """The output is complete with its first `num_tokens` tokens (a stop sequence was seen in the text)."""
        self.keep_tokens = num_tokens
        self._wake()


_numbers = count()


@dataclass(eq=False)
class Sequence:
    """A job's mutable state inside the scheduler."""

    job: Job
    ticket: Ticket
    number: int = field(default_factory=_numbers.__next__)
    submitted: float = field(default_factory=clock)
    slot: int = -1
    lease: Lease | None = None
    computed: int = 0  # tokens whose rows are in the state
    stage: int = 0  # of the chunk under way, stages computed
    carry: Any = None  # what they left for the next
    missed: str | None = None  # why a snapshot could not be restored
    drawn: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)  # forced behind those, and not yet computed
    num_forced: int = 0  # of those drawn
    place: Place | None = None  # of the fence, on the device
    forced: ForcedRuns | None = None  # the job's, where it can have runs
    at: Position | HostMatcher | None = None  # how far the output has come in it, with what is ahead
    watch: Watched | None = field(init=False)  # the job's, `inside` where the output stands
    admitted: float | None = None
    restored: float | None = None
    first: float | None = None
    latest: float | None = None

    def __post_init__(self) -> None:
        self.watch = self.job.watch

    @property
    def prompt_tokens(self) -> int:
        return len(self.job.prompt)

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prompt_tokens or bool(self.ahead)

    @property
    def known_tokens(self) -> int:
        """How many tokens there are to feed before the next one is drawn."""
        return self.prompt_tokens + len(self.drawn) + len(self.ahead)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """i32[stop - start]: of prompt and output."""
        after = np.array([*self.drawn, *self.ahead], np.int32)
        first = max(0, start - self.prompt_tokens)
        return np.concatenate([self.job.prompt[start:stop], after[first : max(0, stop - self.prompt_tokens)]])

    @property
    def left(self) -> int:
        return self.job.max_tokens - len(self.drawn)

    @property
    def fenced(self) -> Fenced | HostMatcher | None:
        """What the next token must obey."""
        if isinstance(self.at, HostMatcher):
            return self.at
        return None if self.place is None or self.at is None else Fenced(self.place, self.at)

    def follow(self, tokens: Sequences[int]) -> None:
        """Let fence and loop guard see what was drawn."""
        if self.watch is not None:
            self.watch = self.watch.after(tokens)
        fence = self.job.fence
        if isinstance(self.at, HostMatcher):
            self.at = self.at.advance_all(tokens)
        elif isinstance(fence, TokenTables) and self.at is not None:
            for token in tokens:
                self.at = fence.machine.run(fence.vocabulary.tokens[token], self.at)

    def look_ahead(self) -> None:
        """Append the run that the fence forces here, all but the last token of the budget, which is drawn."""
        fence = self.job.fence
        if self.forced is None or not isinstance(fence, TokenTables) or not isinstance(self.at, Position):
            return
        self.ahead = self.forced.after(fence, self.at, self.drawn)[: self.left - 1]
        self.follow(self.ahead)

    def take(self, tokens: list[int]) -> None:
        """These were drawn, after what was ahead."""
        self.num_forced += len(self.ahead)
        self.drawn += [*self.ahead, *tokens]
        self.ahead = []
        self.computed = self.known_tokens - 1
        self.follow(tokens)

    @property
    def breaks_off(self) -> str:
        """Why the output may not end where it stands; empty where it may."""
        fence = self.job.fence
        if isinstance(self.at, HostMatcher):
            return "" if self.at.ended else f"the fence left no token to go on with{self.at.because}"
        if not isinstance(fence, TokenTables) or self.at is None or fence.machine.ended(self.at):
            return ""
        return "the fence left no token to go on with"

    def stages_ready(self, num_stages: int) -> int:
        """How many stages have all the rows that they need."""
        restoring = self.lease.restoring if self.lease is not None else None
        return num_stages if restoring is None else restoring.stages_ready

    def state_tokens(self) -> np.ndarray:
        """The tokens whose rows the state holds: never the last drawn one, which was not fed."""
        return self.tokens(0, self.computed)

    def timing(self, ended: float) -> Timing:
        """The instants as durations. A part that was not reached is 0, and the last one reached takes the rest."""
        marks = [self.job.started, self.submitted, self.admitted, self.restored, self.first, self.latest]
        reached = [mark for mark in marks if mark is not None] + [ended]
        spans = [max(0.0, after - before) for before, after in pairwise(reached)]
        spans += [0.0] * (6 - len(spans))
        return Timing(
            prep_s=spans[0], queue_s=spans[1], restore_s=spans[2], prefill_s=spans[3], decode_s=spans[4],
            post_s=spans[5],
        )  # fmt: skip

    def usage(self, generated: int) -> Usage:
        lease = self.lease
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=lease.cached_tokens if lease else 0,
            generated_tokens=generated,
            tier=lease.tier if lease else Tier.COLD,
        )


def row_of(one: Sequence) -> Row:
    """The next decode step of a sequence."""
    assert one.lease is not None
    return Row(
        token=one.drawn[-1],
        position=one.computed,
        pages=one.lease.pages,
        ring=one.lease.ring,
        slot=one.slot,
        sampling=one.job.sampling,
        seed=one.job.seed,
        budget=one.left,
        stop_ids=one.job.stop_ids,
        fence=one.fenced,
        watch=one.watch,
        pauses=one.forced is not None,
    )


def takes_runs(job: Job, *, truncatable: bool) -> bool:
    """Whether tokens may be appended unseen: nobody wants their log-probabilities, neither penalties nor the loop guard
    count them on the device, and the caller does not stop in their midst where the state could not be cut.
    """
    seen = job.sampling.logprobs is not None or uses_history(job) or job.watch is not None
    return not seen and (truncatable or not job.single_step)


def uses_history(job: Job) -> bool:
    """Whether the job's penalties need to know which tokens there were."""
    one = job.sampling
    return (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) != (1.0, 0.0, 0.0)
