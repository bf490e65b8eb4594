"""After warm-up nothing compiles, and no step copies the pool it writes into."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from tests.runtime import drive
from tests.runtime.drive import Place, Scorer
from zllm_jax.runtime import (
    StateShape,
    count_compilations,
    init_params,
    init_state,
    programs,
    steps,
)
from zllm_jax.testing import tiny_config
from zllm_jax.values import Sampling

# A pool much larger than everything else a step touches, so that one copy of it would show.
SHAPE = StateShape(num_pages=512, page_tokens=8, num_rings=64, num_slots=4, max_pages=8)
PLACE = Place(drive.scattered(SHAPE, seed=0), ring=3, slot=1)
DONATING = {"begin_slot", "copy_page", "copy_ring", "scatter_pages", "scatter_ring"}  # their first argument
MIXED = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, top_k=3, logprobs=2),
    Sampling(repetition_penalty=1.3, top_p=0.9, logit_bias=((1, 2.0),)),
]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def warm(request: pytest.FixtureRequest) -> Scorer:
    cfg = tiny_config(request.param)
    made = drive.scorer(
        init_params(cfg, jax.random.key(0)), cfg, SHAPE, prefill_buckets=(4, 16), decode_buckets=(1, 3), decode_steps=2
    )
    steps: list[tuple[str, int, int]] = []
    with count_compilations() as count:
        made.warmup(lambda *now: steps.append(now))
    assert count.programs > 0
    assert [done for _, done, _ in steps] == list(range(len(steps)))
    assert steps[-1][1] == steps[-1][2]
    return made


def test_nothing_compiles_after_warm_up(warm: Scorer) -> None:
    prompt = list(range(40))
    with count_compilations() as count:
        warm.begin(PLACE.slot, prompt)
        for size in (16, 9, 4, 1):  # each bucket full and padded
            for sampling in MIXED:
                first = drive.prefilled(warm, prompt, PLACE, size=size, sampling=sampling, seed=2**64 - 1)
        rows = [drive.row(first.token, 40, PLACE, sampling=one, budget=2, stop_ids=(1, 2)) for one in MIXED]
        for few in (rows, rows[:2], rows[:1]):
            for steps in (1, 2):
                warm.decode(few, steps)
        for tokens in (1, 8, 37, 64):
            saved = drive.saved(warm, PLACE, tokens)
            drive.restore(warm, saved, replace(PLACE, ring=PLACE.ring + 1), tokens)
        warm.copy_page(PLACE.pages[0], PLACE.pages[1])
        if not warm.capacity.truncatable:
            warm.copy_ring(PLACE.ring, 0)
    assert count.programs == 0


def test_equal_stages_share_their_programs() -> None:
    """A model of twelve layers compiles as many programs as one of eight: both have four equal stages."""
    counts = []
    for num_layers in (8, 12):
        cfg = replace(tiny_config("llama"), num_layers=num_layers)
        made = drive.scorer(
            init_params(cfg, jax.random.key(0)), cfg, SHAPE, prefill_buckets=(8,), decode_buckets=(1,), decode_steps=1
        )
        assert made.capacity.num_stages == 4
        with count_compilations() as count:
            drive.prefilled(made, range(8), PLACE, size=8)
        counts.append(count.programs)
    assert counts == [3, 3]  # the embedding, a stage, the first token


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_what_is_fetched_before_the_weights_is_what_runs(arch: Any) -> None:
    cfg, shape = tiny_config(arch), replace(SHAPE, num_pages=96)
    programs.fetch_prefill(cfg, shape, "float32", "float32", 4)
    programs.fetch_decode(cfg, shape, "float32", "float32", 1, 2)
    made = drive.scorer(
        init_params(cfg, jax.random.key(0)), cfg, shape, prefill_buckets=(4,), decode_buckets=(1,), decode_steps=2
    )
    with count_compilations() as count:
        first = drive.prefilled(made, range(6), PLACE, size=4)
        made.decode([drive.row(first.token, 6, PLACE, budget=2)], 2)
    assert count.programs == 0


def test_the_counter_counts(warm: Scorer) -> None:
    """A step in a shape that was not warmed up shows, and is no longer counted once the block has ended."""
    with count_compilations() as count:
        pass
    jax.jit(lambda x: x + np.float32(1))(np.zeros(7, np.float32))
    assert count.programs == 0
    with count_compilations() as count:
        warm.score(list(range(5)), PLACE, size=5)
    assert count.programs > 0


def memory(warm: Scorer, step: str, *, donated: bool = True, **more: int) -> Any:
    """What the compiler says of a step on a state of SHAPE with more pages or rings."""
    state = jax.eval_shape(lambda: init_state(warm._spec, replace(SHAPE, **more), warm._cfg.vocab_size, warm._dtype))
    chunk = replace(programs.IDLE_CHUNK, tokens=range(16), last=True)
    inputs = programs.prefill_inputs(chunk, 16, SHAPE.max_pages)
    call: dict[str, Any] = {"cfg": warm._cfg}
    if step == "run_stage":
        stage = warm._stages[-1]
        passing = jax.eval_shape(partial(steps.begin_chunk, cfg=warm._cfg), programs.around(warm._params), inputs)
        call |= {"weights": stage.of(warm._params["layers"]), "layers": stage.of(state.layers), "passing": passing}
        call |= {"kinds": stage.kinds}
    elif step == "draw_first":
        x = jax.ShapeDtypeStruct((1, 16, warm._cfg.embed_dim), warm._dtype)
        call |= {"params": programs.around(warm._params), "history": state.history, "x": x, "inputs": inputs}
    else:
        rows = [replace(programs.IDLE_ROW, budget=1)] * 3
        call |= {"params": warm._params, "state": state, "max_steps": 2}
        call |= {"inputs": programs.decode_inputs(rows, 3, SHAPE.max_pages, 2)}
    if donated:
        lowered = getattr(programs, step).lower(**call, mesh=None)
    else:
        static = tuple(call.keys() & {"cfg", "kinds", "max_steps"})
        lowered = jax.jit(getattr(steps, step), static_argnames=static).lower(**call)
    return lowered.compile().memory_analysis()


def donated_bytes(warm: Scorer, step: str) -> int:
    given: dict[str, Any] = {
        "run_stage": warm._stages[-1].of(warm.layers),
        "draw_first": warm._state.history,
        "decode": warm._state,
    }
    return sum(leaf.nbytes for leaf in jax.tree.leaves(given[step]))


@pytest.mark.parametrize("step", ["run_stage", "draw_first", "decode"])
def test_a_step_writes_into_the_memory_it_was_given(warm: Scorer, step: str) -> None:
    """Every byte of the state that goes in is memory of the state that comes out: only so if the state is donated."""
    assert memory(warm, step).alias_size_in_bytes >= donated_bytes(warm, step)
    assert memory(warm, step, donated=False).alias_size_in_bytes < donated_bytes(warm, step)


@pytest.mark.parametrize("step", ["run_stage", "decode"])
def test_a_step_copies_no_pages(warm: Scorer, step: str) -> None:
    """What a step needs besides does not grow with the pool."""
    more = memory(warm, step, num_pages=8 * SHAPE.num_pages)
    assert more.temp_size_in_bytes == memory(warm, step).temp_size_in_bytes


def test_a_step_in_parts_copies_no_pages() -> None:
    """One row, whose pages are one tile, and a stage of several layers."""
    cfg = replace(tiny_config("llama"), num_layers=6)
    made = drive.scorer(init_params(cfg, jax.random.key(0)), cfg, SHAPE)
    stage = made._stages[0]
    assert len(stage.kinds) > 1
    inputs = programs.decode_inputs((), 1, SHAPE.max_pages, 1)
    passing = jax.eval_shape(partial(steps.begin_rows, cfg=cfg), programs.around(made._params), inputs)

    def temporary(num_pages: int) -> int:
        shape = replace(SHAPE, num_pages=num_pages)
        state = jax.eval_shape(lambda: init_state(made._spec, shape, cfg.vocab_size, made._dtype))
        given = (stage.of(made._params["layers"]), stage.of(state.layers), passing)
        lowered = programs.run_stage.lower(*given, cfg=cfg, kinds=stage.kinds, mesh=None)
        return int(lowered.compile().memory_analysis().temp_size_in_bytes)

    assert temporary(8 * SHAPE.num_pages) == temporary(SHAPE.num_pages)


@pytest.mark.parametrize("step", ["run_stage", "decode"])
def test_a_step_copies_no_rings(step: str) -> None:
    cfg = tiny_config("gemma3")
    made = drive.scorer(init_params(cfg, jax.random.key(0)), cfg, SHAPE)
    made._stages = made._stages[:1]  # of rings
    more = memory(made, step, num_rings=8 * SHAPE.num_rings)
    assert more.temp_size_in_bytes == memory(made, step).temp_size_in_bytes


def test_no_transfer_copies_the_pool(warm: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever programs the transfers call: each that returns a state returns it in the memory it was given."""
    watched: dict[str, Any] = {}

    def watch(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if name in DONATING:
                given = sum(leaf.nbytes for leaf in jax.tree.leaves(args[0]))
                watched[name] = given, function.lower(*args, **options).compile().memory_analysis()
            return function(*args, **options)

        return call

    for name, function in list(vars(programs).items()):
        if hasattr(function, "lower"):
            monkeypatch.setattr(programs, name, watch(name, function))
    drive.restore(warm, drive.saved(warm, PLACE, 30), PLACE, 30)
    warm.begin(0, [1, 2])
    warm.copy_page(0, 1)
    if not warm.capacity.truncatable:
        warm.copy_ring(0, 1)
    rings = set() if warm.capacity.truncatable else {"copy_ring", "scatter_ring"}
    assert watched.keys() == {"begin_slot", "copy_page", "scatter_pages"} | rings
    for name, (given, found) in watched.items():
        assert found.alias_size_in_bytes >= given, name
        assert found.temp_size_in_bytes < max(leaf.nbytes for leaf in jax.tree.leaves(warm.layers)), name
