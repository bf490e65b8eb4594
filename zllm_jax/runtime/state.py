"""Device state as pytrees: pools of pages, rings, and what the sampler remembers of each slot.

A page `[K, C, H]` stands heads-major, so that the batch dimension of the attention products comes first
(docs/adr/0002). A page or ring that nobody owns may hold anything, NaN included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zllm_jax.fence import GuardRows, LoopGuard, guard_rows
from zllm_jax.runtime.sharding import sharding
from zllm_jax.runtime.specs import Axis, LayerSpec, PagedSpec, StateSpec

# Where a mesh splits the arrays: those of a layer, on the device and as rows [L, K, S, H], and those of the sampler.
ROW_AXES: tuple[Axis, ...] = (None, "kv_heads", None, "head_dim")
HISTORY_AXES: tuple[Axis, ...] = (None, "vocab")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pages:
    """Keys and values of one paged layer: two [P, K, C, H]."""

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rings:
    """Keys and values of one sliding-window layer: two [R, K, w, H]; position p at row p mod w."""

    k: jax.Array
    v: jax.Array


LayerState = Pages | Rings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """What the sampler remembers, a row a slot.

    For penalties: tokens of the prompt (bool[B, V]) and counts of the output (i32[B, V]). guard: of the output, for
    loops; None where no row is ever watched.
    """

    prompt_seen: jax.Array
    output_counts: jax.Array
    guard: GuardRows | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """All that a step reads and writes. It enters a step, is donated, and leaves it."""

    layers: tuple[LayerState, ...]
    history: History

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """How much state an engine allocates: P pages of C tokens, R rings, slots, and M pages a sequence at most."""

    num_pages: int
    page_tokens: int
    num_rings: int
    num_slots: int
    max_pages: int

    def __post_init__(self) -> None:
        if self.num_pages < self.max_pages:
            raise ValueError(f"{self.num_pages} pages cannot hold one sequence of {self.max_pages} pages")


def init_state(
    spec: StateSpec,
    shape: StateShape,
    vocab_size: int,
    dtype: jnp.dtype,
    fill: float = 0.0,
    *,
    mesh: Mesh | None = None,
    guard: LoopGuard | None = None,
) -> State:
    """A fresh state; `fill` may be NaN in tests, because nothing unowned is ever read. A mesh splits it by heads.

    guard: what rows may be watched by; whole on every device.
    """

    whole = None if mesh is None else sharding(mesh, (), ())

    def full(dims: tuple[int, ...], axes: tuple[Axis, ...], value: float, dtype: jnp.dtype) -> jax.Array:
        return jnp.full(dims, value, dtype, device=None if mesh is None else sharding(mesh, axes, dims))

    def layer(one: LayerSpec) -> LayerState:
        if isinstance(one, PagedSpec):
            dims = (shape.num_pages, one.num_kv_heads, shape.page_tokens, one.head_dim)
            return Pages(k=full(dims, ROW_AXES, fill, dtype), v=full(dims, ROW_AXES, fill, dtype))
        dims = (shape.num_rings, one.num_kv_heads, one.window, one.head_dim)
        return Rings(k=full(dims, ROW_AXES, fill, dtype), v=full(dims, ROW_AXES, fill, dtype))

    slots = (shape.num_slots, vocab_size)
    history = History(
        prompt_seen=full(slots, HISTORY_AXES, False, jnp.dtype(jnp.bool_)),
        output_counts=full(slots, HISTORY_AXES, 0, jnp.dtype(jnp.int32)),
        guard=None if guard is None else jax.device_put(guard_rows(shape.num_slots, guard=guard), whole),
    )
    return State(layers=tuple(layer(one) for one in spec.layers), history=history)


def page_bytes(spec: StateSpec, page_tokens: int, itemsize: int) -> int:
    """Bytes of one page over all paged layers."""
    return spec.token_bytes(itemsize) * page_tokens


def pages_for(num_tokens: int, page_tokens: int) -> int:
    return math.ceil(num_tokens / page_tokens)
