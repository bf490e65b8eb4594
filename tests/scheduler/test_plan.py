"""The next round as a pure function of the sequences."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.device import job
from zllm_jax.cache import Lease
from zllm_jax.scheduler import Plan, Sequence, Ticket, chunk_size, plan

SIZES = (32, 128, 512)


def sequence(prompt_tokens: int, computed: int, drawn: int = 0, max_tokens: int = 8, **options: object) -> Sequence:
    one = Sequence(job([1] * prompt_tokens, max_tokens, **options), Ticket(lambda: None))
    one.computed, one.drawn = computed, [0] * drawn
    return one


def round_of(running: list[Sequence], waiting: bool = False, **options: int) -> Plan:
    return plan(running, SIZES, num_stages=3, decode_steps=4, waiting=waiting, **options)


def test_nothing_to_do() -> None:
    todo = round_of([], waiting=False)
    assert (todo.prefill, todo.decode, todo.idle) == (None, (), True)


def test_decode_takes_all_its_steps_when_nobody_waits() -> None:
    running = [sequence(5, 5, 1), sequence(9, 9, 3)]
    todo = round_of(running, waiting=False)
    assert (todo.prefill, todo.decode, todo.steps) == (None, tuple(running), 4)
    assert round_of(running, waiting=True).steps == 1
    assert round_of([*running, sequence(5, 5, 1, single_step=True)], waiting=False).steps == 1


def test_one_chunk_of_one_prompt_and_every_stream_a_round() -> None:
    first, second, streams = sequence(700, 0), sequence(40, 0), [sequence(5, 5, 1), sequence(6, 6, 2)]
    todo = round_of([streams[0], first, streams[1], second], waiting=False)
    assert (todo.prefill, todo.start, todo.stop, todo.first_stage, todo.last_stage) == (first, 0, 512, 0, 3)
    assert (todo.decode, todo.steps) == (tuple(streams), 1)


def test_a_sequence_with_nothing_left_is_not_decoded() -> None:
    assert round_of([sequence(5, 5, 8)], waiting=False).decode == ()


def restoring(prompt_tokens: int, computed: int, stages_ready: int, stage: int = 0) -> Sequence:
    """A sequence some of whose stages have their rows already."""
    one = sequence(prompt_tokens, computed)
    one.lease = Lease([], 0, restoring=SimpleNamespace(stages_ready=stages_ready))  # type: ignore[arg-type]
    one.stage = stage
    return one


def test_a_stage_runs_when_its_own_rows_are_there() -> None:
    todo = round_of([restoring(500, 480, stages_ready=2, stage=1)])
    assert (todo.start, todo.stop, todo.first_stage, todo.last_stage) == (480, 500, 1, 2)


def test_a_prompt_without_its_rows_lets_the_next_one_go_first() -> None:
    waits, goes, stream = restoring(500, 480, stages_ready=1, stage=1), sequence(40, 0), sequence(5, 5, 1)
    todo = round_of([waits, goes, stream])
    assert (todo.prefill, todo.decode) == (goes, (stream,))
    assert round_of([waits, stream]).decode == (stream,)
    assert round_of([waits]).idle


def test_chunks_end_where_states_are_kept() -> None:
    one, stops = sequence(900, 10), []
    while one.prefilling:
        one.computed = round_of([one], stride=64).stop
        stops.append(one.computed)
    assert set(range(64, 900, 64)) <= set(stops)


@pytest.mark.parametrize(
    ("remaining", "size"), [(1, 1), (32, 32), (40, 32), (64, 32), (65, 65), (100, 100), (700, 512)]
)
def test_chunk_size(remaining: int, size: int) -> None:
    assert chunk_size(remaining, SIZES) == size


@given(st.integers(1, 2000), st.sets(st.sampled_from([8, 16, 32, 100, 128, 512]), min_size=1))
def test_chunks_cover_a_prompt_and_pad_less_than_one_bucket(num_tokens: int, sizes: set[int]) -> None:
    """Each token once, each chunk in a bucket, and no more rows than with the smallest bucket that holds the rest."""
    buckets = tuple(sorted(sizes))
    chunks: list[int] = []
    while sum(chunks) < num_tokens:
        chunks.append(chunk_size(num_tokens - sum(chunks), buckets))
        assert 1 <= chunks[-1] <= buckets[-1]
    assert sum(chunks) == num_tokens
    rows = sum(min(bucket for bucket in buckets if bucket >= chunk) for chunk in chunks)
    whole, rest = divmod(num_tokens, buckets[-1])
    assert rows <= whole * buckets[-1] + (min(bucket for bucket in buckets if bucket >= rest) if rest else 0)


def test_state_tokens_are_the_rows_that_exist() -> None:
    one = sequence(5, 3)
    assert one.state_tokens().tolist() == [1] * 3
    one.computed = 5
    one.take([7, 8, 9])
    assert np.array_equal(one.state_tokens(), [1] * 5 + [7, 8])  # 9 was drawn, but never fed
    one.ahead = [10, 11]
    assert np.array_equal(one.state_tokens(), [1] * 5 + [7, 8])
    one.take([12])
    assert np.array_equal(one.state_tokens(), [1] * 5 + [7, 8, 9, 10, 11])


def test_what_is_forced_in_a_stream_goes_before_prompts_and_is_not_decoded() -> None:
    prompt, stream, forced = sequence(40, 0), sequence(5, 5, 1), sequence(5, 6, 2)
    forced.ahead = [7] * 9
    todo = round_of([prompt, stream, forced])
    assert (todo.prefill, todo.start, todo.stop) == (forced, 6, 16)
    assert (todo.decode, todo.steps) == ((stream,), 1)
    assert forced.tokens(3, 8).tolist() == [1, 1, 0, 0, 7]


def test_what_is_forced_from_the_first_is_computed_with_the_prompt() -> None:
    one = sequence(20, 0)
    one.ahead = [7] * 9
    assert (round_of([one]).start, round_of([one]).stop) == (0, 29)
