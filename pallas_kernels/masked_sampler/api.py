"""The contract of the masked sampler: arguments, checks, choice of implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels._common.bits import num_words
from pallas_kernels._common.checks import check
from pallas_kernels._common.dispatch import dispatch
from pallas_kernels.masked_sampler import reference, tpu


def masked_sample(
    logits: jax.Array,
    mask: jax.Array | None,
    temperature: jax.Array,
    seeds: jax.Array,
    *,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw a token of each row from softmax(logits / temperature) over its legal tokens, by the Gumbel-max rule.

    logits:      float[B, V]. Those of illegal tokens may be anything, NaN too.
    mask:        u32[B, W], W = ceil(V / 32): bit i of word w says whether token 32 w + i is legal; bits from V on are
                 ignored. None: every token is legal.
    temperature: f32[B]. 0 or less takes the most likely legal token, of equals the lowest id.
    seeds:       u32[B, 2], one Threefry key a row and draw, e.g. `jax.random.key_data` of a key folded with the
                 position. A row's token depends on its own key, logits and mask only, not on its place in the batch.
    implementation: auto, reference or tpu. All draw the same noise.

    Returns ids i32[B]; logprob f32[B], of the drawn token under the masked distribution at the row's temperature
    (greedy rows: at temperature 1); ok bool[B]. A row without a distribution (nothing legal, every legal logit -inf,
    or a legal one NaN or +inf) has ok False, id -1 and logprob -inf. Raises ValueError for wrong shapes or dtypes.
    """
    sizes: dict[str, int] = {}
    check("logits", logits, jnp.floating, "BV", sizes)
    check("temperature", temperature, jnp.float32, "B", sizes)
    check("seeds", seeds, jnp.uint32, "B2", sizes)
    words = num_words(sizes["V"])
    if mask is None:
        mask = jnp.full((sizes["B"], words), 2**32 - 1, jnp.uint32)
    check("mask", mask, jnp.uint32, "BW", sizes | {"W": words})
    return dispatch(
        implementation,
        logits,
        mask,
        temperature,
        seeds,
        reference=reference.masked_sample,
        tpu=tpu.masked_sample,
        tpu_refuses=tpu.refuses(logits),
    )
