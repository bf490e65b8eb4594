"""State in and out of the device, as logical rows: independent of page size, page numbers and mesh.

A sequence's state is a dict of host arrays: `paged.k`, `paged.v` [L_paged, K, S, H] and `ring.k`, `ring.v`
[L_ring, K, w, H] (row p mod w holds position p). Pages move in groups of a fixed size, so that any length uses the
same few compiled programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from zllm_jax.buffers import aligned_empty
from zllm_jax.runtime.specs import StateSpec
from zllm_jax.runtime.state import LayerState, Pages, Rings, State

Rows = dict[str, np.ndarray]
_TOKEN_AXIS = 2
GROUP_PAGES = 2


def row_layout(spec: StateSpec, dtype: jnp.dtype) -> dict[str, tuple[np.dtype, tuple[int | None, ...], int | None]]:
    """Name -> (dtype, shape with None for the token axis, index of the token axis or None)."""
    layout: dict[str, tuple[np.dtype, tuple[int | None, ...], int | None]] = {}
    kind = np.dtype(dtype)
    if spec.paged:
        one = spec.paged[0]
        paged = (kind, (len(spec.paged), one.num_kv_heads, None, one.head_dim), _TOKEN_AXIS)
        layout |= {"paged.k": paged, "paged.v": paged}
    if spec.rings:
        ring = spec.rings[0]
        kept = (kind, (len(spec.rings), ring.num_kv_heads, ring.window, ring.head_dim), None)
        layout |= {"ring.k": kept, "ring.v": kept}
    return layout


def copy_page(state: State, source: jax.Array, target: jax.Array) -> State:
    """Copy one page over all paged layers (copy on write of a partial last page)."""

    def copy(layer: LayerState) -> LayerState:
        if not isinstance(layer, Pages):
            return layer
        return Pages(k=layer.k.at[target].set(layer.k[source]), v=layer.v.at[target].set(layer.v[source]))

    return replace(state, layers=tuple(copy(layer) for layer in state.layers))


def copy_ring(state: State, source: jax.Array, target: jax.Array) -> State:
    """Copy one ring over all sliding-window layers (a checkpoint, or a fork from one)."""

    def copy(layer: LayerState) -> LayerState:
        if not isinstance(layer, Rings):
            return layer
        return Rings(k=layer.k.at[target].set(layer.k[source]), v=layer.v.at[target].set(layer.v[source]))

    return replace(state, layers=tuple(copy(layer) for layer in state.layers))


def gather_pages(state: State, ids: jax.Array) -> dict[str, jax.Array]:
    """ids i32[g] -> rows [L_paged, K, g*C, H]."""

    def rows(pool: jax.Array) -> jax.Array:
        picked = pool[ids].transpose(1, 0, 2, 3)  # [K, g, C, H]
        return picked.reshape(picked.shape[0], -1, picked.shape[3])

    pools = [layer for layer in state.layers if isinstance(layer, Pages)]
    return {
        "paged.k": jnp.stack([rows(pool.k) for pool in pools]),
        "paged.v": jnp.stack([rows(pool.v) for pool in pools]),
    }


def scatter_pages(state: State, ids: jax.Array, count: jax.Array, k: jax.Array, v: jax.Array) -> State:
    """Rows k, v [L_paged, K, g*C, H] into the first `count` pages of ids i32[g].

    One block copy a page and layer: a scatter costs twice the time on a CPU.
    """

    def put(i: jax.Array, layers: tuple[LayerState, ...]) -> tuple[LayerState, ...]:
        found = iter(range(k.shape[0]))
        return tuple(_put_page(one, ids[i], i, next(found), k, v) if isinstance(one, Pages) else one for one in layers)

    return replace(state, layers=jax.lax.fori_loop(0, count, put, state.layers))


def _put_page(pool: Pages, page: jax.Array, place: jax.Array, layer: int, k: jax.Array, v: jax.Array) -> Pages:
    _, K, C, H = pool.k.shape

    def one(target: jax.Array, rows: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_slice(rows, (layer, 0, place * C, 0), (1, K, C, H))
        return jax.lax.dynamic_update_slice(target, block, (page, 0, 0, 0))

    return Pages(k=one(pool.k, k), v=one(pool.v, v))


def gather_ring(state: State, ring: jax.Array) -> dict[str, jax.Array]:
    """One ring over all sliding-window layers: [L_ring, K, w, H]."""
    pools = [layer for layer in state.layers if isinstance(layer, Rings)]
    return {
        "ring.k": jnp.stack([pool.k[ring] for pool in pools]),
        "ring.v": jnp.stack([pool.v[ring] for pool in pools]),
    }


def scatter_ring(state: State, ring: jax.Array, k: jax.Array, v: jax.Array) -> State:
    """Rows k, v [L_ring, K, w, H] into one ring."""
    found = iter(range(k.shape[0]))

    def layer_of(layer: LayerState) -> LayerState:
        if not isinstance(layer, Rings):
            return layer
        i = next(found)
        return Rings(k=layer.k.at[ring].set(k[i]), v=layer.v.at[ring].set(v[i]))

    return replace(state, layers=tuple(layer_of(layer) for layer in state.layers))


def page_groups(pages: Sequence[int]) -> Iterator[tuple[int, int, np.ndarray]]:
    """(index of the first page, how many, i32[GROUP_PAGES] ids padded with 0) over a sequence's pages."""
    for start in range(0, len(pages), GROUP_PAGES):
        part = pages[start : start + GROUP_PAGES]
        ids = np.zeros(GROUP_PAGES, np.int32)
        ids[: len(part)] = part
        yield start, len(part), ids


class Staging:
    """Two reused host buffers of `rows` for one group of pages, so that filling one overlaps copying the other.

    XLA on a CPU reads a buffer where it lies: it may be filled again only when its last copy is done.
    """

    def __init__(self, layout: Mapping[str, tuple[np.dtype, tuple[int | None, ...], int | None]], group_tokens: int):
        self._group_tokens = group_tokens
        self._buffers = [
            {
                name: aligned_empty([group_tokens if size is None else size for size in shape], dtype)
                for name, (dtype, shape, axis) in layout.items()
                if axis is not None
            }
            for _ in range(2)
        ]
        self._last_used: list[jax.Array | None] = [None, None]
        self._turn = 0

    def fill(self, rows: Mapping[str, np.ndarray], start: int) -> dict[str, jax.Array]:
        """The group of tokens from `start` on, on the device; rows past the sequence's end hold anything."""
        self._turn ^= 1
        last = self._last_used[self._turn]
        if last is not None:
            last.block_until_ready()
        parts = self._buffers[self._turn]
        for name, part in parts.items():
            here = rows[name][:, :, start : start + self._group_tokens]
            part[:, :, : here.shape[_TOKEN_AXIS]] = here
        return {name: jax.device_put(part) for name, part in parts.items()}

    def used_by(self, done: jax.Array) -> None:
        """`done` is ready when the copy out of the last filled buffers is."""
        self._last_used[self._turn] = done
