"""A scheduler over a scripted device that can be held, watched and broken."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from zllm_jax.cache import PrefixCache, SnapshotStore
from zllm_jax.runtime import Drawn, Row
from zllm_jax.scheduler import Job, Outcome, Scheduler, Ticket, clock
from zllm_jax.testing import ScriptedBackend, chained_token
from zllm_jax.values import Sampling

GREEDY = Sampling(temperature=0.0)
PATIENCE_S = 20.0


class Device(ScriptedBackend):
    """Counts its calls; while `held`, waits before each one for `let`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, before=self._before)
        self.calls: list[str] = []
        self.batches: list[tuple[int, int]] = []  # rows and steps of each decode call
        self.failing: dict[str, Exception] = {}
        self.held = False
        self._permits = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)

    def decode(self, rows: Sequence[Row], steps: int) -> list[list[Drawn]]:
        self.batches.append((len(rows), steps))
        return super().decode(rows, steps)

    def wait_for_call(self) -> None:
        """Until the scheduler stands at the door of the next call."""
        assert self._arrived.acquire(timeout=PATIENCE_S), "the scheduler made no call"

    def let(self, count: int = 1) -> None:
        self._permits.release(count)

    def let_go(self) -> None:
        self.held = False
        self._permits.release(1 << 10)

    def _before(self, name: str) -> None:
        self.calls.append(name)
        if self.held:
            self._arrived.release()
            assert self._permits.acquire(timeout=PATIENCE_S), "the test let no call through"
        if name in self.failing:
            raise self.failing[name]


class Bench:
    """A device, its cache and its scheduler."""

    def __init__(self, store: SnapshotStore | None = None, *, max_queue: int = 64, **options: Any) -> None:
        self.device = Device(**options)
        self.cache = PrefixCache(self.device, store)
        self.scheduler = Scheduler(self.device, self.cache, max_seq_tokens=1 << 20, max_queue=max_queue)

    def submit(self, tokens: Sequence[int], max_tokens: int = 8, **options: Any) -> Ticket:
        return self.scheduler.submit(job(tokens, max_tokens, **options))

    def run(self, tokens: Sequence[int], max_tokens: int = 8, **options: Any) -> tuple[list[int], Outcome]:
        return result(self.submit(tokens, max_tokens, **options))

    def assert_all_home(self) -> None:
        self.scheduler.call(self.cache.forget)
        report = self.cache.report()
        assert report["pages"]["free"] == report["pages"]["total"]
        assert report["rings"]["free"] == report["rings"]["total"]
        assert sorted(self.scheduler._slots) == list(range(self.device.capacity.num_slots))
        assert self.scheduler.report() | {"waiting": 0, "running": 0} == self.scheduler.report()

    def close(self) -> None:
        self.device.failing.clear()
        self.device.let_go()
        if not self.scheduler._closing:
            self.assert_all_home()
        self.scheduler.close()


def job(tokens: Sequence[int], max_tokens: int = 8, **options: Any) -> Job:
    fields = {"request_id": "r", "sampling": GREEDY, "seed": 0, **options}
    if timeout_s := fields.pop("timeout_s", None):
        fields["deadline"] = clock() + timeout_s
    return Job(prompt=np.array(tokens, np.int32), max_tokens=max_tokens, **fields)


def result(ticket: Ticket) -> tuple[list[int], Outcome]:
    """Everything that comes out of a ticket."""
    tokens: list[int] = []
    while True:
        for event in ticket.wait():
            if isinstance(event, Outcome):
                return tokens, event
            tokens += [drawn.token for drawn in event]


def answer(tokens: Sequence[int], num_tokens: int, sampling: Sampling = GREEDY, seed: int = 0) -> list[int]:
    """What the device says, computed alone."""
    history = list(tokens)
    for _ in range(num_tokens):
        history.append(chained_token(history, sampling, seed))
    return history[len(tokens) :]
