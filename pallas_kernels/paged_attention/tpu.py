"""Grid and specs of the TPU kernel: one grid step a sequence, pages fetched from HBM by the kernel itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._common.checks import ArrayLike
from pallas_kernels.paged_attention.config import BUFFERS, Config, heuristic
from pallas_kernels.paged_attention.tpu_kernel import paged_attention_kernel

REGISTER_BYTES = 32  # of one lane: a (sublane, 128) register tile is 8 rows of 32 bits or 16 rows of 16 bits
DTYPES = (jnp.float32, jnp.bfloat16)


def refuses(q: ArrayLike, k_pool: ArrayLike) -> str | None:
    """Why the kernel can't take these shapes, or None."""
    if q.dtype not in DTYPES:
        return f"q is {q.dtype}, the kernel takes float32 or bfloat16"
    tokens_per_page, rows = k_pool.shape[2], REGISTER_BYTES // q.dtype.itemsize
    if tokens_per_page % rows:
        return f"pages hold C={tokens_per_page} tokens, {q.dtype} pages must hold a multiple of {rows}"
    return None


@functools.partial(jax.jit, static_argnames=("scale", "window", "config"))
def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None,
    config: Config | None = None,
) -> jax.Array:
    """As `api.paged_attention`. config: tile sizes, None for the heuristic's."""
    B, N, H = q.shape
    _, K, C, _ = k_pool.shape
    config = config or heuristic(
        tokens_per_page=C, num_kv_heads=K, head_dim=H, itemsize=q.dtype.itemsize, max_pages=page_table.shape[1]
    )
    heads = pl.BlockSpec((None, K, N // K, H), lambda row, *_: (row, 0, 0, 0))
    tiles = pltpu.VMEM((BUFFERS, K, config.pages_per_tile * C, H), q.dtype)
    most_seen = min(page_table.shape[1] * C, window or page_table.shape[1] * C)  # lengths are data
    out = pl.pallas_call(
        functools.partial(paged_attention_kernel, scale=scale, window=window),
        out_shape=jax.ShapeDtypeStruct((B, K, N // K, H), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B,),
            in_specs=[heads, pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=heads,
            scratch_shapes=[tiles, tiles, pltpu.SemaphoreType.DMA((BUFFERS, 2))],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=4 * B * N * most_seen * H,
            transcendentals=B * N * most_seen,
            bytes_accessed=2 * B * (K * most_seen + N) * H * q.dtype.itemsize,
        ),
        name="paged_attention",
    )(page_table, lengths, q.reshape(B, K, N // K, H), k_pool, v_pool)
    return out.reshape(B, N, H)
