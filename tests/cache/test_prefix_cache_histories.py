"""Any history of turns, forks, cancellations, evictions, restarts and broken files: right tokens, and pages go home."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from tests.cache.driver import Driver, Turn, continuation, open_store
from zllm_jax.testing import ScriptedBackend

PAGE, MAX_PAGES = 4, 6


def turns() -> st.SearchStrategy[tuple[int, list[int], int]]:
    """How much of a history is kept, what is added to it, and how many tokens may be generated."""
    kept = st.one_of(st.just(PAGE * MAX_PAGES), st.integers(1, PAGE * MAX_PAGES))
    return st.tuples(kept, st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(1, 6))


class Histories(RuleBasedStateMachine):
    """Every output is checked against a device that never cached anything, and every row against its history."""

    window = 0
    known = Bundle("known")  # token sequences that conversations ended with

    @initialize(target=known)
    def open(self) -> object:
        self.folder = Path(tempfile.mkdtemp(prefix="histories-"))
        self.running: list[Turn] = []
        self.start_driver()
        return multiple(*((topic,) * 3 for topic in range(3)))

    def start_driver(self) -> None:
        backend = ScriptedBackend(
            num_pages=2 * MAX_PAGES, page_tokens=PAGE, max_pages=MAX_PAGES, window=self.window, num_rings=3
        )
        self.driver = Driver(backend, open_store(self.folder, max_bytes=20_000))

    @rule(target=known, turn=turns(), history=known)
    def a_turn(self, turn: tuple[int, list[int], int], history: tuple[int, ...]) -> object:
        """From a known history, or a part of it, to its end."""
        started = self.begin(history, *turn)
        return self.end(started) if started is not None else multiple()

    @rule(turn=turns(), history=known)
    def a_start(self, turn: tuple[int, list[int], int], history: tuple[int, ...]) -> None:
        started = self.begin(history, *turn)
        if started is not None:
            self.running.append(started)

    @precondition(lambda self: self.running)
    @rule(target=known, number=st.integers(0, 3))
    def finish(self, number: int) -> object:
        return self.end(self.running.pop(number % len(self.running)))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 3))
    def abort(self, number: int) -> None:
        self.driver.cache.abort(self.running.pop(number % len(self.running)).lease)

    @rule()
    def evict(self) -> None:
        self.driver.cache.evict()

    @rule()
    def restart(self) -> None:
        """A new process on the same files: the device is empty, the disk is not."""
        for turn in self.running:
            self.driver.cache.abort(turn.lease)
        self.running.clear()
        self.driver.close()
        self.start_driver()

    @rule(byte=st.integers(0, 1 << 16))
    def rot(self, byte: int) -> None:
        """A bit of some chunk file flips."""
        files = sorted(self.folder.glob("*/chunks/*"))
        if files:
            data = bytearray(files[byte % len(files)].read_bytes())
            data[byte % len(data)] ^= 1 << byte % 8
            files[byte % len(files)].write_bytes(data)

    def begin(self, history: tuple[int, ...], kept: int, tail: list[int], max_tokens: int) -> Turn | None:
        prompt = [*history[:kept], *tail][: PAGE * MAX_PAGES - max_tokens]
        turn = self.driver.start(prompt, max_tokens)
        if turn is None:
            assert self.running, "nothing runs, so there must be room"
        else:
            self.check(turn)
        return turn

    def end(self, turn: Turn) -> tuple[int, ...]:
        while len(turn.output) < turn.max_tokens:
            self.driver.step(turn, 2)
        self.check(turn)
        self.driver.finish(turn)
        return (*turn.prompt, *turn.output)

    def check(self, turn: Turn) -> None:
        assert turn.output == continuation(turn.prompt, len(turn.output))

    @invariant()
    def every_page_has_its_owners(self) -> None:
        cache, capacity = self.driver.cache, self.driver.backend.capacity
        owners = [0] * capacity.num_pages
        for one in [*cache._residents, *(turn.lease for turn in self.running)]:
            for page in one.pages:
                owners[page] += 1
        assert owners == [cache._residents.pages.owners(page) for page in range(capacity.num_pages)]
        if self.window:
            held = len(cache._residents) + len(self.running)
            assert cache.report()["rings"]["free"] == capacity.num_rings - held
        assert cache._snapshots is not None
        patience_ends = time.monotonic() + 20  # what is still being saved enters the list at any moment
        while True:
            cache._snapshots.settle()
            listed, indexed = {entry["id"] for entry in cache.report()["disk"]}, set(cache._snapshots)
            if listed == indexed or time.monotonic() > patience_ends:
                break
        assert listed == indexed

    def teardown(self) -> None:
        for turn in self.running:
            self.driver.cache.abort(turn.lease)
        self.driver.assert_all_home()
        self.driver.close()
        shutil.rmtree(self.folder)


class RingHistories(Histories):
    window = 3


_SETTINGS = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestHistories = Histories.TestCase
TestHistories.settings = _SETTINGS
TestRingHistories = RingHistories.TestCase
TestRingHistories.settings = _SETTINGS
