"""Packed token masks: bit i of word w says whether token 32 w + i is legal. Bits from V on mean nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp

WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    """W = ceil(V / 32)."""
    return -(-vocab_size // WORD_BITS)


def pack(legal: jax.Array) -> jax.Array:
    """bool[..., V] -> u32[..., W]; the bits from V on are 0.

    Five tokens, of which 0, 1 and 4 are legal: [1, 1, 0, 0, 1] -> 0b10011 = 19.
    """
    vocab_size = legal.shape[-1]
    words = num_words(vocab_size)
    padding = [(0, 0)] * (legal.ndim - 1) + [(0, words * WORD_BITS - vocab_size)]
    bits = jnp.pad(legal, padding).reshape(*legal.shape[:-1], words, WORD_BITS).astype(jnp.uint32)
    shifts = jnp.arange(WORD_BITS, dtype=jnp.uint32).reshape((1,) * legal.ndim + (WORD_BITS,))
    return jnp.sum(bits << shifts, axis=-1, dtype=jnp.uint32)


def unpack(mask: jax.Array, vocab_size: int) -> jax.Array:
    """u32[..., W] -> bool[..., V]."""
    shifts = jnp.arange(WORD_BITS, dtype=jnp.uint32).reshape((1,) * mask.ndim + (WORD_BITS,))
    bits = (mask[..., None] >> shifts) & jnp.uint32(1)
    return bits.reshape(*mask.shape[:-1], -1)[..., :vocab_size] != 0
