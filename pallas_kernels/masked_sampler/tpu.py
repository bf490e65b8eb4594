"""Grid and specs of the TPU kernel: row tiles by vocabulary tiles, the latter in order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._common.checks import ArrayLike
from pallas_kernels.masked_sampler.config import LANES, Config, heuristic
from pallas_kernels.masked_sampler.tpu_kernel import masked_sampler_kernel

OPERATIONS_PER_TOKEN = 100  # of which the 13 rounds of noise take about 5 each
TRANSCENDENTALS_PER_TOKEN = 4  # two logarithms for the noise, two exponentials for the running total
DTYPES = (jnp.float32, jnp.bfloat16)


def refuses(logits: ArrayLike) -> str | None:
    """Why the kernel can't take these logits, or None."""
    return None if logits.dtype in DTYPES else f"logits are {logits.dtype}, the kernel takes float32 or bfloat16"


@functools.partial(jax.jit, static_argnames=("config",))
def masked_sample(
    logits: jax.Array, mask: jax.Array, temperature: jax.Array, seeds: jax.Array, *, config: Config | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `api.masked_sample`, with a mask. config: tile sizes, None for the heuristic's."""
    B, V = logits.shape
    config = config or heuristic(vocab_size=V, itemsize=logits.dtype.itemsize)
    rows = config.rows_per_tile

    def per_row(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, columns), lambda row, _: (row, 0))

    def per_token(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, columns), lambda row, tile: (row, tile))

    floats, ints = pltpu.VMEM((rows, LANES), jnp.float32), pltpu.VMEM((rows, LANES), jnp.int32)
    ids, logprob = pl.pallas_call(
        functools.partial(masked_sampler_kernel, vocab_size=V),
        out_shape=(jax.ShapeDtypeStruct((B, 1), jnp.int32), jax.ShapeDtypeStruct((B, 1), jnp.float32)),
        grid=(pl.cdiv(B, rows), pl.cdiv(V, config.tokens_per_tile)),
        in_specs=[per_token(config.tokens_per_tile), per_token(config.words_per_tile), per_row(1), per_row(2)],
        out_specs=(per_row(1), per_row(1)),
        scratch_shapes=[floats, ints, floats, floats, floats],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=OPERATIONS_PER_TOKEN * B * V,
            transcendentals=TRANSCENDENTALS_PER_TOKEN * B * V,
            bytes_accessed=logits.nbytes + mask.nbytes,
        ),
        name="masked_sampler",
    )(logits, mask, temperature[:, None], seeds)
    return ids[:, 0], logprob[:, 0], ids[:, 0] >= 0
