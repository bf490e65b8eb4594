"""The TPU kernel: double-buffered page copies and an online softmax (Milakov and Gimelshein, 2018)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def paged_attention_kernel(
    page_table_ref: Any,  # SMEM i32[B, M]
    lengths_ref: Any,  # SMEM i32[B]
    q_ref: Any,  # VMEM [K, G, H]
    k_pool_ref: Any,  # HBM [P, K, C, H]
    v_pool_ref: Any,  # HBM [P, K, C, H]
    out_ref: Any,  # VMEM [K, G, H]
    k_tiles_ref: Any,  # VMEM [2, K, S, H], S tokens a tile
    v_tiles_ref: Any,  # VMEM [2, K, S, H]
    semaphores_ref: Any,  # DMA[2, 2]: tile slot, K or V
    *,
    scale: float,
    window: int | None,
) -> None:
    """One sequence: fold its tiles of pages, each fetched while the one before is computed."""
    row = pl.program_id(0)
    K, G, H = q_ref.shape
    C = k_pool_ref.shape[2]
    S = k_tiles_ref.shape[2]
    length = lengths_ref[row]
    first_token = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
    first_page = jax.lax.div(first_token, jnp.int32(C))
    num_pages = pl.cdiv(length, C) - first_page
    num_tiles = pl.cdiv(num_pages, S // C)

    def for_each_copy(tile: jax.Array, act: Any) -> None:
        """Call `act` on the copies of the tile's pages, and of no page beyond the sequence's last."""
        slot = jax.lax.rem(tile, jnp.int32(2))
        begin = tile * (S // C)

        @pl.loop(0, jnp.minimum(num_pages - begin, S // C))
        def _(index: jax.Array) -> None:
            page = page_table_ref[row, first_page + begin + index]
            rows = pl.ds(pl.multiple_of(index * C, C), C)
            for which, (pool, tiles) in enumerate(((k_pool_ref, k_tiles_ref), (v_pool_ref, v_tiles_ref))):
                act(pltpu.make_async_copy(pool.at[page], tiles.at[slot, :, rows], semaphores_ref.at[slot, which]))

    @pl.when(num_tiles > 0)
    def _() -> None:
        for_each_copy(jnp.int32(0), lambda copy: copy.start())

    q = q_ref[...]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def fold(tile: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        @pl.when(tile + 1 < num_tiles)
        def _() -> None:
            for_each_copy(tile + 1, lambda copy: copy.start())

        for_each_copy(tile, lambda copy: copy.wait())

        top, total, acc = carry  # f32[K, G, 1], f32[K, G, 1], f32[K, G, H]
        slot = jax.lax.rem(tile, jnp.int32(2))
        offset = first_page * C + tile * S

        def seen(shape: tuple[int, ...], axis: int) -> jax.Array:
            token = offset + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            return (first_token <= token) & (token < length)

        # Rows not seen are unfetched or another's: NaN for all we know. The scores' are replaced, the values' must be
        # too, since 0 * NaN is NaN.
        scores = scale * jax.lax.dot_general(
            q, k_tiles_ref[slot], (((2,), (2,)), ((0,), (0,))), precision=precision, preferred_element_type=jnp.float32
        )
        scores = jnp.where(seen((K, G, S), 2), scores, -jnp.inf)
        values = v_tiles_ref[slot]
        values = jnp.where(seen((K, S, H), 1), values, jnp.zeros_like(values))

        # Every tile has a page with a token that is seen, so the new top is finite and no -inf - -inf arises.
        new_top = jnp.maximum(top, jnp.max(scores, axis=2, keepdims=True))
        weights = jnp.exp(scores - new_top)
        decay = jnp.exp(top - new_top)
        added = jax.lax.dot_general(
            weights.astype(values.dtype),
            values,
            (((2,), (1,)), ((0,), (0,))),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return new_top, decay * total + jnp.sum(weights, axis=2, keepdims=True), decay * acc + added

    start = (jnp.full((K, G, 1), -jnp.inf), jnp.zeros((K, G, 1)), jnp.zeros((K, G, H)))
    _, total, acc = jax.lax.fori_loop(0, num_tiles, fold, start)
    # The top score adds exp(0) to the total: only an idle sequence has less than 1, and its acc is 0.
    out_ref[...] = (acc / jnp.maximum(total, 1.0)).astype(out_ref.dtype)
