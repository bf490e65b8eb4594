"""The oracle: gather every page, mask, softmax. Slow, obvious, runs anywhere."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnames=("scale", "window"))
def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None,
) -> jax.Array:
    """As `api.paged_attention`, in float32 throughout."""
    B, N, H = q.shape
    _, K, C, _ = k_pool.shape
    M = page_table.shape[1]
    first = jnp.zeros_like(lengths) if window is None else lengths - window
    token = jnp.arange(M * C, dtype=jnp.int32)[None, :]
    seen = (first[:, None] <= token) & (token < lengths[:, None])  # bool[B, S]

    owned = jnp.arange(M, dtype=jnp.int32)[None, :] * C < lengths[:, None]
    pages = jnp.where(owned, page_table, 0)  # what lies past the last page may be any number

    def rows(pool: jax.Array) -> jax.Array:  # -> f32[B, K, S, H], zero where not seen: 0 * NaN is NaN
        gathered = pool[pages].astype(jnp.float32)  # f32[B, M, K, C, H]
        gathered = gathered.transpose(0, 2, 1, 3, 4).reshape(B, K, M * C, H)
        return jnp.where(seen[:, None, :, None], gathered, 0.0)

    highest = jax.lax.Precision.HIGHEST
    grouped = q.reshape(B, K, N // K, H).astype(jnp.float32)
    scores = scale * jnp.einsum("BKGH,BKSH->BKGS", grouped, rows(k_pool), precision=highest)
    scores = jnp.where(seen[:, None, None, :], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)  # finite for idle rows too
    weights = jnp.exp(scores - top)
    total = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1.0)  # at least exp(0), unless idle
    out = jnp.einsum("BKGS,BKSH->BKGH", weights / total, rows(v_pool), precision=highest)
    return out.reshape(B, N, H).astype(q.dtype)
