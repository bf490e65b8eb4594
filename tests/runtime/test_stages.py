"""Stages: how a model is cut, that a prefill may be interrupted between two of them, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from tests.runtime import drive
from tests.runtime.drive import Place, Scorer
from zllm_jax.errors import DeviceLost
from zllm_jax.runtime import PagedSpec, RingSpec, StateShape, StateSpec, init_params, programs
from zllm_jax.runtime.stages import cut
from zllm_jax.testing import tiny_config

SHAPE = StateShape(num_pages=40, page_tokens=8, num_rings=4, num_slots=4, max_pages=8)
PROMPT = np.random.default_rng(1).integers(0, 256, 41).tolist()
PLACES = [Place(tuple(range(8 * i, 8 * i + 8)), ring=i, slot=i) for i in range(4)]
PAGED, RING = PagedSpec(2, 16), RingSpec(2, 16, 16)


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        ([PAGED] * 30, [10, 10, 10]),
        ([PAGED] * 32, [8, 8, 8, 8]),
        (([RING] * 5 + [PAGED]) * 3, [6, 6, 6]),
        (([RING] * 5 + [PAGED]) * 4 + [RING] * 2, [12, 12, 2]),
        ([RING, RING, PAGED], [1, 1, 1]),
        ([PAGED, PAGED], [1, 1]),
        ([PAGED], [1]),
    ],
    ids=["SmolLM2", "32 equal", "Gemma 3 270M", "Gemma 3 1B", "tiny gemma3", "tiny llama", "one layer"],
)
def test_how_a_model_is_cut(layers: list[Any], sizes: list[int]) -> None:
    stages = cut(StateSpec(tuple(layers)))
    assert [len(stage.kinds) for stage in stages] == sizes
    assert [stage.index for stage in stages] == list(range(len(sizes)))
    numbers = tuple(range(len(layers)))
    assert sum((stage.of(numbers) for stage in stages), ()) == numbers
    assert sum((stage.kinds for stage in stages), ()) == tuple(layers)
    last = stages[-1]
    assert last.of(last.put(numbers, tuple("x" * len(last.kinds)))) == tuple("x" * len(last.kinds))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def shared_runner(request: pytest.FixtureRequest) -> Scorer:
    cfg = tiny_config(request.param)
    made = drive.scorer(
        init_params(cfg, jax.random.key(0)), cfg, SHAPE, prefill_buckets=(32,), decode_buckets=(1,), decode_steps=2
    )
    assert made.capacity.num_stages > 1
    return made


@pytest.fixture
def runner(shared_runner: Scorer) -> Iterator[Scorer]:
    shared_runner.forget()
    yield shared_runner
    shared_runner.recover()


def test_other_calls_may_come_between_two_stages(runner: Scorer) -> None:
    """Two prefills interleaved with each other, with decode steps of a third sequence and with copies."""
    lengths = (20, 25)
    wanted = [drive.prefilled(runner, PROMPT[:n], PLACES[i], size=32) for i, n in enumerate(lengths)]
    rows = [drive.saved(runner, PLACES[i], n) for i, n in enumerate(lengths)]
    neighbour = drive.prefilled(runner, PROMPT[:9], PLACES[2], size=32)
    answer = drive.continued(runner, neighbour, 9, PLACES[2], 4)
    runner.forget()
    drawn = [drive.prefilled(runner, PROMPT[:9], PLACES[2], size=32)]
    chunks = [drive.chunk(PROMPT[:n], 0, PLACES[i], last=True) for i, n in enumerate(lengths)]
    carries: list[Any] = [None, None]
    for stage in range(runner.capacity.num_stages):
        for i, chunk in enumerate(chunks):
            carries[i] = runner.prefill_stage(chunk, stage, carries[i])
            runner.copy_page(PLACES[2].pages[0], PLACES[3].pages[0])
        drawn += drive.continued(runner, drawn[-1], 8 + len(drawn), PLACES[2], 2)[1:]
    assert carries == wanted
    assert drawn == answer[: len(drawn)]
    for i, n in enumerate(lengths):
        for name, array in drive.saved(runner, PLACES[i], n).items():
            np.testing.assert_array_equal(array, rows[i][name], err_msg=name)


def test_a_stage_computes_before_the_next_stage_s_rows_are_there(runner: Scorer) -> None:
    """Restored stage by stage, each computed at once, the result has the bits of the never evicted."""
    kept = 33
    drive.prefilled(runner, PROMPT[:kept], PLACES[0], size=32)
    rows = drive.saved(runner, PLACES[0], kept)
    tail = drive.chunk(PROMPT[kept:], kept, PLACES[0], sampling=drive.GREEDY_LOGPROBS, last=True)
    wanted = runner.prefill(tail)
    after = drive.saved(runner, PLACES[0], len(PROMPT))
    runner.forget()
    carry: Any = None
    tail = drive.chunk(PROMPT[kept:], kept, PLACES[1], sampling=drive.GREEDY_LOGPROBS, last=True)
    for stage in range(runner.capacity.num_stages):
        drive.restore_stage(runner, stage, rows, PLACES[1], kept)
        carry = runner.prefill_stage(tail, stage, carry)
    assert carry == wanted
    for name, array in drive.saved(runner, PLACES[1], len(PROMPT)).items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)


@pytest.mark.parametrize("lost", ["in the call", "after it"])
def test_a_failure_that_takes_the_state_is_told_by_every_later_call(
    runner: Scorer, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """A device that fails leaves arrays that were given away, or that hold an error."""
    first = drive.prefilled(runner, PROMPT[:9], PLACES[0], size=32)
    right = programs.decode

    def fail(*args: Any, **options: Any) -> Any:
        if lost == "in the call":
            right(*args, **options)
            raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")
        return jax.tree.map(Poisoned, right(*args, **options))

    monkeypatch.setattr(programs, "decode", fail)
    row = drive.row(first.token, 9, PLACES[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="the device is gone"):
        runner.decode([row], 1)
    monkeypatch.undo()
    for call in (
        lambda: runner.decode([row], 1),
        lambda: drive.prefilled(runner, PROMPT[:9], PLACES[0], size=32),
        lambda: runner.begin(0, [1]),
        lambda: runner.copy_page(0, 1),
        lambda: runner.read_pages(0, [0]),
        lambda: runner.read_ring(0, 0),
    ):
        with pytest.raises(DeviceLost, match=r"the device is gone.*open the engine anew"):
            call()


class Poisoned:
    """An array whose computation failed."""

    def __init__(self, array: Any) -> None:
        pass

    def is_deleted(self) -> bool:
        return False

    def block_until_ready(self) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")


def test_a_failure_before_anything_was_given_away_loses_nothing(runner: Scorer) -> None:
    first = drive.prefilled(runner, PROMPT[:9], PLACES[0], size=32)
    with pytest.raises(ValueError, match="exceeds the largest bucket"):
        drive.prefilled(runner, PROMPT, PLACES[1], size=41)
    with pytest.raises(KeyError):
        runner.write_pages(0, {}, [1]) if runner.row_layout.get("paged.k.0") else runner.write_ring(0, {}, 1)
    assert len(drive.continued(runner, first, 9, PLACES[0], 3)) == 3
