"""Who comes first, who waits for room, what is kept on the way and at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.driver import PATIENCE_S, Driver, open_store, prompt
from tests.engine.talker import always_restore
from tests.scheduler.device import Bench, Device, answer, job, result
from zllm_jax.cache import PrefixCache
from zllm_jax.cache.saver import Saver
from zllm_jax.scheduler import Scheduler
from zllm_jax.testing import ScriptedBackend
from zllm_jax.values import Status, Tier

Make = Callable[..., Bench]


# -- states that cannot be cut -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stride", "hit"), [(0, 0), (16, 48)])
def test_a_long_prompt_said_again_hits_within(stride: int, hit: int) -> None:
    device = Device(window=6, num_pages=64, max_pages=32)
    cache = PrefixCache(device, None)
    scheduler = Scheduler(device, cache, max_seq_tokens=1 << 20, checkpoint_tokens=stride)
    told = prompt(50)
    for usage in (0, hit):
        tokens, outcome = result(scheduler.submit(job(told, 5)))
        assert tokens == answer(told, 5)
        assert outcome.usage.cached_tokens == usage
    other = [*told[:20], 7, 8]  # parts from it at a token that is no checkpoint
    tokens, outcome = result(scheduler.submit(job(other, 5)))
    assert tokens == answer(other, 5)
    assert outcome.usage.cached_tokens == (16 if stride else 0)
    scheduler.close()


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_so_many_earlier_turns_stay_reusable(rounds: int) -> None:
    one = Driver(ScriptedBackend(window=6, num_pages=64), None, prefix_rounds=rounds)
    told, turns = prompt(9), []
    for _ in range(4):
        turn = one.run(told, 4)
        turns.append(turn.rows)
        told = [*turn.prompt, *turn.output, 7]
    here = [one.hit([*rows, 200]) == (Tier.RESIDENT, len(rows)) for rows in turns]
    assert here == [False] * (3 - rounds) + [True] * (rounds + 1)
    one.assert_all_home()


# -- whose turn it is ----------------------------------------------------------------------------------------------


def order_of(one: Bench, jobs: list[dict[str, Any]]) -> list[int]:
    """In which order jobs that wait together begin. Prompt i is [i, i]."""
    begun: list[int] = []
    prefill = one.device.prefill

    def noted(chunk: Any) -> Any:
        begun.append(chunk.tokens[0])
        return prefill(chunk)

    one.device.held = True
    first = one.submit([100], 1)
    one.device.wait_for_call()
    one.device.prefill = noted  # type: ignore[method-assign]
    tickets = [one.submit([i, i], **options) for i, options in enumerate(jobs)]
    one.device.let_go()
    result(first)
    for i, ticket in enumerate(tickets):
        assert result(ticket)[0] == answer([i, i], jobs[i]["max_tokens"])
    return begun


def test_the_urgent_go_first(bench: Make) -> None:
    jobs = [{"max_tokens": 2, "priority": priority} for priority in (0, -1, 1, 0, 1)]
    assert order_of(bench(num_slots=1), jobs) == [2, 4, 0, 3, 1]


def test_a_tenant_with_many_requests_does_not_shut_out_another(bench: Make) -> None:
    jobs = [{"max_tokens": 4, "tenant": tenant} for tenant in ("many", "many", "many", "many", "few", "few")]
    begun = order_of(bench(num_slots=1), jobs)
    assert begun == [0, 4, 1, 5, 2, 3]


# -- room ----------------------------------------------------------------------------------------------------------


def test_admission_evicts_and_what_was_admitted_can_grow_to_its_end(bench: Make, tmp_path: Path) -> None:
    """Memory for two sequences, full of old ones: all are served to the last token, and nothing is lost."""
    one = bench(open_store(tmp_path), num_slots=4, num_pages=16, max_pages=8)
    told = [[seed] * 9 for seed in range(8)]
    tickets = [one.submit(prompt, 23) for prompt in told]  # 8 pages each at their end
    for prompt_tokens, ticket in zip(told, tickets, strict=True):
        tokens, outcome = result(ticket)
        assert tokens == answer(prompt_tokens, 23)
        assert outcome.status is Status.TRUNCATED
    assert max(rows for rows, _ in one.device.batches) == 2
    assert one.cache.counters.dropped == 0
    assert one.cache.counters.evictions >= 6


def test_what_was_resident_at_the_end_is_found_at_the_next_start(bench: Make, tmp_path: Path) -> None:
    one, told = bench(open_store(tmp_path)), [prompt(20, seed) for seed in range(3)]
    said = [one.run(tokens, 4)[0] for tokens in told]
    seen: list[tuple[int, int]] = []
    one.scheduler.close(save=True, progress=lambda what, done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    again = bench(open_store(tmp_path))
    always_restore(again.cache)
    for tokens, spoken in zip(told, said, strict=True):
        longer = [*tokens, *spoken, 7]
        answered, outcome = again.run(longer, 3)
        assert answered == answer(longer, 3)
        assert (outcome.usage.tier, outcome.usage.cached_tokens) == (Tier.DISK, 23)


def test_what_cannot_be_saved_at_the_end_is_named_and_takes_no_other_with_it(
    bench: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = bench(open_store(tmp_path))
    ids = [one.run(prompt(20, seed), 4)[1].conversation for seed in range(3)]
    save = one.cache._evictor.save

    def fails(resident: Any) -> None:
        if resident.id == ids[1]:
            raise RuntimeError("the disk is on fire")
        save(resident)

    monkeypatch.setattr(one.cache._evictor, "save", fails)
    one.scheduler.close(save=True)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"conversation {ids[1]} could not be saved: RuntimeError: the disk is on fire"
    ]
    assert len(open_store(tmp_path).list()) == 2
    assert one.cache.counters.failed_saves == 1


def test_what_ends_the_saving_at_the_end_is_heard_of(
    bench: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = bench(open_store(tmp_path))
    one.run(prompt(20), 4)

    def gone(what: str, done: int, total: int) -> None:
        raise BrokenPipeError("nobody reads this")

    one.scheduler.close(save=True, progress=gone)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == "not all conversations were saved before the end"
    assert "nobody reads this" in str(record.exc_info)
    assert one.cache._saver is not None
    assert not one.cache._saver._thread.is_alive()


# -- saving --------------------------------------------------------------------------------------------------------


class Watched(Saver):
    """Notes the most that was ever in flight, and holds its writing thread until it is let go."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.most = 0
        self.gate, self.arrived = threading.Event(), threading.Event()
        super().__init__(*arguments, **options)

    def _dispatch(self, job: Any, group: Any) -> None:
        super()._dispatch(job, group)
        self.most = max(self.most, self.in_flight_bytes)

    def _put(self, job: Any, group: Any, rows: Any) -> None:
        self.arrived.set()
        assert self.gate.wait(PATIENCE_S)
        super()._put(job, group, rows)


def watched(root: Path, budget_bytes: int, **options: Any) -> tuple[Driver, Watched]:
    one = Driver(ScriptedBackend(num_pages=64, **options), open_store(root))
    assert one.cache._saver is not None
    assert one.cache._snapshots is not None
    one.cache._saver.close()
    saver = Watched(one.backend, one.cache._snapshots.store, lambda: one.cache.wake(), budget_bytes)
    one.cache._saver = one.cache._evictor._saver = saver
    return one, saver


def advance_until_rows_are_out(one: Driver, saver: Saver) -> None:
    while not saver.in_flight_bytes:
        saver.wait()
        one.cache.advance()


def group_bytes(backend: ScriptedBackend) -> int:
    c = backend.capacity
    return c.page_bytes * c.group_tokens // c.page_tokens // c.num_stages


@pytest.mark.parametrize("groups", [1, 2.5])
def test_what_is_in_flight_is_bounded_over_all_saves(tmp_path: Path, groups: float) -> None:
    one, saver = watched(tmp_path, 0)
    one_group = group_bytes(one.backend)
    saver._budget = budget = int(groups * one_group)
    turns = [one.run(prompt(40, seed), 4) for seed in range(2)]
    for resident in one.cache._residents:
        one.cache._evictor.save(resident)
    advance_until_rows_are_out(one, saver)
    assert saver.pending == 2
    full = saver.in_flight_bytes
    assert budget <= full < budget + one_group
    one.cache.advance()
    assert saver.in_flight_bytes <= full  # nothing was written: nothing more is copied
    saver.gate.set()
    assert one.cache.evict() > 0
    assert saver.most < budget + one_group
    assert saver.in_flight_bytes == 0
    for turn in turns:
        assert one.hit([*turn.rows, 1]) == (Tier.DISK, len(turn.rows))
    one.close()


def test_a_conversation_that_went_on_while_it_was_saved_is_not_written_with_anothers_rows(tmp_path: Path) -> None:
    one, saver = watched(tmp_path, 1)  # a group at a time
    first = one.run(prompt(30), 4)
    (resident,) = one.cache._residents
    one.cache._evictor.save(resident)
    advance_until_rows_are_out(one, saver)
    assert saver.arrived.wait(PATIENCE_S)  # its first group is out, the others are not
    second = one.run([*first.prompt, *first.output, 7], 4)  # takes its place
    assert not resident.here
    (there,) = one.cache._residents
    one.cache._residents.drop(there)
    one.run(prompt(60, 5), 1)  # the pages are another's now
    saver.gate.set()
    one.cache.evict()
    assert one.cache._snapshots is not None
    store = one.cache._snapshots.store
    for info in store.list():
        store.verify(info.id)
    assert [info.num_tokens for info in store.list()] == [60]
    assert one.cache._snapshots.usable(np.array(second.rows, np.int32), "") is None
    again = one.run([*first.rows, 9], 4)
    assert again.lease.tier is Tier.COLD
    one.close()
