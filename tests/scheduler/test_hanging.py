"""Stores that hang, lie still or fail: nobody waits for ever, and nobody who does not need the store waits at all."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from tests.cache.faulty import Fault, FaultyFiles
from tests.engine.talker import always_restore
from tests.scheduler.device import PATIENCE_S, Bench, answer, result
from tests.scheduler.test_restoring import Make, Shelf
from zllm_jax.cache import SnapshotStore, restore, saver, snapshot_files, snapshots
from zllm_jax.cache.snapshot import namespace_key
from zllm_jax.cache.snapshot_files import Blocks, open_files
from zllm_jax.cache.snapshots import Snapshots
from zllm_jax.values import Status, Tier


def faulty(bench: Make, root: Path, **options: Any) -> tuple[Bench, FaultyFiles]:
    files = FaultyFiles(open_files(root, namespace_key("n")))
    one = bench(SnapshotStore(files, namespace="n", chunk_tokens=8), **options)
    always_restore(one.cache)
    return one, files


def tier_of(one: Bench) -> Snapshots:
    assert one.cache._snapshots is not None
    return one.cache._snapshots


def continued(told: list[int], num_tokens: int = 3) -> list[int]:
    return [*told, *answer(told, num_tokens), 7, 8]


# -- reading -------------------------------------------------------------------------------------------------------


def test_a_disk_that_hangs_costs_one_prompt_its_patience(bench: Make, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(restore, "STALL_S", 0.2)
    shelf = Shelf(bench, tmp_path, seeds=2)
    one = shelf.bench
    shelf.held()
    tokens, outcome = one.run(shelf.prompt(), 4)
    assert (tokens, outcome.usage.tier) == (answer(shelf.prompt(), 4), Tier.COLD)
    assert outcome.timing.total_s >= 0.2
    assert one.cache.counters.failed_restores == 1
    shelf.files.arrived.clear()
    tokens, outcome = one.run(shelf.prompt(1), 4)  # nobody asks that disk for a while
    assert (tokens, outcome.usage.tier) == (answer(shelf.prompt(1), 4), Tier.COLD)
    assert outcome.timing.total_s < PATIENCE_S / 2
    assert not shelf.files.arrived.is_set()
    assert len(shelf.store.list()) == 2  # they are as good as before
    assert one.cache._snapshots is not None
    one.cache._snapshots._hangs_until = 0.0
    shelf.files.let_go()
    one.scheduler.call(lambda: one.cache.forget(keep_disk=True))
    tokens, outcome = one.run(shelf.prompt(1), 4)
    assert (tokens, outcome.usage.tier) == (answer(shelf.prompt(1), 4), Tier.DISK)
    shelf.assert_rooms_home()


def test_a_restore_that_gets_no_memory_is_a_miss(bench: Make, tmp_path: Path, monkeypatch: Any) -> None:
    shelf = Shelf(bench, tmp_path)

    def none_left(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(restore, "aligned_empty", none_left)
    tokens, outcome = shelf.bench.run(shelf.prompt(), 4)
    assert (tokens, outcome.status) == (answer(shelf.prompt(), 4), Status.TRUNCATED)
    assert (outcome.usage.tier, shelf.bench.cache.counters.failed_restores) == (Tier.COLD, 1)
    shelf.assert_rooms_home()


def test_waiting_for_room_is_no_stall(bench: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """A slow but steady disk: who comes second waits until a long restore needs no more rooms."""
    monkeypatch.setattr(restore, "STALL_S", 0.3)
    files = FaultyFiles(open_files(tmp_path, namespace_key("n")))
    one = bench(SnapshotStore(files, namespace="n", chunk_tokens=8), num_pages=300, max_pages=150)
    always_restore(one.cache)
    long, short = [1, *range(399)], [2, *range(19)]
    for told in (long, short):
        one.run(told, 3)
    one.scheduler.call(one.cache.evict)
    read_into = files.read_into

    def slowly(path: str, blocks: Blocks) -> None:
        time.sleep(0.03)
        read_into(path, blocks)

    files.read_into = slowly  # type: ignore[method-assign]
    first = one.submit(continued(long), 2)
    while one.cache._rooms.in_use < restore.NUM_ROOMS:
        time.sleep(0.001)
    second = one.submit(continued(short), 2)
    for ticket, told in ((first, long), (second, short)):
        tokens, outcome = result(ticket)
        assert (tokens, outcome.usage.tier) == (answer(continued(told), 2), Tier.DISK)
    assert outcome.timing.total_s > 0.3
    assert one.cache.counters.failed_restores == 0


# -- writing -------------------------------------------------------------------------------------------------------


def test_streams_go_on_while_another_process_keeps_the_lock(bench: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """A full store: the next save must remove an older one first, and the store has changed meanwhile."""
    monkeypatch.setattr(snapshot_files, "LOCK_WAIT_S", 3.0)
    shelf = Shelf(bench, tmp_path, num_pages=8)
    one = shelf.bench
    shelf.store._max_bytes = shelf.store._shelf._max_bytes = shelf.store.nbytes + 100
    one.run([1] * 20, 3)
    others = open_files(tmp_path, namespace_key("n"))
    with others.exclusive():
        others.announce()
        one.scheduler.call(lambda: one.cache._evictor.make_room(one.cache._residents.pages.size, keep=None))
        for _ in range(3):
            tokens, outcome = one.run([200, 201], 3, cache=False)
            assert tokens == answer([200, 201], 3)
            assert outcome.timing.total_s < 1.0
            one.scheduler.call(one.cache._snapshots.look)  # type: ignore[union-attr]
        assert one.cache.report()["saving"] == 1
    one.scheduler.call(one.cache.evict)
    assert [info.num_tokens for info in shelf.store.list()] == [22]
    assert one.cache.counters.dropped == 0
    shelf.assert_rooms_home()


def test_a_store_that_takes_nothing_keeps_no_memory(bench: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """What waits to be saved is dropped in the end, for the sake of those who wait for its pages."""
    monkeypatch.setattr(saver, "HANG_S", 0.2)
    files = FaultyFiles(open_files(tmp_path, namespace_key("n")))
    one = bench(SnapshotStore(files, namespace="n", chunk_tokens=8), num_pages=8)
    one.run([1] * 20, 3)
    files.plant(Fault("write", "slow", on=True))
    tokens, outcome = one.run([2] * 20, 9)  # nothing else wakes the loop
    assert tokens == answer([2] * 20, 9)
    assert outcome.timing.queue_s >= 0.2
    assert (one.cache.counters.dropped, one.cache.report()["saving"]) == (1, 1)
    tokens, outcome = one.run([3] * 20, 9)
    assert (tokens, one.cache.counters.dropped) == (answer([3] * 20, 9), 2)
    files.gate.set()
    while one.cache.report()["saving"]:
        one.scheduler.call(one.cache.advance)
    one.scheduler.call(one.cache.evict)
    assert sorted(info.num_tokens for info in one.cache._snapshots.store.list()) == [22, 28]  # type: ignore[union-attr]


def test_a_long_call_of_the_device_is_no_hanging_store(bench: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """While the device compiles, nothing is given to the store: that is not the store's fault."""
    monkeypatch.setattr(saver, "HANG_S", 0.3)
    one = bench(SnapshotStore(tmp_path, namespace="n", chunk_tokens=8), num_pages=16, max_pages=16)
    for seed in range(2):
        one.run([seed] * 20, 3)
    one.device.held = True
    running = one.submit([7, 7, 7], 12, cache=False)
    one.device.wait_for_call()
    waiting = one.submit([5] * 30, 4)  # needs the room of both
    one.device.let()
    one.device.wait_for_call()
    assert one.cache.report()["saving"] >= 1
    time.sleep(0.5)  # the call
    one.device.let_go()
    assert result(running)[1].status is Status.TRUNCATED
    assert result(waiting)[0] == answer([5] * 30, 4)
    assert one.cache.counters.dropped == 0


def test_an_operator_is_not_kept_by_a_store_that_hangs(bench: Make, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(saver, "HANG_S", 0.2)
    one, files = faulty(bench, tmp_path)
    one.run([1] * 20, 3)
    files.plant(Fault("write", "slow", on=True))
    assert one.scheduler.call(one.cache.evict) == 0
    assert (one.cache.counters.dropped, len(one.cache._residents)) == (1, 0)
    files.gate.set()


def test_no_event_is_lost_between_two_looks_at_the_saves(bench: Make, tmp_path: Path) -> None:
    """The opening of a save ends after the device's thread has looked for rows to copy, and before it waits."""
    one = bench(SnapshotStore(tmp_path, namespace="n", chunk_tokens=8))
    one.run([1] * 20, 3)
    saves = one.cache._saver
    assert saves is not None
    collect, late = saves._collect, [True]

    def collected() -> Any:
        if saves._jobs and late:
            late.clear()
            with saves._changed:
                assert saves._changed.wait_for(lambda: saves._events > 0, PATIENCE_S)
        return collect()

    saves._collect = collected  # type: ignore[method-assign]
    back = threading.Event()
    thread = threading.Thread(target=lambda: (one.scheduler.call(one.cache.evict), back.set()), daemon=True)
    thread.start()
    assert back.wait(PATIENCE_S / 2)
    assert len(tier_of(one).store.list()) == 1


# -- looking -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["changes", "list", "read"])
def test_streams_go_on_while_the_store_cannot_be_looked_at(bench: Make, tmp_path: Path, verb: str) -> None:
    one, files = faulty(bench, tmp_path, num_pages=32)
    other = bench(SnapshotStore(tmp_path, namespace="n", chunk_tokens=8))
    told = [3, *range(19)]
    other.run(told, 3)
    other.scheduler.call(other.cache.evict)
    files.plant(Fault(verb, "slow", on=True))
    for _ in range(2):
        tokens, outcome = one.run(continued(told), 2)
        assert (tokens, outcome.usage.tier) == (answer(continued(told), 2), Tier.COLD)
        one.scheduler.call(lambda: one.cache.forget(keep_disk=True))
    files.gate.set()
    one.scheduler.call(tier_of(one).look_well)
    tokens, outcome = one.run(continued(told), 2)
    assert (tokens, outcome.usage.tier) == (answer(continued(told), 2), Tier.DISK)


def test_a_failed_save_tells_the_index_what_others_committed(bench: Make, tmp_path: Path) -> None:
    one, files = faulty(bench, tmp_path, num_pages=32)
    other = bench(SnapshotStore(tmp_path, namespace="n", chunk_tokens=8))
    told = [3, *range(19)]
    one.run([1] * 20, 3)
    other.run(told, 3)
    other.scheduler.call(other.cache.evict)
    files.plant(Fault("write", "ENOSPC", on=True))
    one.scheduler.call(one.cache.save)  # gives up, and sees the other's commit while it tidies up
    files.plant()
    assert not tier_of(one).store.changed()
    one.scheduler.call(tier_of(one).look_well)
    assert one.run(continued(told), 2)[1].usage.tier is Tier.DISK


def test_what_cannot_be_quarantined_is_left_alone(bench: Make, tmp_path: Path) -> None:
    one, files = faulty(bench, tmp_path)
    told = [0, *range(19)]
    one.run(told, 3)
    one.scheduler.call(one.cache.evict)
    for path in (tmp_path / namespace_key("n") / "chunks").iterdir():
        data = bytearray(path.read_bytes())
        data[3] ^= 1
        path.write_bytes(data)
    files.plant(Fault("exclusive", "EROFS", on=True))
    for _ in range(4):
        tokens, outcome = one.run(continued(told), 2)
        assert (tokens, outcome.usage.tier) == (answer(continued(told), 2), Tier.COLD)
        one.scheduler.call(lambda: one.cache.forget(keep_disk=True))
        one.scheduler.call(tier_of(one).look_well)
    assert one.cache.counters.failed_restores == 1
    files.plant()


def test_what_is_on_disk_counts_as_saved_while_the_disk_rests(bench: Make, tmp_path: Path) -> None:
    one = bench(SnapshotStore(tmp_path, namespace="n", chunk_tokens=8))
    one.run([9] * 20, 3)
    one.scheduler.call(one.cache.save)
    tier_of(one)._hangs_until = time.monotonic() + 60
    (resident,) = one.cache._residents
    one.scheduler.call(lambda: one.cache._evictor.evict(resident))
    assert (one.cache.report()["saving"], len(one.cache._residents), one.cache.counters.dropped) == (0, 0, 0)


@pytest.mark.parametrize("verb", ["changes", "list", "exclusive"])
def test_an_operator_is_not_kept_by_a_look_that_hangs(bench: Make, tmp_path: Path, monkeypatch: Any, verb: str) -> None:
    monkeypatch.setattr(saver, "HANG_S", 0.2)
    monkeypatch.setattr(snapshots, "PATIENCE_S", 0.2)
    one, files = faulty(bench, tmp_path)
    SnapshotStore(tmp_path, namespace="n", chunk_tokens=8).gc()  # tells the others that it was here
    files.plant(Fault(verb, "slow", on=True))
    one.run([1] * 20, 3)
    one.scheduler.call(one.cache.evict)
    one.scheduler.call(one.cache.forget)
    assert one.run([2] * 20, 3)[0] == answer([2] * 20, 3)
    files.gate.set()


def test_an_old_look_does_not_stand_for_a_new_one(bench: Make, tmp_path: Path) -> None:
    """It ended long ago, and nobody asked for what it saw."""
    one, files = faulty(bench, tmp_path, num_pages=32)
    other = bench(SnapshotStore(tmp_path, namespace="n", chunk_tokens=8))
    files.plant(Fault("changes", "slow"))
    one.run([1] * 20, 3)
    assert tier_of(one)._looking is not None
    files.gate.set()
    told = [3, *range(19)]
    other.run(told, 3)
    other.scheduler.call(other.cache.evict)
    assert wait([tier_of(one)._looking], PATIENCE_S).done  # type: ignore[list-item]
    assert one.run(continued(told), 2)[1].usage.tier is Tier.DISK


def test_what_is_forgotten_while_it_is_saved_does_not_come_back(bench: Make, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(saver, "HANG_S", 0.2)
    one, files = faulty(bench, tmp_path)
    one.run([1] * 20, 3)
    files.plant(Fault("write", "slow", on=True))
    one.scheduler.call(one.cache.evict)
    one.scheduler.call(one.cache.forget)
    files.gate.set()
    while one.cache.report()["saving"]:
        one.scheduler.call(one.cache.advance)
    one.scheduler.call(tier_of(one).settle)
    assert (tier_of(one).store.list(), list(tier_of(one))) == ([], [])


def test_a_slow_store_does_not_hang(bench: Make, tmp_path: Path, monkeypatch: Any) -> None:
    """Each piece takes its time, and all together more than anybody would wait for one."""
    monkeypatch.setattr(saver, "HANG_S", 0.4)
    one, files = faulty(bench, tmp_path, num_pages=64, max_pages=64)
    write = files.write

    def slowly(path: str, data: Any) -> Any:
        time.sleep(0.06)
        return write(path, data)

    files.write = slowly  # type: ignore[method-assign]
    one.run([*range(80)], 3)
    began = time.monotonic()
    one.scheduler.call(one.cache.evict)
    assert time.monotonic() - began > 0.4
    assert (one.cache.counters.dropped, len(tier_of(one).store.list())) == (0, 1)


def test_closing_does_not_wait_for_ever(bench: Make, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(saver, "HANG_S", 0.2)
    one, files = faulty(bench, tmp_path)
    one.run([1] * 20, 3)
    files.plant(Fault("write", "slow", on=True))
    one.scheduler.close(save=True)
    files.gate.set()


def test_what_is_being_deleted_is_not_indexed_by_a_look_that_began_before(bench: Make, tmp_path: Path) -> None:
    one, files = faulty(bench, tmp_path)
    other = bench(SnapshotStore(tmp_path, namespace="n", chunk_tokens=8))
    other.run([3] * 20, 3)
    other.scheduler.call(other.cache.evict)
    tier = tier_of(one)
    files.plant(Fault("read", "slow", at=1))  # the first is of who lists it, the second of who indexes it
    one.scheduler.call(tier.look)
    assert tier._looking is not None
    while not tier.store.list():
        time.sleep(0.001)
    (info,) = tier.store.list()

    def delete() -> None:
        with others.exclusive():
            tier.delete(info.id)
            files.gate.set()
            assert wait([tier._looking], PATIENCE_S).done  # type: ignore[list-item]
            tier._end_look(0.0)
            assert (list(tier), list(tier._leaving)) == ([], [info.id])

    others = open_files(tmp_path, namespace_key("n"))
    one.scheduler.call(delete)
    one.scheduler.call(tier.settle)
    assert (list(tier), tier.store.list()) == ([], [])
