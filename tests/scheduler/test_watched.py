"""Outputs that are watched for loops: the device is told where each stands, and asked how many it was led out of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.scheduler.device import Bench, answer, job, result
from zllm_jax.runtime import Chunk, Drawn, Row, Watched

Make = Callable[..., Bench]
PROMPT = list(range(9))


@pytest.fixture
def seen(bench: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, list[Watched | None]]:
    """A bench, and what its device was told of each token to be drawn."""
    one, told = bench(decode_steps=1), list[Watched | None]()
    decode, prefill_stage = one.device.decode, one.device.prefill

    def watching_decode(rows: Sequence[Row], steps: int) -> list[list[Drawn]]:
        told.extend(row.watch for row in rows)
        return decode(rows, steps)

    def watching_prefill(chunk: Chunk) -> Drawn | None:
        told.append(chunk.watch)
        return prefill_stage(chunk)

    monkeypatch.setattr(one.device, "decode", watching_decode)
    monkeypatch.setattr(one.device, "prefill", watching_prefill)
    monkeypatch.setattr(one.device, "loops_broken", lambda slot: 3 + slot)
    return one, told


def test_a_watched_output(seen: tuple[Bench, list[Watched | None]]) -> None:
    """The third token opens a region of thinking, the fifth closes it."""
    one, told = seen
    drawn = answer(PROMPT, 7)
    watch = Watched(drawn[2], drawn[4])
    tokens, outcome = result(one.scheduler.submit(job(PROMPT, 7, watch=watch)))
    assert tokens == drawn
    assert [here.inside for here in told if here is not None] == [False] * 3 + [True] * 2 + [False] * 2
    assert one.device.calls.count("begin") == 1
    assert outcome.telemetry.loops_broken == 3


def test_one_that_is_not(seen: tuple[Bench, list[Watched | None]]) -> None:
    one, told = seen
    _, outcome = result(one.submit(PROMPT, 3))
    assert told == [None] * 3
    assert "begin" not in one.device.calls
    assert outcome.telemetry.loops_broken == 0


def test_where_an_output_stands() -> None:
    watch = Watched(7, 8)
    assert not watch.after([1, 8, 2]).inside
    assert watch.after([8, 7, 2]).inside
    assert not watch.after([7, 7, 8]).inside
    assert watch.after([7]).after([1]).inside
    assert Watched().after([-1, 1]) == Watched()
