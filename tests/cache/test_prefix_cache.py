"""The two tiers together: who is hit, what is copied, what is evicted, and that it all comes back bit for bit."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.driver import Driver, continuation, open_store, prompt
from zllm_jax.cache import SnapshotStore
from zllm_jax.cache.policy import Lru
from zllm_jax.errors import StoreUnavailable
from zllm_jax.testing import ScriptedBackend
from zllm_jax.values import Tier

WINDOW = 6


def driver(store: SnapshotStore | None = None, **options: Any) -> Driver:
    return Driver(ScriptedBackend(**options), store)


@pytest.fixture(params=[0, WINDOW], ids=["paged", "ring"])
def window(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# -- look-up -------------------------------------------------------------------------------------------------------


def test_cold_resident_disk_and_each_counted(tmp_path: Path, window: int) -> None:
    one = driver(open_store(tmp_path), window=window)
    first = one.run(prompt(20))
    assert (first.lease.tier, first.lease.cached_tokens) == (Tier.COLD, 0)
    longer = [*first.rows, 7, 8, 9]
    assert one.hit(longer) == (Tier.RESIDENT, len(first.rows))
    one.cache.evict()
    assert one.hit(longer) == (Tier.DISK, len(first.rows))
    assert one.cache.report()["hits"] == {"cold": 1, "resident": 1, "disk": 1}
    assert one.cache.counters.prompt_tokens == 20 + 2 * len(longer)
    assert one.cache.counters.cached_tokens == 2 * len(first.rows)


def test_the_last_token_of_a_prompt_is_always_computed(tmp_path: Path) -> None:
    """A prompt that is stored whole still needs its last row computed to predict the next token."""
    one = driver(open_store(tmp_path))
    first = one.run(prompt(20))
    for evict in (False, True):
        if evict:
            one.cache.evict()
        assert one.hit(first.rows)[1] == len(first.rows) - 1
        assert one.hit(first.prompt)[1] == len(first.prompt) - 1


def test_a_longer_prefix_on_disk_wins_over_a_shorter_one_on_the_device(tmp_path: Path) -> None:
    one = driver(open_store(tmp_path))
    deep = one.run(prompt(40))
    one.cache.evict()
    shallow = one.run([*deep.prompt[:8], 1, 2, 3], look_up=False)
    assert one.hit([*deep.rows, 5]) == (Tier.DISK, len(deep.rows))
    assert one.hit([*shallow.rows, 5]) == (Tier.RESIDENT, len(shallow.rows))


def test_recomputing_wins_when_reading_is_measured_to_be_slower(tmp_path: Path) -> None:
    one = driver(open_store(tmp_path))
    deep = one.run(prompt(40))
    one.cache.evict()
    one.run([*deep.prompt[:8], 1, 2, 3], look_up=False)
    for _ in range(2):  # the first of each is left out
        one.cache.rates.restored(1, 1.0)
        one.cache.rates.prefilled(0, 1000, 1.0)
    assert one.hit([*deep.rows, 5]) == (Tier.RESIDENT, 8)


def with_late_tokens_dear(one: Driver) -> Driver:
    """Each token costs 10 ms, and a millisecond for each before it."""
    for stop in (1, 10, 40, 20, 80):
        one.cache.rates.prefilled(0, stop, 0.010 * stop + 0.001 * stop**2 / 2)
        one.cache.rates.restored(1, 1e-6)
    return one


def test_what_a_restore_saves_is_predicted_from_where_its_tokens_stand(tmp_path: Path) -> None:
    one = with_late_tokens_dear(driver(open_store(tmp_path)))
    deep = one.run(prompt(40))
    one.cache.evict()
    one.run([*deep.prompt[:8], 1, 2, 3], look_up=False)
    lease = one.cache.acquire(np.array([*deep.rows, 5], np.int32), 1)
    assert lease is not None
    assert lease.predicted is not None
    here, there = 8, len(deep.rows)
    wanted = 0.010 * (there - here) + 0.001 * (there**2 - here**2) / 2
    assert lease.predicted.compute_s == pytest.approx(wanted)
    one.cache.abort(lease)


def test_of_equal_tails_the_later_one_is_kept() -> None:
    """The same bytes, the same use: computing the later one anew takes longer."""
    one = with_late_tokens_dear(driver())
    whole = one.run(prompt(48))
    fork = one.run([*whole.prompt[:40], *[7] * 8])
    alone = one.run(prompt(8, 1))
    by_length = {
        len(state.tokens): one.cache._evictor._saved_s(state, 8)
        for state in one.cache._residents
        if len(state.tokens) in (len(fork.rows), len(alone.rows))
    }
    early_s, late_s = by_length[len(alone.rows)], by_length[len(fork.rows)]
    assert late_s > 2 * early_s


def test_tokens_after_the_first_difference_are_never_reused(window: int) -> None:
    one = driver(window=window)
    first = one.run(prompt(20))
    changed = [*first.rows[:10], 255 - first.rows[10], *first.rows[11:], 1]
    expected = (Tier.COLD, 0) if window else (Tier.RESIDENT, 10)  # a ring is reused only where it ended
    assert one.hit(changed) == expected


def test_a_ring_is_hit_at_its_very_end_only(tmp_path: Path) -> None:
    one = driver(open_store(tmp_path), window=WINDOW)
    first = one.run(prompt(20))
    second = one.run([*first.rows, 3, 1, 4])
    assert second.lease.cached_tokens == len(first.rows)
    for _ in range(2):
        assert one.hit(first.rows)[1] == 0  # its own last token would have to be cut off
        assert one.hit(second.rows[:-2])[1] == len(first.rows)  # the earlier turn is kept for a retry
        assert one.hit([*second.rows, 9])[1] == len(second.rows)
        one.cache.evict()


def test_look_up_can_be_declined() -> None:
    one = driver()
    first = one.run(prompt(20))
    again = one.run(first.prompt, look_up=False)
    assert (again.lease.tier, again.lease.cached_tokens) == (Tier.COLD, 0)


# -- sharing -------------------------------------------------------------------------------------------------------


def test_a_fork_costs_only_its_own_tail(window: int) -> None:
    one = driver(window=window)
    first = one.run(prompt(20))  # 27 rows: 6 whole pages of 4 and a partial one
    assert len(first.rows) == 27
    before = one.cache.report()["pages"]["free"]
    forks = [one.start([*first.rows, tail], 4) for tail in range(3)]
    for fork in forks:
        assert fork is not None
        assert fork.lease.pages[:6] == first.lease.pages[:6]
        assert fork.lease.pages[6] not in first.lease.pages
        c = one.backend.capacity
        assert fork.lease.bytes_copied == c.page_bytes + c.ring_bytes
    assert before - one.cache.report()["pages"]["free"] == 3 * 2
    for fork in forks:  # interleaved on shared pages, each goes on as if alone
        assert fork is not None
        one.step(fork, 3)
        assert fork.output == continuation(fork.prompt, 4)
        one.finish(fork)
    assert one.hit([*first.rows, 99]) == (Tier.RESIDENT, 27)


def test_a_fork_at_a_page_border_copies_nothing() -> None:
    one = driver()
    first = one.run(prompt(17))
    assert len(first.rows) == 24
    fork = one.start([*first.rows, 1])
    assert fork is not None
    assert fork.lease.bytes_copied == 0


def test_the_report_shows_which_pages_are_shared() -> None:
    one = driver()
    first = one.run(prompt(20))  # 27 rows: 6 whole pages of 4 and a partial one
    one.run([*first.rows, 98])
    one.run([*first.rows, 99])
    left, right = (resident["page_ids"] for resident in one.cache.report()["resident"])
    assert left[:6] == right[:6] == first.lease.pages[:6]
    assert not set(left[6:]) & set(right[6:])
    assert [len(left), len(right)] == [resident["pages"] for resident in one.cache.report()["resident"]]


def test_a_continuation_replaces_what_it_continues() -> None:
    one = driver()
    first = one.run(prompt(20))
    second = one.run([*first.rows, 1, 2])
    (resident,) = one.cache.report()["resident"]
    assert resident["tokens"] == len(second.rows)
    one.assert_all_home()


# -- eviction ------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    one = Driver(ScriptedBackend(num_pages=17, max_pages=8), open_store(tmp_path), policy=Lru())
    turns = [one.run(prompt(9, seed)) for seed in range(4)]  # 4 pages each, 5 while it runs: all resident
    assert one.hit([*turns[0].rows, 1])[0] is Tier.RESIDENT  # used again, after the others; evicts one for room
    one.run(prompt(9, 9))
    here = [one.cache._residents.usable(np.array(turns[seed].rows, np.int32), "") is not None for seed in range(2)]
    assert here == [True, False]
    assert one.hit([*turns[1].rows, 1])[0] is Tier.DISK


def test_evicted_is_restored_bit_for_bit(tmp_path: Path, window: int) -> None:
    one = driver(open_store(tmp_path), window=window)
    first = one.run(prompt(30))
    saved = one.rows(first.lease, len(first.rows))
    assert one.cache.evict() > 0
    assert one.cache.report()["resident"] == []
    one.spoil()
    again = one.acquire([*first.rows, 1])
    assert again is not None
    assert again.tier is Tier.DISK
    assert again.bytes_read == one.cache.report()["disk_bytes"]
    restored = one.rows(again, len(first.rows))
    assert restored.keys() == saved.keys()
    assert len(saved) == (4 if window else 2)
    assert all(restored[name].tobytes() == saved[name].tobytes() for name in saved)
    one.cache.abort(again)


def test_a_conversation_that_fills_memory_does_not_starve_itself(tmp_path: Path) -> None:
    """Its next turn needs the room that its own last turn takes: seven pages and one for the tail of the fork."""
    one = driver(open_store(tmp_path), num_pages=8, max_pages=8)
    rows = one.run(prompt(23), 8).rows
    for tail in range(3):
        turn = one.run([*rows[:22], tail], 8)
        assert (turn.lease.tier, turn.lease.cached_tokens) == (Tier.DISK, 22)
    one.assert_all_home()


def test_the_only_ring_does_not_starve_its_conversation(tmp_path: Path) -> None:
    one = driver(open_store(tmp_path), window=WINDOW, num_rings=1)
    rows = one.run(prompt(9), 4).rows
    for _ in range(3):
        turn = one.run([*rows, 1], 4)
        assert (turn.lease.tier, turn.lease.cached_tokens) == (Tier.DISK, len(rows))
        rows = turn.rows
    one.assert_all_home()


def test_without_a_second_tier_it_recomputes_rather_than_starves() -> None:
    one = driver(num_pages=8, max_pages=8)
    first = one.run(prompt(20), 8)
    assert one.run([*first.rows[:8], *prompt(20, 5)], 4).lease.tier is Tier.COLD
    assert one.cache.counters.dropped == 1


def test_running_sequences_are_never_robbed(tmp_path: Path) -> None:
    one = driver(open_store(tmp_path), num_pages=8, max_pages=8)
    running = one.start(prompt(9), 8)
    assert running is not None
    assert one.start(prompt(9, 1), 8) is None
    one.step(running, 8)
    assert running.output == continuation(running.prompt, 8)
    one.finish(running)
    assert one.run(prompt(9, 1), 8).lease.tier is Tier.COLD


# -- the second tier fails -----------------------------------------------------------------------------------------


def test_a_corrupt_snapshot_is_a_logged_miss(tmp_path: Path, window: int, caplog: pytest.LogCaptureFixture) -> None:
    one = driver(open_store(tmp_path), window=window)
    first = one.run(prompt(20))
    one.cache.evict()
    (info,) = one.cache.report()["disk"]
    chunk = max(tmp_path.rglob("chunks/*"), key=lambda path: path.stat().st_size)
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert one.hit([*first.rows, 1]) == (Tier.COLD, 0)
    one.settle()
    assert info["id"] in caplog.text
    assert one.cache.counters.failed_restores == 1
    assert one.cache.report()["disk"] == []
    assert list(tmp_path.rglob(f"quarantine/*{info['id']}*"))
    one.assert_all_home()


def test_a_snapshot_that_vanished_is_a_miss(tmp_path: Path) -> None:
    one = driver(open_store(tmp_path))
    first = one.run(prompt(20))
    one.cache.evict()
    other = open_store(tmp_path)  # another process of the same store
    for info in other.list():
        other.delete(info.id)
    assert one.hit([*first.rows, 1]) == (Tier.COLD, 0)
    one.assert_all_home()


def test_without_a_second_tier_there_is_nothing_to_save() -> None:
    driver = Driver(ScriptedBackend())
    driver.finish(driver.start([1, 2, 3], 2))
    assert driver.cache.save() == 0
    assert driver.cache.counters.failed_saves == 0


def test_a_failing_save_drops_the_state_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(store, "writer", full)
    one = driver(store)
    first = one.run(prompt(20))
    with caplog.at_level(logging.WARNING):
        assert one.cache.evict() == 0
    assert "could not be saved: the disk is full" in caplog.text
    assert (one.cache.counters.failed_saves, one.cache.counters.dropped) == (1, 1)
    assert one.hit([*first.rows, 1]) == (Tier.COLD, 0)
    one.assert_all_home()


def test_a_snapshot_of_another_layout_is_not_attached(tmp_path: Path) -> None:
    """LMCache 4385, ATOM 1417: identity and every declared part are checked before anything is attached."""
    ring = driver(open_store(tmp_path), window=WINDOW)
    first = ring.run(prompt(20))
    ring.cache.evict()
    paged = driver(open_store(tmp_path))
    assert paged.hit([*first.rows, 1]) == (Tier.COLD, 0)
    assert paged.cache.counters.failed_restores == 1


# -- restart, identity, ledger -------------------------------------------------------------------------------------


def test_a_new_cache_on_the_same_store_restores(tmp_path: Path, window: int) -> None:
    one = driver(open_store(tmp_path), window=window)
    turns = [one.run(prompt(20, seed)) for seed in range(3)]
    one.cache.evict()
    # Other page sizes and page numbers: a snapshot holds logical rows.
    other = driver(open_store(tmp_path), window=window, page_tokens=8, num_pages=16, max_pages=16)
    for turn in turns:
        assert other.hit([*turn.rows, 1]) == (Tier.DISK, len(turn.rows))


def test_what_cannot_be_read_at_a_start_is_dropped(tmp_path: Path) -> None:
    one = driver(open_store(tmp_path))
    turns = [one.run(prompt(20, seed)) for seed in range(2)]
    one.cache.evict()
    store = open_store(tmp_path)
    bad = next(info.id for info in store.list() if np.array_equal(store.tokens(info.id), turns[0].rows))
    (manifest,) = tmp_path.rglob(f"manifests/{bad}")
    manifest.write_bytes(bytes(manifest.stat().st_size))
    other = driver(open_store(tmp_path))
    assert [entry["id"] != bad for entry in other.cache.report()["disk"]] == [True]
    assert other.hit([*turns[0].rows, 1]) == (Tier.COLD, 0)
    assert other.hit([*turns[1].rows, 1]) == (Tier.DISK, len(turns[1].rows))


def test_hits_never_cross_a_namespace(tmp_path: Path) -> None:
    one = driver(open_store(tmp_path, namespace="tenant a"))
    first = one.run(prompt(20))
    one.cache.evict()
    assert driver(open_store(tmp_path, namespace="tenant b")).hit([*first.rows, 1]) == (Tier.COLD, 0)
    assert driver(open_store(tmp_path, namespace="tenant a")).hit([*first.rows, 1])[0] is Tier.DISK


def test_tenants_never_hit_each_other(tmp_path: Path, window: int) -> None:
    one = driver(open_store(tmp_path), window=window)
    first = one.run(prompt(20), tenant="a")
    for tier in (Tier.RESIDENT, Tier.DISK):
        for tenant, expected in (("b", (Tier.COLD, 0)), ("", (Tier.COLD, 0)), ("a", (tier, len(first.rows)))):
            lease = one.acquire([*first.rows, 1], tenant=tenant)
            assert lease is not None
            assert (lease.tier, lease.cached_tokens) == expected
            assert lease.near_miss is None
            one.cache.abort(lease)
        one.cache.evict()
    one.assert_all_home()


def test_the_ledger_counts_real_bytes(tmp_path: Path, window: int) -> None:
    store = open_store(tmp_path)
    one = driver(store, window=window)
    capacity = one.backend.capacity
    assert capacity.num_pages * capacity.page_bytes == sum(stage.pages.nbytes for stage in one.backend._stages)
    turns = [one.run(prompt(20, seed)) for seed in range(3)]
    fork = one.start([*turns[0].rows, 1])
    assert fork is not None

    def check() -> None:
        report = one.cache.report()
        held = {page for resident in one.cache._residents for page in resident.pages}
        held |= set(fork.lease.pages)
        rings = (len(report["resident"]) + 1) if window else 0
        assert report["device_bytes"] == len(held) * capacity.page_bytes + rings * capacity.ring_bytes
        on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        assert report["disk_bytes"] == on_disk == sum(entry["bytes"] for entry in report["disk"])

    check()
    assert one.cache.evict() == one.cache.report()["disk_bytes"]
    check()
    one.cache.abort(fork.lease)
    one.assert_all_home()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]


def test_a_longer_snapshot_supersedes_its_prefixes(tmp_path: Path, window: int) -> None:
    """What no look-up would ever choose again does not stay on disk; the same state is never there twice."""
    one = driver(open_store(tmp_path), window=window)
    first = one.run(prompt(20))
    one.cache.evict()
    one.run(first.prompt)
    one.cache.evict()
    assert [entry["tokens"] for entry in one.cache.report()["disk"]] == [len(first.rows)]
    second = one.run([*first.rows, 1])
    one.cache.evict()
    kept = {entry["tokens"] for entry in one.cache.report()["disk"]}
    assert kept == ({len(second.rows)} if not window else {len(first.rows), len(second.rows)})


def test_the_quota_makes_room_and_the_index_follows(tmp_path: Path) -> None:
    one = driver(open_store(tmp_path))
    turns = [one.run(prompt(20, 0))]
    one.cache.evict()
    size = one.cache.report()["disk_bytes"]
    (manifest,) = tmp_path.rglob("manifests/*")
    os.utime(manifest, (0, 0))  # of equal ones, the longest unused is worth least
    one = driver(open_store(tmp_path, max_bytes=2 * size + 100))
    for seed in (1, 2):
        turns.append(one.run(prompt(20, seed)))
        one.cache.evict()
    assert one.cache.report()["disk_bytes"] <= 2 * size + 100
    assert one.hit([*turns[0].rows, 1])[0] is Tier.COLD
    assert one.hit([*turns[2].rows, 1])[0] is Tier.DISK
    assert one.cache.counters.failed_restores == 0


def test_making_room_for_a_restore_may_remove_that_very_snapshot(tmp_path: Path) -> None:
    """The quota holds one snapshot; saving the victim deletes the one about to be read: a miss, not a fault."""
    probe = driver(open_store(tmp_path / "probe"), num_pages=8, max_pages=8)
    probe.run(prompt(20))
    size = probe.cache.evict()
    one = driver(open_store(tmp_path / "store", max_bytes=size + 100), num_pages=8, max_pages=8)
    first = one.run(prompt(20, 0), 8)
    one.cache.evict()
    one.run(prompt(20, 1), 8)
    assert one.hit([*first.rows[:23], 1]) == (Tier.COLD, 0)
    assert one.cache.counters.failed_restores == 0
    one.assert_all_home()


# -- the device fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["copy_page", "copy_ring", "write_pages", "write_ring"])
def test_a_failing_device_call_gives_its_pages_back(tmp_path: Path, call: str) -> None:
    one = driver(open_store(tmp_path), window=WINDOW)
    first = one.run(prompt(20))
    if call.startswith("write"):
        one.cache.evict()

    def fail(name: str) -> None:
        if name == call:
            raise RuntimeError("the device is on fire")

    one.backend.before = fail
    with pytest.raises(RuntimeError, match="on fire"):
        one.start([*first.rows, 1])
    one.backend.before = lambda name: None
    assert one.hit([*first.rows, 1])[1] == len(first.rows)
    one.assert_all_home()


def test_forget_drops_both_tiers(tmp_path: Path, window: int) -> None:
    one = driver(open_store(tmp_path), window=window)
    first = one.run(prompt(20))
    one.cache.evict()
    second = one.run(prompt(20, 1))
    one.cache.forget()
    assert one.hit([*first.rows, 1]) == one.hit([*second.rows, 1]) == (Tier.COLD, 0)
    assert open_store(tmp_path).list() == []


def test_what_is_being_restored_stays_on_disk_until_it_is(tmp_path: Path) -> None:
    """A longer snapshot takes its place meanwhile: the restore must not lose its files."""
    one = driver(open_store(tmp_path))
    first = one.run(prompt(20))
    one.cache.evict()
    lease = one.cache.acquire(np.array([*first.rows, 1], np.int32), 8)
    assert lease is not None
    assert lease.restoring is not None
    one.run([*first.rows, 2, 3], look_up=False)
    one.cache.evict()
    assert one._restored(lease)
    one.settle()
    assert one.rows(lease, len(first.rows))["paged.rows.0"][:, 0].tolist() == first.rows
    assert len(one.cache.report()["disk"]) == 1
    one.cache.abort(lease)
    one.assert_all_home()


def test_meta_that_cannot_be_stored_is_no_reason_to_lose_the_state(tmp_path: Path) -> None:
    one = driver(open_store(tmp_path))
    first = one.run(prompt(20))
    one.cache.meta_of = lambda tokens: {"turns": "x" * (5 << 20)}
    assert one.cache.evict() > 0
    assert one.hit([*first.rows, 1]) == (Tier.DISK, len(first.rows))


@pytest.mark.parametrize("leave", [True, False], ids=["evict", "save"])
def test_what_another_process_removed_is_written_again(tmp_path: Path, leave: bool) -> None:
    one = driver(open_store(tmp_path))
    first = one.run(prompt(20))
    one.cache.save()
    other = open_store(tmp_path)
    for info in other.list():
        other.delete(info.id)
    assert one.hit([9, 9, 9]) == (Tier.COLD, 0)  # a look-up notes it
    if leave:
        assert one.cache.evict() > 0
    else:
        assert one.cache.save() == 1
        one.cache.forget(keep_disk=True)
    assert one.hit([*first.rows, 1]) == (Tier.DISK, len(first.rows))


def test_nobody_leaves_when_that_would_not_suffice() -> None:
    one = driver(num_pages=32, max_pages=32)
    kept = one.run(prompt(20))
    running = one.start(prompt(56, 1), 8)
    assert running is not None
    assert one.start(prompt(70, 2), 8) is None
    assert one.hit([*kept.rows, 1]) == (Tier.RESIDENT, len(kept.rows))
    one.cache.abort(running.lease)
