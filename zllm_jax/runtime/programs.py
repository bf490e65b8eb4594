"""The compiled programs of the functional core, one a shape for the whole process, and the inputs of their calls.

A prefill is several programs, so that it can be interrupted between two stages: `begin_chunk`, a `run_stage` each,
`draw_first`. Stages that keep the same run the same compiled program on their own parameters and state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zllm_jax.config import Dtype, ModelConfig
from zllm_jax.fence import Block, FenceState, FenceTables, HostMatcher, LoopGuard, pack_positions
from zllm_jax.fence import write_block as write_fence_block
from zllm_jax.runtime import steps, transfer
from zllm_jax.runtime.loops import Watch
from zllm_jax.runtime.models import architecture
from zllm_jax.runtime.port import Chunk, Fenced, Row, Watched
from zllm_jax.runtime.sampling import Sampled, pack_sampling
from zllm_jax.runtime.sharding import partition, pin, sharding
from zllm_jax.runtime.specs import Axis, LayerSpec
from zllm_jax.runtime.stages import cut
from zllm_jax.runtime.state import HISTORY_AXES, ROW_AXES, History, State, StateShape, init_state
from zllm_jax.runtime.transfer import Layers
from zllm_jax.runtime.weights import nest
from zllm_jax.values import Sampling

T = TypeVar("T")
MAX_STOP_IDS = 8  # known to the device; a row with more is watched by the host, one step a call
_GREEDY = Sampling(temperature=0.0)
IDLE_CHUNK = Chunk(tokens=(), start=0, pages=(), ring=0, slot=0, sampling=_GREEDY, seed=0, last=False)
IDLE_ROW = Row(token=0, position=0, pages=(), ring=0, slot=0, sampling=_GREEDY, seed=0, budget=0, stop_ids=())


@partial(jax.jit, static_argnames=("cfg", "mesh"))
def begin_chunk(
    params: steps.Params, inputs: steps.PrefillInputs, *, cfg: ModelConfig, mesh: Mesh | None
) -> steps.Passing:
    return pin(steps.begin_chunk(params, inputs, cfg=cfg), mesh)


@partial(jax.jit, static_argnames=("cfg", "kinds", "mesh"), donate_argnames="layers")
def run_stage(
    weights: Any,
    layers: Layers,
    passing: steps.Passing,
    *,
    cfg: ModelConfig,
    kinds: tuple[LayerSpec, ...],
    mesh: Mesh | None,
) -> tuple[Layers, steps.Passing]:
    layers, passing = steps.run_stage(weights, layers, passing, cfg=cfg, kinds=kinds)
    return pin(layers, mesh, ROW_AXES), pin(passing, mesh)


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames="history")
def draw_first(
    params: steps.Params,
    history: History,
    x: jax.Array,
    inputs: steps.PrefillInputs,
    fences: FenceTables | None = None,
    words: jax.Array | None = None,
    allowed: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    mesh: Mesh | None,
) -> tuple[History, Sampled]:
    history, sampled = steps.draw_first(
        params, history, x, inputs, cfg=cfg, fences=fences, words=words, allowed=allowed
    )
    return _pinned(history, mesh), pin(sampled, mesh)


@partial(jax.jit, static_argnames=("cfg", "mesh"))
def begin_rows(
    params: steps.Params, inputs: steps.DecodeInputs, *, cfg: ModelConfig, mesh: Mesh | None
) -> steps.Passing:
    return pin(steps.begin_rows(params, inputs, cfg=cfg), mesh)


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames="history")
def draw_rows(
    params: steps.Params,
    history: History,
    x: jax.Array,
    inputs: steps.DecodeInputs,
    fences: FenceTables,
    allowed: jax.Array,
    words: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    mesh: Mesh | None,
) -> tuple[History, Sampled]:
    history, sampled = steps.draw_rows(params, history, x, inputs, allowed, cfg=cfg, fences=fences, words=words)
    return _pinned(history, mesh), pin(sampled, mesh)


@partial(jax.jit, static_argnames=("cfg", "max_steps", "mesh"), donate_argnames="state")
def decode(
    params: steps.Params,
    state: State,
    inputs: steps.DecodeInputs,
    fences: FenceTables | None = None,
    words: jax.Array | None = None,
    *,
    cfg: ModelConfig,
    max_steps: int,
    mesh: Mesh | None,
) -> tuple[State, steps.Decoded]:
    state, out = steps.decode(params, state, inputs, cfg=cfg, max_steps=max_steps, fences=fences, words=words)
    return State(pin(state.layers, mesh, ROW_AXES), _pinned(state.history, mesh)), pin(out, mesh)


@partial(jax.jit, static_argnames="mesh", donate_argnames="history")
def begin_slot(history: History, slot: jax.Array, tokens: jax.Array, *, mesh: Mesh | None) -> History:
    return _pinned(steps.begin_slot(history, slot, tokens), mesh)


def _pinned(history: History, mesh: Mesh | None) -> History:
    penalties = pin(replace(history, guard=None), mesh, HISTORY_AXES)
    return replace(penalties, guard=pin(history.guard, mesh))


@partial(jax.jit, static_argnames="mesh", donate_argnames="fences")
def write_fences(fences: FenceTables, block: Block, *, mesh: Mesh | None) -> FenceTables:
    return pin(write_fence_block(fences, block), mesh)


@partial(jax.jit, static_argnames="mesh", donate_argnames="layers")
def copy_page(layers: Layers, source: jax.Array, target: jax.Array, *, mesh: Mesh | None) -> Layers:
    return pin(transfer.copy_page(layers, source, target), mesh, ROW_AXES)


@partial(jax.jit, static_argnames="mesh", donate_argnames="layers")
def copy_ring(layers: Layers, source: jax.Array, target: jax.Array, *, mesh: Mesh | None) -> Layers:
    return pin(transfer.copy_ring(layers, source, target), mesh, ROW_AXES)


@partial(jax.jit, static_argnames="mesh")
def gather_pages(layers: Layers, ids: jax.Array, *, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    return pin(transfer.gather_pages(layers, ids), mesh, ROW_AXES)


@partial(jax.jit, static_argnames="mesh")
def gather_ring(layers: Layers, ring: jax.Array, *, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    return pin(transfer.gather_ring(layers, ring), mesh, ROW_AXES)


@partial(jax.jit, static_argnames="mesh", donate_argnames="layers")
def scatter_pages(
    layers: Layers, ids: jax.Array, count: jax.Array, k: jax.Array, v: jax.Array, *, mesh: Mesh | None
) -> tuple[Layers, jax.Array]:
    layers, arrived = transfer.scatter_pages(layers, ids, count, k, v)
    return pin(layers, mesh, ROW_AXES), arrived


@partial(jax.jit, static_argnames="mesh", donate_argnames="layers")
def scatter_ring(
    layers: Layers, ring: jax.Array, k: jax.Array, v: jax.Array, *, mesh: Mesh | None
) -> tuple[Layers, jax.Array]:
    layers, arrived = transfer.scatter_ring(layers, ring, k, v)
    return pin(layers, mesh, ROW_AXES), arrived


def prefill_inputs(chunk: Chunk, bucket: int, max_pages: int) -> steps.PrefillInputs:
    """A chunk padded to `bucket` tokens."""
    tokens = np.zeros(bucket, np.int32)
    tokens[: len(chunk.tokens)] = chunk.tokens
    return steps.PrefillInputs(
        tokens=tokens,
        start=np.int32(chunk.start),
        count=np.int32(len(chunk.tokens)),
        table=_table(chunk.pages, max_pages),
        ring=np.int32(chunk.ring),
        slot=np.int32(chunk.slot),
        sampling=pack_sampling([(chunk.sampling, chunk.seed)]),
        last=np.bool_(chunk.last),
        fence=_positions([chunk]),
        watch=_watch([chunk]),
    )


def decode_inputs(rows: Sequence[Row], bucket: int, max_pages: int, num_steps: int) -> steps.DecodeInputs:
    """Rows padded to `bucket` with idle ones."""
    if any(len(row.stop_ids) > MAX_STOP_IDS for row in rows):
        num_steps = min(num_steps, 1)
    padded = [*rows, *([IDLE_ROW] * (bucket - len(rows)))]
    return steps.DecodeInputs(
        tokens=_column(padded, "token"),
        positions=_column(padded, "position"),
        table=np.stack([_table(row.pages, max_pages) for row in padded]),
        rings=_column(padded, "ring"),
        slots=_column(padded, "slot"),
        budget=_column(padded, "budget"),
        stop_ids=_stop_ids(padded),
        sampling=pack_sampling([(row.sampling, row.seed) for row in padded]),
        steps=np.int32(num_steps),
        fence=_positions(padded),
        watch=_watch(padded),
        pauses=np.array([row.pauses for row in padded], np.bool_),
    )


def _positions(several: Sequence[Row] | Sequence[Chunk]) -> FenceState:
    """Where the outputs of rows or chunks stand on the device."""
    fences = [one.fence if isinstance(one.fence, Fenced) else None for one in several]
    return pack_positions([None if one is None else (one.place.states, one.place.returns, one.at) for one in fences])


_UNWATCHED = Watched()


def _watch(several: Sequence[Row] | Sequence[Chunk]) -> Watch:
    """Which rows or chunks the loop guard sees."""
    watches = [one.watch or _UNWATCHED for one in several]
    return Watch(
        on=np.array([one.watch is not None for one in several], np.bool_),
        inside=np.array([one.inside for one in watches], np.bool_),
        opens=np.array([one.opens for one in watches], np.int32),
        closes=np.array([one.closes for one in watches], np.int32),
    )


def host_masks(several: Sequence[Row | Chunk], bucket: int, num_words: int) -> np.ndarray:
    """What the rows' matchers allow, u32[B, W], all ones where there is none."""
    masks = np.full((bucket, num_words), 0xFFFFFFFF, np.uint32)
    for i, one in enumerate(several):
        if isinstance(one.fence, HostMatcher):
            masks[i] = one.fence.mask()
    return masks


def around(params: steps.Params) -> dict[str, Any]:
    """What `begin_chunk` and `draw_first` use of the parameters."""
    return {name: value for name, value in params.items() if name != "layers"}


def fetch_prefill(
    cfg: ModelConfig,
    shape: StateShape,
    dtype: Dtype,
    state_dtype: Dtype,
    bucket: int,
    mesh: Mesh | None = None,
    fences: FenceTables | None = None,
    guard: LoopGuard | None = None,
) -> None:
    """Compile the programs of a prefill, or fetch them from the cache, before there are weights to run them on.

    fences: the table that they will read, or its shapes; None where no row will have a fence. guard: likewise.
    """
    params, state = _abstract(cfg, shape, dtype, state_dtype, mesh, guard)
    inputs = prefill_inputs(IDLE_CHUNK, bucket, shape.max_pages)
    fences = _shapes(fences, mesh)
    fixed: dict[str, Any] = {"cfg": cfg, "mesh": mesh}
    begin_chunk.lower(around(params), inputs, **fixed).compile()
    passing = jax.eval_shape(partial(steps.begin_chunk, cfg=cfg), around(params), inputs)
    passing = _placed(passing, mesh)
    for stage in {stage.kinds: stage for stage in cut(architecture(cfg).state_spec(cfg))}.values():
        weights, layers = stage.of(params["layers"]), stage.of(state.layers)
        run_stage.lower(weights, layers, passing, kinds=stage.kinds, **fixed).compile()
    words = _words(cfg, mesh, guard)
    allowed = None if fences is None else host_masks((), 1, -(-cfg.vocab_size // 32))
    draw_first.lower(around(params), state.history, passing.x, inputs, fences, words, allowed, **fixed).compile()


def fetch_decode(
    cfg: ModelConfig,
    shape: StateShape,
    dtype: Dtype,
    state_dtype: Dtype,
    bucket: int,
    max_steps: int,
    mesh: Mesh | None = None,
    fences: FenceTables | None = None,
    guard: LoopGuard | None = None,
) -> None:
    """As `fetch_prefill`, a decode program."""
    params, state = _abstract(cfg, shape, dtype, state_dtype, mesh, guard)
    inputs = decode_inputs((), bucket, shape.max_pages, 1)
    fences = _shapes(fences, mesh)
    words = _words(cfg, mesh, guard)
    decode.lower(params, state, inputs, fences, words, cfg=cfg, max_steps=max_steps, mesh=mesh).compile()


def _abstract(
    cfg: ModelConfig,
    shape: StateShape,
    dtype: Dtype,
    state_dtype: Dtype,
    mesh: Mesh | None,
    guard: LoopGuard | None,
) -> tuple[dict[str, Any], State]:
    """Shapes, types and places of the parameters and of the state."""
    arch = architecture(cfg)
    params = {
        name: jax.ShapeDtypeStruct(
            one.shape, jnp.dtype(dtype), sharding=None if mesh is None else sharding(mesh, one.axes, one.shape)
        )
        for name, one in arch.param_specs(cfg).items()
    }
    state = jax.eval_shape(
        lambda: init_state(arch.state_spec(cfg), shape, cfg.vocab_size, jnp.dtype(state_dtype), guard=guard)
    )
    penalties = _placed(replace(state.history, guard=None), mesh, HISTORY_AXES)
    history = replace(penalties, guard=_placed(state.history.guard, mesh))
    return nest(params), State(_placed(state.layers, mesh, ROW_AXES), history)


def _words(cfg: ModelConfig, mesh: Mesh | None, guard: LoopGuard | None) -> Any:
    return None if guard is None else _placed(jax.ShapeDtypeStruct((cfg.vocab_size,), jnp.bool_), mesh)


def _shapes(fences: FenceTables | None, mesh: Mesh | None) -> Any:
    """Shapes, types and places of the table of grammars."""
    return _placed(jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), fences), mesh)


def _placed(tree: T, mesh: Mesh | None, axes: Sequence[Axis] = ()) -> T:
    """Shapes and types -> with the place that `pin` keeps them at."""
    if mesh is None:
        return tree
    where = NamedSharding(mesh, partition(axes))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree)


def _table(pages: Sequence[int], max_pages: int) -> np.ndarray:
    table = np.zeros(max_pages, np.int32)
    table[: len(pages)] = pages
    return table


def _column(rows: Sequence[Row], name: str) -> np.ndarray:
    return np.array([getattr(row, name) for row in rows], np.int32)


def _stop_ids(rows: Sequence[Row]) -> np.ndarray:
    ids = np.full((len(rows), MAX_STOP_IDS), -1, np.int32)
    for i, row in enumerate(rows):
        known = row.stop_ids[:MAX_STOP_IDS]
        ids[i, : len(known)] = known
    return ids
