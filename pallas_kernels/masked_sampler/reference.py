"""The oracle: unpack the mask, add noise, take the largest. Slow, obvious, runs anywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels._common.bits import unpack
from pallas_kernels.masked_sampler.noise import gumbel


@jax.jit
def masked_sample(
    logits: jax.Array, mask: jax.Array, temperature: jax.Array, seeds: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `api.masked_sample`, with a mask."""
    B, V = logits.shape
    random = temperature[:, None] > 0
    tempered = logits.astype(jnp.float32) / jnp.where(random, temperature[:, None], 1.0)
    tempered = jnp.where(unpack(mask, V), tempered, -jnp.inf)

    token = jnp.broadcast_to(jnp.arange(V, dtype=jnp.int32)[None, :], (B, V))
    key = (jnp.broadcast_to(seeds[:, :1], (B, V)), jnp.broadcast_to(seeds[:, 1:], (B, V)))
    noise = jnp.where(random, gumbel(key, token), 0.0)
    ids = jnp.argmax(tempered + noise, axis=1).astype(jnp.int32)  # of equals the first

    log_total = jax.nn.logsumexp(tempered, axis=1)
    logprob = jnp.take_along_axis(tempered, ids[:, None], axis=1)[:, 0] - log_total
    ok = jnp.isfinite(log_total)
    return jnp.where(ok, ids, -1), jnp.where(ok, logprob, -jnp.inf), ok
