"""numpy oracle <-> reference <-> interpreted TPU kernel, over pages whose unowned rows are NaN."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common.interpret import interpreted
from pallas_kernels._common.tolerances import ATTENTION_MUTANTS, TOLERANCES, row_error
from pallas_kernels.paged_attention import paged_attention, tpu
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.config import Config, heuristic

SMALL = [case for case in CASES if case.small]
by_case = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


def oracle(inputs: dict[str, Any]) -> np.ndarray:
    """Row by row and head by head in float64, touching only pages that a row owns."""
    q, k_pool, v_pool = (np.asarray(inputs[name]).astype(np.float64) for name in ("q", "k_pool", "v_pool"))
    tokens_per_page, group = k_pool.shape[2], q.shape[1] // k_pool.shape[1]
    out = np.zeros_like(q)
    for row, length in enumerate(inputs["lengths"]):
        first = 0 if inputs["window"] is None else max(0, length - inputs["window"])
        places = [(inputs["page_table"][row, s // tokens_per_page], s % tokens_per_page) for s in range(first, length)]
        for head in range(q.shape[1] if places else 0):
            k, v = (np.stack([pool[page, head // group, at] for page, at in places]) for pool in (k_pool, v_pool))
            scores = inputs["scale"] * (k @ q[row, head])
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v / weights.sum()
    return out


def run(inputs: dict[str, Any], implementation: str) -> np.ndarray:
    if implementation == "reference":
        return np.asarray(paged_attention(**inputs, implementation="reference"))
    with interpreted():
        return np.asarray(paged_attention(**inputs, implementation=implementation))


@functools.cache
def run_case(case: Case, implementation: str) -> np.ndarray:
    return run(case.inputs(), implementation)


def tolerance(case: Case) -> float:
    return TOLERANCES["paged_attention", case.dtype].bound


@by_case
@pytest.mark.parametrize("implementation", ["reference", "tpu"])
def test_equals_the_oracle(case: Case, implementation: str) -> None:
    inputs = case.inputs()
    actual = run_case(case, implementation)
    assert actual.dtype == inputs["q"].dtype
    assert row_error(actual, oracle(inputs)) <= tolerance(case)


@pytest.mark.parametrize("mutant", ATTENTION_MUTANTS)
@pytest.mark.parametrize("case", [case for case in SMALL if case.window != 1], ids=lambda case: case.name)
def test_the_tolerance_rejects_its_mutants(case: Case, mutant: str) -> None:
    inputs = case.inputs()
    mutated = TOLERANCES["paged_attention", case.dtype].mutants[mutant](inputs)
    assert row_error(run(dict(mutated), "reference"), oracle(inputs)) > tolerance(case)


@pytest.mark.parametrize("implementation", ["reference", "tpu"])
def test_idle_rows_are_zero(implementation: str) -> None:
    inputs = SMALL[0].inputs()
    idle = inputs["lengths"] == 0
    assert idle.any()
    assert not idle.all()
    out = run_case(SMALL[0], implementation)
    assert (out[idle] == 0).all()
    assert (out[~idle] != 0).all()


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    inputs = SMALL[0].inputs()
    together = run_case(SMALL[0], "tpu")
    for row in range(len(inputs["lengths"])):
        alone = inputs | {name: inputs[name][row : row + 1] for name in ("q", "page_table", "lengths")}
        np.testing.assert_array_equal(run(alone, "tpu"), together[row : row + 1])


@pytest.mark.parametrize("pages_per_tile", [1, 7])
def test_any_tile_size_gives_the_same_answer(pages_per_tile: int) -> None:
    case = next(case for case in SMALL if case.name == "window_float32")
    inputs = case.inputs()
    with interpreted():
        out = tpu.paged_attention(**inputs, config=Config(pages_per_tile=pages_per_tile))
        assert row_error(out, oracle(inputs)) <= tolerance(case)


def test_a_window_as_long_as_the_sequence_changes_nothing() -> None:
    inputs = SMALL[0].inputs()
    longest = int(inputs["lengths"].max())
    np.testing.assert_array_equal(run(inputs | {"window": longest}, "tpu"), run_case(SMALL[0], "tpu"))


def test_new_lengths_and_pages_compile_nothing() -> None:
    first, second = SMALL[0].inputs(seed=1), SMALL[0].inputs(seed=2)
    step = jax.jit(lambda **arrays: paged_attention(**arrays, scale=first["scale"]))
    for inputs in (first, second):
        step(**{name: value for name, value in inputs.items() if name not in ("scale", "window")})
    assert step._cache_size() == 1


def test_auto_takes_the_reference_on_a_cpu() -> None:
    inputs = SMALL[0].inputs()
    np.testing.assert_array_equal(
        np.asarray(paged_attention(**inputs)), np.asarray(paged_attention(**inputs, implementation="reference"))
    )


def test_a_named_kernel_raises_where_it_cannot_run() -> None:
    inputs = SMALL[0].inputs()
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        paged_attention(**inputs, implementation="tpu")


def test_a_named_kernel_refuses_pages_it_cannot_tile_but_auto_does_not() -> None:
    inputs = SMALL[0].inputs() | {"lengths": np.full(4, 5, np.int32), "page_table": np.zeros((4, 1), np.int32)}
    inputs |= {name: inputs[name][:, :, :5] for name in ("k_pool", "v_pool")}
    with pytest.raises(ValueError, match="C=5 tokens, float32 pages must hold a multiple of 8"):
        paged_attention(**inputs, implementation="tpu")
    assert paged_attention(**inputs).shape == inputs["q"].shape


def f32(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": f32(4, 9)}, r"q must have the dimensions \[B, N, H\]"),
        ({"q": f32(4, 8, 64)}, "q has N=8 heads, must be a multiple of the K=3 heads of k_pool"),
        ({"q": jnp.zeros((4, 9, 64), jnp.bfloat16)}, "must share a dtype, got bfloat16, float32 and float32"),
        ({"k_pool": f32(8, 3, 16, 32)}, "k_pool .* but H is 64"),
        ({"v_pool": f32(1, 3, 16, 64)}, "v_pool .* but P is"),
        ({"page_table": f32(4, 4)}, "page_table must be int32, got float32"),
        ({"lengths": jnp.zeros(3, jnp.int32)}, "lengths .* but B is 4"),
        ({"scale": float("nan")}, "scale is nan, must be positive and finite"),
        ({"window": 0}, "window is 0, must be at least 1"),
        ({"implementation": "cuda"}, "implementation is 'cuda', must be one of auto, reference, tpu"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(**(SMALL[0].inputs() | change))


def test_the_heuristic_keeps_tiles_within_their_limits() -> None:
    def pages(**change: int) -> int:
        shape = {"tokens_per_page": 64, "num_kv_heads": 8, "head_dim": 128, "itemsize": 2, "max_pages": 100} | change
        return heuristic(**shape).pages_per_tile

    assert pages() == 8  # 512 tokens
    assert pages(max_pages=3) == 3
    assert pages(num_kv_heads=32) == 2  # 4 MiB hold two buffers of two pages
    assert pages(tokens_per_page=4096) == 1
