"""Attention over pages and over rings, in plain XLA: the default on CPU and the reference of the kernels.

Both write the new rows first or read them beside the old ones, so that a step touches each stored row once.
Letters: B sequences, T query tokens, N query heads, K kv heads, G = N/K, H head dim, P pages, C tokens a page,
M pages a sequence, w window.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from zllm_jax.runtime.state import Pages, Rings

_NEVER = -1e30  # finite, so that a fully masked tile gives exp(0) times a weight of zero instead of NaN
_TILE_TOKENS = 512


@jax.named_scope("write_pages")
def write_pages(
    pool: Pages, k: jax.Array, v: jax.Array, table: jax.Array, positions: jax.Array, valid: jax.Array
) -> Pages:
    """Store rows k, v [B, T, K, H] at `positions` i32[B, T] of the sequences of `table` i32[B, M].

    Rows that are not `valid` (bool[B, T]) are dropped.
    """
    num_pages, _, page_tokens, _ = pool.k.shape
    page = jnp.take_along_axis(table, positions // page_tokens, axis=1, mode="clip")
    page = jnp.where(valid, page, num_pages).reshape(-1)
    offset = (positions % page_tokens).reshape(-1)
    flat = (-1, *k.shape[2:])
    return Pages(
        k=pool.k.at[page, :, offset].set(k.reshape(flat).astype(pool.k.dtype), mode="drop"),
        v=pool.v.at[page, :, offset].set(v.reshape(flat).astype(pool.v.dtype), mode="drop"),
    )


@jax.named_scope("attend_pages")
def attend_pages(q: jax.Array, pool: Pages, table: jax.Array, positions: jax.Array, *, scale: float) -> jax.Array:
    """Causal attention of q [B, T, N, H] at `positions` i32[B, T] over the pages of `table` i32[B, M].

    An online softmax (arXiv 1805.02867) over tiles of pages: only tiles up to the furthest query are touched, a
    tile stays in the processor's cache, and no copy of a whole sequence is made. Table entries beyond a sequence
    may hold anything.
    """
    B, T, N, H = q.shape
    P, K, C, _ = pool.k.shape
    G = N // K
    M = table.shape[1]
    g = min(M, max(1, _TILE_TOKENS // (C * B * max(1, T // 64))))
    # Two tiles at least: were there one, its rows would be read outside of the loop, and XLA would copy the pool first.
    M_padded = max(2, -(-M // g)) * g
    table = jnp.pad(jnp.clip(table, 0, P - 1), ((0, 0), (0, M_padded - M)))
    newest = jnp.max(positions, axis=1)  # i32[B]
    num_tiles = jnp.max(newest) // (g * C) + 1
    rows = (q * scale).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H).astype(pool.k.dtype)
    row_positions = jnp.broadcast_to(positions[:, None], (B, G, T)).reshape(B, 1, G * T, 1)

    def gather(pages: jax.Array, ids: jax.Array) -> jax.Array:
        """[B, K, g*C, H]: one long product a head is much faster on a CPU than one a page."""
        return pages[ids].transpose(0, 2, 1, 3, 4).reshape(B, K, g * C, H)

    def tile(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry  # f32[B, K, GT, 1], same, f32[B, K, GT, H]
        ids = jax.lax.dynamic_slice_in_dim(table, i * g, g, axis=1)
        stored = i * (g * C) + jnp.arange(g * C)
        used = (stored[None] <= newest[:, None])[:, None, :, None]  # bool[B, 1, gC, 1]: unowned rows may hold NaN
        scores = jnp.einsum("bkth,bksh->bkts", rows, gather(pool.k, ids), preferred_element_type=jnp.float32)
        scores = jnp.where(stored[None, None, None] <= row_positions, scores, _NEVER)
        new_top = jnp.maximum(top, jnp.max(scores, axis=3, keepdims=True))
        # Every query sees position 0, in the first tile: from there on the top is finite and masked weights are 0.
        weight = jnp.exp(scores - new_top)
        kept = jnp.exp(top - new_top)
        values = jnp.where(used, gather(pool.v, ids), 0)
        part = jnp.einsum("bkts,bksh->bkth", weight.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return new_top, total * kept + jnp.sum(weight, axis=3, keepdims=True), acc * kept + part

    zeros = jnp.zeros((B, K, G * T, 1), jnp.float32)
    start = (jnp.full_like(zeros, _NEVER), zeros, jnp.zeros((B, K, G * T, H), jnp.float32))
    _, total, acc = jax.lax.fori_loop(0, num_tiles, tile, start)
    out = acc / total
    return out.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q.dtype)


@jax.named_scope("attend_ring")
def attend_ring(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rings: Rings,
    ring_ids: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, Rings]:
    """Sliding-window attention of new rows over their ring and each other, then the ring takes the new rows.

    q [B, T, N, H], k and v [B, T, K, H] at consecutive `positions` i32[B, T]; a query at p sees p-w+1 .. p.
    Returns the output and the rings with rows of `ring_ids` i32[B] replaced (dropped where not `valid`).
    """
    B, T, N, H = q.shape
    R, K, w, _ = rings.k.shape
    G = N // K
    first = positions[:, :1]  # i32[B, 1]
    ids = jnp.clip(ring_ids, 0, R - 1)
    # Row j of a ring holds the newest position below `first` that is j modulo w; never written ones come out negative.
    row = jnp.arange(w)[None]
    held = first - 1 - (first - 1 - row) % w  # i32[B, w]
    old_k, old_v = rings.k[ids], rings.v[ids]  # [B, K, w, H]
    new_k, new_v = (x.astype(rings.k.dtype).transpose(0, 2, 1, 3) for x in (k, v))
    keys = jnp.concatenate([old_k, new_k], axis=2)  # [B, K, w+T, H]
    stored = jnp.concatenate([held, jnp.where(valid, positions, -1)], axis=1)
    real = (stored >= 0)[:, None, :, None]
    values = jnp.where(real, jnp.concatenate([old_v, new_v], axis=2), 0)
    rows = (q * scale).astype(keys.dtype).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    scores = jnp.einsum("bkth,bksh->bkts", rows, keys, preferred_element_type=jnp.float32)
    at = positions[:, :, None]
    seen = (stored[:, None] <= at) & (stored[:, None] > at - w) & (stored[:, None] >= 0)  # bool[B, T, w+T]
    seen = jnp.broadcast_to(seen[:, None], (B, G, T, w + T)).reshape(B, 1, G * T, w + T)
    scores = jnp.where(seen, scores, _NEVER)
    weight = jnp.where(seen, jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)), 0.0)
    total = jnp.maximum(jnp.sum(weight, axis=-1, keepdims=True), 1e-30)
    out = jnp.einsum("bkts,bksh->bkth", weight.astype(values.dtype), values, preferred_element_type=jnp.float32)
    out = (out / total).reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q.dtype)
    # Always true, but only known once the old rows were read: without this order XLA copies all rings first.
    read = ~jnp.any(out < jnp.finfo(out.dtype).min, axis=(1, 2, 3))
    return out, _write_rings(rings, k, v, ring_ids, positions, valid & read[:, None])


def _write_rings(
    rings: Rings, k: jax.Array, v: jax.Array, ring_ids: jax.Array, positions: jax.Array, valid: jax.Array
) -> Rings:
    R, _, w, _ = rings.k.shape
    last = jnp.max(jnp.where(valid, positions, -1), axis=1, keepdims=True)
    keep = valid & (positions > last - w)  # a chunk longer than the window writes each row once
    ring = jnp.where(keep, ring_ids[:, None], R).reshape(-1)
    row = (positions % w).reshape(-1)
    flat = (-1, *k.shape[2:])
    return Rings(
        k=rings.k.at[ring, :, row].set(k.reshape(flat).astype(rings.k.dtype), mode="drop"),
        v=rings.v.at[ring, :, row].set(v.reshape(flat).astype(rings.v.dtype), mode="drop"),
    )
