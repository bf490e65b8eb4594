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

from zllm_jax.runtime.specs import StateSpec
from zllm_jax.runtime.state import LayerState, Pages, Rings, State

Rows = dict[str, np.ndarray]
_TOKEN_AXIS = 2
GROUP_PAGES = 4


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


def scatter_pages(state: State, ids: jax.Array, k: jax.Array, v: jax.Array) -> State:
    """Rows k, v [L_paged, K, g*C, H] into pages ids i32[g]; an id of P or more drops its page."""
    found = iter(range(k.shape[0]))

    def put(pool: jax.Array, rows: jax.Array) -> jax.Array:
        K, _, H = rows.shape
        pages = rows.reshape(K, ids.shape[0], -1, H).transpose(1, 0, 2, 3)
        return pool.at[ids].set(pages, mode="drop")

    def layer_of(layer: LayerState) -> LayerState:
        if not isinstance(layer, Pages):
            return layer
        i = next(found)
        return Pages(k=put(layer.k, k[i]), v=put(layer.v, v[i]))

    return replace(state, layers=tuple(layer_of(layer) for layer in state.layers))


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


def page_groups(pages: Sequence[int], drop: int) -> Iterator[tuple[int, np.ndarray]]:
    """(index of the first page, i32[GROUP_PAGES] ids padded with `drop`) over a sequence's pages."""
    for start in range(0, len(pages), GROUP_PAGES):
        ids = np.full(GROUP_PAGES, drop, np.int32)
        part = pages[start : start + GROUP_PAGES]
        ids[: len(part)] = part
        yield start, ids


def token_slice(rows: Mapping[str, np.ndarray], start: int, stop: int) -> list[np.ndarray]:
    """`paged.k` and `paged.v` from token `start` to `stop`, padded with zeros where the sequence ends earlier."""
    parts = []
    for name in ("paged.k", "paged.v"):
        part = rows[name][:, :, start:stop]
        missing = stop - start - part.shape[_TOKEN_AXIS]
        if missing:
            part = np.pad(part, ((0, 0), (0, 0), (0, missing), (0, 0)))
        parts.append(part)
    return parts
