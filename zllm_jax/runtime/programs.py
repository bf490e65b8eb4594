"""The compiled programs of the functional core, one a shape for the whole process, and the inputs of their calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zllm_jax.config import Dtype, ModelConfig
from zllm_jax.runtime import steps, transfer
from zllm_jax.runtime.models import architecture
from zllm_jax.runtime.port import Chunk, Row
from zllm_jax.runtime.sampling import pack_sampling
from zllm_jax.runtime.state import Pages, State, StateShape, init_state
from zllm_jax.runtime.weights import nest
from zllm_jax.values import Sampling

MAX_STOP_IDS = 8
_GREEDY = Sampling(temperature=0.0)
IDLE_CHUNK = Chunk(tokens=(), start=0, pages=(), ring=0, slot=0, sampling=_GREEDY, seed=0, last=False)
IDLE_ROW = Row(token=0, position=0, pages=(), ring=0, slot=0, sampling=_GREEDY, seed=0, budget=0, stop_ids=())

prefill = jax.jit(steps.prefill, static_argnames="cfg", donate_argnames="state")
decode = jax.jit(steps.decode, static_argnames=("cfg", "max_steps"), donate_argnames="state")
begin_slot = jax.jit(steps.begin_slot, donate_argnames="state")
copy_page = jax.jit(transfer.copy_page, donate_argnames="state")
copy_ring = jax.jit(transfer.copy_ring, donate_argnames="state")
scatter_ring = jax.jit(transfer.scatter_ring, donate_argnames="state")
gather_pages = jax.jit(transfer.gather_pages)
gather_ring = jax.jit(transfer.gather_ring)


@partial(jax.jit, donate_argnames="state")
def scatter_pages(
    state: State, ids: jax.Array, count: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[State, jax.Array]:
    """`transfer.scatter_pages`, and a small array that is ready with it: the state itself is donated again at once."""
    state = transfer.scatter_pages(state, ids, count, k, v)
    pool = next(layer for layer in state.layers if isinstance(layer, Pages))
    return state, pool.k[0, 0, 0, 0]


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
    )


def decode_inputs(rows: Sequence[Row], bucket: int, max_pages: int, num_steps: int) -> steps.DecodeInputs:
    """Rows padded to `bucket` with idle ones."""
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
    )


def fetch_prefill(cfg: ModelConfig, shape: StateShape, dtype: Dtype, state_dtype: Dtype, bucket: int) -> None:
    """Compile a prefill program, or fetch it from the cache, before there are weights to run it on."""
    params, state = _abstract(cfg, shape, dtype, state_dtype)
    inputs = prefill_inputs(IDLE_CHUNK, bucket, shape.max_pages)
    prefill.lower(params=params, state=state, inputs=inputs, cfg=cfg).compile()


def fetch_decode(
    cfg: ModelConfig, shape: StateShape, dtype: Dtype, state_dtype: Dtype, bucket: int, max_steps: int
) -> None:
    """As `fetch_prefill`, a decode program."""
    params, state = _abstract(cfg, shape, dtype, state_dtype)
    inputs = decode_inputs((), bucket, shape.max_pages, 1)
    decode.lower(params=params, state=state, inputs=inputs, cfg=cfg, max_steps=max_steps).compile()


def _abstract(cfg: ModelConfig, shape: StateShape, dtype: Dtype, state_dtype: Dtype) -> tuple[dict[str, Any], State]:
    """Shapes and types of the parameters and of the state."""
    arch = architecture(cfg)
    params = {name: jax.ShapeDtypeStruct(one.shape, jnp.dtype(dtype)) for name, one in arch.param_specs(cfg).items()}
    state = jax.eval_shape(lambda: init_state(arch.state_spec(cfg), shape, cfg.vocab_size, jnp.dtype(state_dtype)))
    return nest(params), state


def _table(pages: Sequence[int], max_pages: int) -> np.ndarray:
    table = np.zeros(max_pages, np.int32)
    table[: len(pages)] = pages
    return table


def _column(rows: Sequence[Row], name: str) -> np.ndarray:
    return np.array([getattr(row, name) for row in rows], np.int32)


def _stop_ids(rows: Sequence[Row]) -> np.ndarray:
    ids = np.full((len(rows), MAX_STOP_IDS), -1, np.int32)
    for i, row in enumerate(rows):
        if len(row.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"{len(row.stop_ids)} stop ids, at most {MAX_STOP_IDS} are compiled in")
        ids[i, : len(row.stop_ids)] = row.stop_ids
    return ids
