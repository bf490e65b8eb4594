"""Restores beside running sequences: nobody waits for a disk but who asked for what is on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.talker import always_restore
from tests.scheduler.device import PATIENCE_S, Bench, answer, result
from zllm_jax.cache import SnapshotStore
from zllm_jax.cache.snapshot import namespace_key
from zllm_jax.cache.snapshot_files import Blocks, Files, open_files
from zllm_jax.cache.snapshot_writer import chunk_path
from zllm_jax.errors import StoreUnavailable
from zllm_jax.scheduler import Ticket
from zllm_jax.values import Status, Tier

Make = Callable[..., Bench]


class GatedFiles:
    """Files whose reads of chunks wait at `gate` (those of `held`, None: all), then fail where `failing`."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.held: set[str] | None = set()
        self.failing = False
        self.gate, self.arrived = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def read_into(self, path: str, blocks: Blocks) -> None:
        if self.held is None or path in self.held:
            self.arrived.set()
            assert self.gate.wait(PATIENCE_S), "the test opened no gate"
            if self.failing:
                raise StoreUnavailable(f"{path}: the network is down")
        self._files.read_into(path, blocks)

    def wait_for_read(self) -> None:
        assert self.arrived.wait(PATIENCE_S), "nobody read"

    def let_go(self) -> None:
        self.held = set()
        self.gate.set()


class Shelf:
    """A bench whose conversations [seed, 0, 1, ...] of 22 tokens are on disk, behind a gate."""

    def __init__(self, make: Make, root: Path, seeds: int = 1, **options: Any) -> None:
        self.files = GatedFiles(open_files(root, namespace_key("n")))
        self.store = SnapshotStore(self.files, namespace="n", chunk_tokens=8)
        self.bench = make(self.store, **options)
        always_restore(self.bench.cache)
        for seed in range(seeds):
            self.bench.run(self.told(seed), 3)
        self.bench.scheduler.call(self.bench.cache.evict)
        assert len(self.store.list()) == seeds

    def told(self, seed: int = 0) -> list[int]:
        return [seed, *range(19)]

    def prompt(self, seed: int = 0) -> list[int]:
        """What goes on where a conversation on disk ended."""
        return [*self.told(seed), *answer(self.told(seed), 3), 7, 8, 9]

    def paths(self, stage: int) -> set[str]:
        """The files of one stage of all that is on disk."""
        found = set()
        for info in self.store.list():
            with self.store.reader(info.id, self.bench.device.row_layout) as reader:
                found |= {chunk_path(piece.chunks[stage]) for piece in reader._manifest.pieces}
        return found

    def held(self, stage: int | None = None) -> None:
        self.files.held = self.paths(stage) if stage is not None else None

    def assert_rooms_home(self) -> None:
        self.files.let_go()
        self.bench.close()
        assert self.bench.cache._rooms.in_use == 0


def test_a_stream_goes_on_while_reads_hang(bench: Make, tmp_path: Path) -> None:
    shelf = Shelf(bench, tmp_path)
    one = shelf.bench
    shelf.held()
    restored = one.submit(shelf.prompt(), 4)
    shelf.files.wait_for_read()
    before = len(one.device.batches)
    assert one.run([200, 201], 10)[0] == answer([200, 201], 10)
    assert one.device.batches[before:] == [(1, 1)] * 9  # alone, a token a call: a prompt is unfinished
    assert restored.take() == []
    assert one.cache.report()["buffers"]["in_use"] > 0
    shelf.files.let_go()
    tokens, outcome = result(restored)
    assert tokens == answer(shelf.prompt(), 4)
    assert (outcome.usage.tier, outcome.usage.cached_tokens) == (Tier.DISK, 22)
    shelf.assert_rooms_home()


def cancelled(one: Bench, prompt: list[int]) -> tuple[Ticket, Callable[[], None]]:
    ticket = one.submit(prompt, 4)
    return ticket, ticket.cancel


def late(one: Bench, prompt: list[int]) -> tuple[Ticket, Callable[[], None]]:
    return one.submit(prompt, 4, timeout_s=0.5), lambda: None


@pytest.mark.parametrize(
    ("start", "status"), [(cancelled, Status.CANCELED), (late, Status.TRANSPORT_FAILURE)], ids=["cancel", "deadline"]
)
def test_who_leaves_while_reads_hang_takes_nothing_along(
    bench: Make, tmp_path: Path, start: Callable[..., tuple[Ticket, Callable[[], None]]], status: Status
) -> None:
    """Nothing else runs: a deadline needs nobody to be noticed."""
    shelf = Shelf(bench, tmp_path, num_slots=1)
    one = shelf.bench
    shelf.held()
    ticket, leave = start(one, shelf.prompt())
    shelf.files.wait_for_read()
    leave()
    tokens, outcome = result(ticket)
    assert (tokens, outcome.status) == ([], status)
    assert outcome.timing.total_s < PATIENCE_S / 2  # not when the reads gave up
    report = one.cache.report()
    assert report["pages"]["free"] == report["pages"]["total"]
    assert one.run([200, 201], 3)[0] == answer([200, 201], 3)  # the slot is free though the reads still hang
    shelf.files.let_go()
    tokens, outcome = one.run(shelf.prompt(), 4)
    assert (tokens, outcome.usage.tier) == (answer(shelf.prompt(), 4), Tier.DISK)
    shelf.assert_rooms_home()


def test_a_read_that_fails_when_a_stage_was_computed_is_a_miss_counted_once(bench: Make, tmp_path: Path) -> None:
    shelf = Shelf(bench, tmp_path)
    one = shelf.bench
    shelf.held(stage=1)
    shelf.files.failing = True
    hits = dict(one.cache.counters.hits)
    one.device.held = True
    ticket = one.submit(shelf.prompt(), 4)
    while "prefill_stage" not in one.device.calls:
        one.device.wait_for_call()
        one.device.let()
    shelf.files.gate.set()
    one.device.let_go()
    tokens, outcome = result(ticket)
    assert tokens == answer(shelf.prompt(), 4)
    assert (outcome.status, outcome.usage.tier, outcome.usage.cached_tokens) == (Status.TRUNCATED, Tier.COLD, 0)
    assert one.cache.counters.failed_restores == 1
    assert one.cache.counters.hits == hits | {Tier.COLD: hits[Tier.COLD] + 1}
    looked = [line for line in one.cache.metrics.render().decode().splitlines() if 'reason="unavailable"' in line]
    assert any(line.endswith(" 1.0") for line in looked)
    assert not [line for line in looked if line.endswith(" 2.0")]
    shelf.assert_rooms_home()


@pytest.mark.parametrize("staged", [True, False])
def test_restores_at_once_share_few_rooms_whose_copies_end_late(bench: Make, tmp_path: Path, staged: bool) -> None:
    shelf = Shelf(bench, tmp_path, seeds=4, num_pages=64, hold_copies=True)
    shelf.bench.cache.staged = staged
    shelf.held()
    tickets = [shelf.bench.submit(shelf.prompt(seed), 4) for seed in range(4)]
    shelf.files.wait_for_read()
    shelf.files.let_go()
    for seed, ticket in enumerate(tickets):
        tokens, outcome = result(ticket)
        assert tokens == answer(shelf.prompt(seed), 4)
        assert (outcome.usage.tier, outcome.usage.cached_tokens) == (Tier.DISK, 22)
    shelf.assert_rooms_home()
