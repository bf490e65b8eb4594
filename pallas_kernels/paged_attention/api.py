"""The contract of paged attention: arguments, checks, choice of implementation."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels._common.checks import check
from pallas_kernels._common.dispatch import dispatch
from pallas_kernels.paged_attention import reference, tpu


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Attention of the newest token of each sequence over that sequence's pages, by grouped-query heads.

    q:             float[B, N, H], the newest token's queries; query head n reads kv head n // G, G = N / K.
    k_pool/v_pool: q.dtype[P, K, C, H], C tokens a page. Rows that no sequence owns may hold anything, NaN too.
    page_table:    i32[B, M]; token s of sequence b lies in page page_table[b, s // C], row s % C. Entries past
                   the sequence's last page are never read and may hold any number.
    lengths:       i32[B], tokens to attend to, the newest included (it is token lengths[b] - 1), at most M C.
                   0: an idle row, whose output is zeros.
    scale:         factor of the scores before the softmax, usually H ** -0.5. Static.
    window:        only the last `window` tokens are seen, the newest included; None: all. Static.
    implementation: auto, reference or tpu.

    Returns q.dtype[B, N, H]; scores and softmax are float32. Raises ValueError for arguments that break these rules;
    the values of page_table and lengths are data and are not checked.
    """
    sizes: dict[str, int] = {}
    check("q", q, jnp.floating, "BNH", sizes)
    check("k_pool", k_pool, jnp.floating, "PKCH", sizes)
    check("v_pool", v_pool, jnp.floating, "PKCH", sizes)
    check("page_table", page_table, jnp.int32, "BM", sizes)
    check("lengths", lengths, jnp.int32, "B", sizes)
    if not q.dtype == k_pool.dtype == v_pool.dtype:
        raise ValueError(f"q, k_pool and v_pool must share a dtype, got {q.dtype}, {k_pool.dtype} and {v_pool.dtype}")
    if sizes["N"] % sizes["K"]:
        raise ValueError(f"q has N={sizes['N']} heads, must be a multiple of the K={sizes['K']} heads of k_pool")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}, must be positive and finite, usually H ** -0.5")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, must be at least 1 (the newest token itself), or None for no window")
    return dispatch(
        implementation,
        q,
        k_pool,
        v_pool,
        page_table,
        lengths,
        reference=functools.partial(reference.paged_attention, scale=float(scale), window=window),
        tpu=functools.partial(tpu.paged_attention, scale=float(scale), window=window),
        tpu_refuses=tpu.refuses(q, k_pool),
    )
