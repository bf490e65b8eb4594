"""The device loop: who joins, who leaves, what happens when something breaks, and that the times add up."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.scheduler.device import Bench, answer, job, result
from zllm_jax.cache import SnapshotStore
from zllm_jax.errors import BudgetExceeded, Overloaded
from zllm_jax.scheduler import Sequence, Ticket, clock
from zllm_jax.values import Sampling, Status, Tier

Make = Callable[..., Bench]


def test_one_sequence(bench: Make) -> None:
    tokens, outcome = bench().run(range(9), 6)
    assert tokens == answer(range(9), 6)
    assert (outcome.status, outcome.telemetry.finish) == (Status.TRUNCATED, "max_tokens")
    assert (outcome.usage.prompt_tokens, outcome.usage.generated_tokens, outcome.usage.tier) == (9, 6, Tier.COLD)


def test_a_stop_id_completes(bench: Make) -> None:
    expected = answer(range(9), 6)
    tokens, outcome = bench().run(range(9), 20, stop_ids=(expected[4],))
    end = expected.index(expected[4]) + 1
    assert tokens == expected[:end]
    assert (outcome.status, outcome.telemetry.finish) == (Status.COMPLETED, "eos")
    assert outcome.telemetry.saved_steps == 20 - end
    capacity = bench().device.capacity
    assert outcome.telemetry.saved_bytes == (20 - end) * capacity.page_bytes // capacity.page_tokens


def test_many_at_once_say_what_each_says_alone(bench: Make) -> None:
    one = bench(num_slots=3, num_pages=24)
    prompts = [[seed, *range(seed * 3 % 11)] for seed in range(12)]
    tickets = [one.submit(prompt, 1 + i) for i, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(result, tickets))
    assert [tokens for tokens, _ in results] == [answer(prompt, 1 + i) for i, prompt in enumerate(prompts)]
    assert max(rows for rows, _ in one.device.batches) == 3


def test_the_seed_decides_alone_and_in_a_batch(bench: Make) -> None:
    one, hot = bench(), Sampling(temperature=1.0)
    tickets = [one.submit([1, 2, 3], 8, sampling=hot, seed=seed) for seed in (5, 6, 5)]
    drawn = [result(ticket)[0] for ticket in tickets]
    assert drawn[0] == drawn[2] == answer([1, 2, 3], 8, hot, 5)
    assert drawn[1] == answer([1, 2, 3], 8, hot, 6)


def test_sequences_join_and_leave_a_running_batch(bench: Make) -> None:
    one = bench()
    one.device.held = True
    long = one.submit([1, 2, 3], 12)
    one.device.wait_for_call()  # its prefill
    one.device.let()
    one.device.wait_for_call()  # its first decode call
    short = one.submit([4, 5], 2)
    one.device.let_go()
    assert result(short)[0] == answer([4, 5], 2)
    assert result(long)[0] == answer([1, 2, 3], 12)
    rows = [count for count, _ in one.device.batches]
    assert rows[0] == 1
    assert 2 in rows
    assert rows[-1] == 1


def test_a_long_prompt_delays_a_stream_by_one_chunk_at_most(bench: Make) -> None:
    one = bench(max_pages=64, num_pages=128)
    one.device.held = True
    stream = one.submit([1, 2, 3], 40)
    one.device.wait_for_call()
    one.device.let()
    one.device.wait_for_call()
    long = one.submit(list(range(150)), 2)
    one.device.let_go()
    result(long)
    result(stream)
    first, last = [i for i, name in enumerate(one.device.calls) if name == "prefill"][1::8]
    between = one.device.calls[first:last]
    assert between.count("prefill") == 8
    assert all(pair != ("prefill", "prefill") for pair in itertools.pairwise(between))


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_cancel_takes_effect_within_one_call(bench: Make, at: str) -> None:
    one = bench()
    one.device.held = True
    ticket = one.submit(list(range(40)), 20)
    one.device.wait_for_call()
    while one.device.calls[-1] != at:
        one.device.let()
        one.device.wait_for_call()
    ticket.cancel()
    calls = len(one.device.calls)
    one.device.let()
    tokens, outcome = result(ticket)
    assert len(one.device.calls) == calls  # the call it stood in was its last
    assert (outcome.status, outcome.telemetry.finish) == (Status.CANCELED, "canceled")
    assert outcome.telemetry.saved_steps == 20 - len(tokens)
    assert outcome.conversation is None
    assert one.cache.report()["device_bytes"] == 0


def test_cancel_in_the_queue_computes_nothing(bench: Make) -> None:
    one = bench(num_slots=1)
    one.device.held = True
    other = one.submit([9], 2)
    one.device.wait_for_call()
    ticket = one.submit([1, 2, 3], 20)
    ticket.cancel()
    one.device.let_go()
    tokens, outcome = result(ticket)
    assert (tokens, outcome.status) == ([], Status.CANCELED)
    assert outcome.timing.prefill_s == outcome.timing.decode_s == 0
    assert result(other)[0] == answer([9], 2)
    assert one.device.calls.count("prefill") == 1


def test_a_deadline_in_the_queue_and_while_running(bench: Make) -> None:
    one = bench(num_slots=1)
    one.device.held = True
    running = one.submit([1, 2, 3], 40, timeout_s=0.05)
    one.device.wait_for_call()
    queued = one.submit([4], 2, timeout_s=0.05)
    time.sleep(0.06)
    one.device.let_go()
    for ticket in (running, queued):
        _, outcome = result(ticket)
        assert outcome.status is Status.TRANSPORT_FAILURE
        assert outcome.telemetry.deadline_exceeded
        assert outcome.telemetry.finish == "deadline"


# -- what breaks ---------------------------------------------------------------------------------------------------


def test_a_failing_prefill_ends_its_own_sequence_only(bench: Make) -> None:
    one = bench()
    one.device.held = True
    stream = one.submit([1, 2, 3], 12)
    one.device.wait_for_call()
    one.device.let()
    one.device.wait_for_call()
    one.device.failing["prefill"] = RuntimeError("no more memory")
    broken = one.submit([4, 5, 6], 12)
    one.device.let_go()
    _, outcome = result(broken)
    assert (outcome.status, outcome.error) == (Status.FAULTED, "RuntimeError: no more memory")
    assert outcome.telemetry.termination == "fault"
    tokens, outcome = result(stream)
    assert (tokens, outcome.status) == (answer([1, 2, 3], 12), Status.TRUNCATED)


def test_a_failing_decode_spares_the_prompt_under_way_and_the_loop(bench: Make) -> None:
    one = bench(max_pages=64, num_pages=128)
    one.device.held = True
    streams = [one.submit([seed], 40) for seed in (1, 2)]
    for _ in range(3):
        one.device.wait_for_call()
        one.device.let()
    one.device.wait_for_call()
    long = one.submit(list(range(50)), 2)
    while one.device.calls[-1] != "prefill" or one.device.num_computed < 10:
        one.device.let()
        one.device.wait_for_call()
    one.device.failing["decode"] = RuntimeError("kernel failed")
    one.device.let()
    one.device.wait_for_call()  # the decode call of the same round
    one.device.let()
    for stream in streams:
        assert result(stream)[1].status is Status.FAULTED
    one.device.failing.clear()
    one.device.let_go()
    assert result(long)[0] == answer(range(50), 2)
    assert one.run([7, 8], 3)[0] == answer([7, 8], 3)


@pytest.mark.parametrize("call", ["begin", "copy_page"])
def test_a_failure_at_admission_is_a_fault_of_that_request(bench: Make, call: str) -> None:
    one = bench()
    one.run(range(9), 3)
    one.device.failing[call] = RuntimeError("on fire")
    _, outcome = one.run([*range(9), 1], 3, sampling=Sampling(temperature=0.0, presence_penalty=1.0))
    assert (outcome.status, outcome.error) == (Status.FAULTED, "RuntimeError: on fire")
    one.device.failing.clear()
    assert one.run([*range(9), 1], 3)[1].status is Status.TRUNCATED


def test_a_broken_snapshot_is_a_miss_and_the_request_succeeds(bench: Make, tmp_path: Path) -> None:
    """vllm 49176: one failed load must not livelock the request."""
    one = bench(SnapshotStore(tmp_path, namespace="n"))
    one.run(range(20), 3)
    one.scheduler.call(one.cache.evict)
    for path in tmp_path.rglob("*"):
        if path.is_file() and "manifest" not in path.name:
            path.write_bytes(b"\0" * path.stat().st_size)
    tokens, outcome = one.run([*range(20), 5], 3)
    assert tokens == answer([*range(20), 5], 3)
    assert (outcome.status, outcome.usage.tier) == (Status.TRUNCATED, Tier.COLD)


def test_a_listener_that_fails_counts_as_gone(bench: Make) -> None:
    one = bench()
    one.device.held = True
    ticket = one.submit([1, 2, 3], 40)
    one.device.wait_for_call()

    def closed() -> None:
        raise RuntimeError("Event loop is closed")

    with pytest.raises(RuntimeError, match="closed"):
        ticket.on_event(closed)
    one.device.let_go()
    tokens, outcome = result(ticket)
    assert outcome.status is Status.CANCELED
    assert len(tokens) < 40
    assert one.run([7, 8], 3)[0] == answer([7, 8], 3)


# -- limits --------------------------------------------------------------------------------------------------------


def test_the_budget_names_its_three_numbers(bench: Make) -> None:
    one = bench(page_tokens=4, max_pages=16)
    with pytest.raises(BudgetExceeded, match=r"60 tokens\) \+ max_tokens \(5\) = 65 tokens.* 64") as caught:
        one.submit(list(range(60)), 5)
    error = caught.value
    assert (error.prompt_tokens, error.max_tokens, error.budget_tokens) == (60, 5, 64)
    assert len(one.run(list(range(60)), 4)[0]) == 4  # one less fits
    assert one.device.calls.count("prefill") == 4


def test_a_full_queue_refuses(bench: Make) -> None:
    one = bench(num_slots=1, max_queue=2)
    one.device.held = True
    tickets = [one.submit([1], 2)]
    one.device.wait_for_call()
    tickets += [one.submit([2], 2), one.submit([3], 2)]
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        one.submit([4], 2)
    one.device.let_go()
    assert [result(ticket)[0] for ticket in tickets] == [answer([seed], 2) for seed in (1, 2, 3)]


def test_requests_wait_for_memory_and_none_starves(bench: Make) -> None:
    """Room for two at a time, eight slots: everyone is served, nobody dies of memory on the way."""
    one = bench(num_slots=8, num_pages=12, max_pages=8)
    tickets = [one.submit([seed] * 9, 11) for seed in range(8)]
    for seed, ticket in enumerate(tickets):
        assert result(ticket)[0] == answer([seed] * 9, 11)
    assert max(rows for rows, _ in one.device.batches) == 2


def test_close_cancels_what_runs_and_waits(bench: Make) -> None:
    one = bench(num_slots=1)
    one.device.held = True
    tickets = [one.submit([seed], 30) for seed in range(3)]
    one.device.wait_for_call()
    closing = threading.Thread(target=one.scheduler.close)
    closing.start()
    while not one.scheduler._closing:
        time.sleep(0.001)
    one.device.let_go()
    for ticket in tickets:
        _, outcome = result(ticket)
        assert (outcome.status, outcome.error) == (Status.CANCELED, "the engine was closed")
    closing.join()
    with pytest.raises(Overloaded, match="closed"):
        one.submit([1], 2)
    with pytest.raises(Overloaded, match="closed"):
        one.scheduler.call(lambda: None)
    assert one.cache.report()["device_bytes"] == 0


def test_call_runs_on_the_device_thread_and_hands_errors_back(bench: Make) -> None:
    one = bench()
    assert one.scheduler.call(threading.current_thread).name == "zllm-device"

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        one.scheduler.call(fail)
    assert one.run([1], 2)[0] == answer([1], 2)


# -- times and caching ---------------------------------------------------------------------------------------------


def test_the_parts_of_the_time_add_up(bench: Make, tmp_path: Path) -> None:
    one = bench(SnapshotStore(tmp_path, namespace="n"))
    pace = one.device.before

    def slow(name: str) -> None:
        pace(name)
        time.sleep(0.004)

    one.device.before = slow
    for evict in (False, False, True):
        if evict:
            one.scheduler.call(one.cache.evict)
        start = clock()
        _, outcome = one.run(range(40), 6, started=start)
        timing, total = outcome.timing, outcome.ended - start
        assert timing.total_s == pytest.approx(total, rel=1e-6)
        assert all(value >= 0 for value in vars(timing).values())
        assert timing.decode_s >= 2 * 0.004
        assert timing.prefill_s >= 0.004
        if outcome.usage.tier is not Tier.COLD:
            assert timing.restore_s >= 0.004  # copy_page, or write
        assert timing.ttft_s == pytest.approx(total - timing.decode_s - timing.post_s)


def test_the_prefill_rate_counts_all_chunks(bench: Make) -> None:
    """A device answers at once and computes later: only the last chunk's answer tells how long all of them took."""
    one = bench(max_pages=64, num_pages=64)
    one.device.before = lambda name: time.sleep(0.05) if name == "prefill" else None
    one.run(range(3), 1)  # the first is left out
    one.run(range(200, 360), 1)  # ten chunks of 16
    assert one.cache.rates.prefill_tokens_s == pytest.approx(160 / 0.5, rel=0.3)


def test_a_finished_conversation_goes_on_from_its_state(bench: Make) -> None:
    one = bench()
    first, outcome = one.run(range(9), 6)
    computed = one.device.num_computed
    assert outcome.conversation is not None
    _, outcome = one.run([*range(9), *first, 5], 6)
    assert (outcome.usage.cached_tokens, outcome.usage.tier) == (9 + 5, Tier.RESIDENT)
    assert one.device.num_computed - computed == 2 + 5  # the last drawn token, the new one, and the new output
    _, outcome = one.run([*range(9), *first, 5], 6, cache=False)
    assert (outcome.usage.cached_tokens, outcome.conversation) == (0, None)


def test_stop_after_keeps_what_belongs_to_the_output(bench: Make) -> None:
    one = bench()
    one.device.held = True
    ticket = one.submit([1, 2, 3], 40, single_step=True)
    for _ in range(4):
        one.device.wait_for_call()
        one.device.let()
    one.device.wait_for_call()
    ticket.stop_after(2)
    one.device.let_go()
    _, outcome = result(ticket)
    assert (outcome.status, outcome.usage.generated_tokens) == (Status.COMPLETED, 2)
    (resident,) = one.cache.report()["resident"]
    assert resident["tokens"] == 3 + 2


def test_a_part_that_was_not_reached_takes_no_time() -> None:
    one = Sequence(job([1], started=1.0), Ticket(lambda: None), submitted=2.0)
    timing = one.timing(5.0)
    assert (timing.prep_s, timing.queue_s, timing.total_s) == (1.0, 3.0, 4.0)
    one.admitted, one.restored, one.first, one.latest = 3.0, 3.5, 4.0, 4.5
    timing = one.timing(5.0)
    assert (timing.queue_s, timing.restore_s, timing.prefill_s, timing.decode_s, timing.post_s) == (
        1,
        0.5,
        0.5,
        0.5,
        0.5,
    )
