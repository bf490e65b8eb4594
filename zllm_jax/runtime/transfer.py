"""State in and out of the device, as logical rows: independent of page size, page numbers and mesh.

A stage's part of a sequence's state is a few host arrays: `paged.k.<stage>`, `paged.v.<stage>` [L_paged, K, S, H] and
`ring.k.<stage>`, `ring.v.<stage>` [L_ring, K, w, H] (row p mod w holds position p), L counting the stage's layers of
that kind. Pages move in groups of a fixed size, so that any length uses the same few compiled programs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from zllm_jax.buffers import RowSpec
from zllm_jax.runtime.stages import Stage
from zllm_jax.runtime.state import LayerState, Pages, Rings

Layers = tuple[LayerState, ...]
_TOKEN_AXIS = 2
_GROUP_TOKENS = 256


def group_pages(page_tokens: int) -> int:
    """Pages of one transfer: about 256 tokens."""
    return max(1, _GROUP_TOKENS // page_tokens)


def row_layout(stages: Iterable[Stage], dtype: jnp.dtype) -> dict[str, RowSpec]:
    """The arrays of a sequence's state, stage by stage."""
    kind, layout = np.dtype(dtype), {}
    for stage in stages:
        paged, rings = stage.spec.paged, stage.spec.rings
        if paged:
            shape = (len(paged), paged[0].num_kv_heads, None, paged[0].head_dim)
            for part in ("k", "v"):
                layout[f"paged.{part}.{stage.index}"] = RowSpec(kind, shape, _TOKEN_AXIS, stage.index)
        if rings:
            kept = (len(rings), rings[0].num_kv_heads, rings[0].window, rings[0].head_dim)
            for part in ("k", "v"):
                layout[f"ring.{part}.{stage.index}"] = RowSpec(kind, kept, None, stage.index)
    return layout


@dataclass(frozen=True)
class Copy:
    """A copy into the state (`port.Copying`). arrived: an array that is ready with it; None: there was nothing."""

    arrived: jax.Array | None

    def done(self) -> bool:
        return self.arrived is None or self.arrived.is_ready()  # type: ignore[attr-defined]

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived.block_until_ready()


def copy_page(layers: Layers, source: jax.Array, target: jax.Array) -> Layers:
    """Copy one page over all paged layers (copy on write of a partial last page)."""

    def copy(layer: LayerState) -> LayerState:
        if not isinstance(layer, Pages):
            return layer
        return Pages(k=layer.k.at[target].set(layer.k[source]), v=layer.v.at[target].set(layer.v[source]))

    return tuple(copy(layer) for layer in layers)


def copy_ring(layers: Layers, source: jax.Array, target: jax.Array) -> Layers:
    """Copy one ring over all sliding-window layers (a checkpoint, or a fork from one)."""

    def copy(layer: LayerState) -> LayerState:
        if not isinstance(layer, Rings):
            return layer
        return Rings(k=layer.k.at[target].set(layer.k[source]), v=layer.v.at[target].set(layer.v[source]))

    return tuple(copy(layer) for layer in layers)


def gather_pages(layers: Layers, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """ids i32[g] -> keys and values [L_paged, K, g*C, H] of some layers."""

    def rows(pool: jax.Array) -> jax.Array:
        picked = pool[ids].transpose(1, 0, 2, 3)  # [K, g, C, H]
        return picked.reshape(picked.shape[0], -1, picked.shape[3])

    pools = [layer for layer in layers if isinstance(layer, Pages)]
    return jnp.stack([rows(pool.k) for pool in pools]), jnp.stack([rows(pool.v) for pool in pools])


def scatter_pages(
    layers: Layers, ids: jax.Array, count: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[Layers, jax.Array]:
    """Rows k, v [L_paged, K, g*C, H] into the first `count` pages of ids i32[g]; also an array for `Copy`.

    One block copy a page and layer: a scatter costs twice the time on a CPU.
    """

    def put(i: jax.Array, layers: Layers) -> Layers:
        found = iter(range(k.shape[0]))
        return tuple(_put_page(one, ids[i], i, next(found), k, v) if isinstance(one, Pages) else one for one in layers)

    layers = jax.lax.fori_loop(0, count, put, layers)
    pool = next(layer for layer in layers if isinstance(layer, Pages))
    return layers, pool.k[0, :, 0, 0]


def _put_page(pool: Pages, page: jax.Array, place: jax.Array, layer: int, k: jax.Array, v: jax.Array) -> Pages:
    _, K, C, H = pool.k.shape

    def one(target: jax.Array, rows: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_slice(rows, (layer, 0, place * C, 0), (1, K, C, H))
        return jax.lax.dynamic_update_slice(target, block, (page, 0, 0, 0))

    return Pages(k=one(pool.k, k), v=one(pool.v, v))


def gather_ring(layers: Layers, ring: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [L_ring, K, w, H] of one ring over some layers."""
    pools = [layer for layer in layers if isinstance(layer, Rings)]
    return jnp.stack([pool.k[ring] for pool in pools]), jnp.stack([pool.v[ring] for pool in pools])


def scatter_ring(layers: Layers, ring: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Layers, jax.Array]:
    """Rows k, v [L_ring, K, w, H] into one ring; also an array for `Copy`."""
    found = iter(range(k.shape[0]))

    def put(layer: LayerState) -> LayerState:
        if not isinstance(layer, Rings):
            return layer
        i = next(found)
        return Rings(k=layer.k.at[ring].set(k[i]), v=layer.v.at[ring].set(v[i]))

    layers = tuple(put(layer) for layer in layers)
    pool = next(layer for layer in layers if isinstance(layer, Rings))
    return layers, pool.k[0, :, 0, 0]
