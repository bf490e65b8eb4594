"""Packed masks against numpy's own packing, at every vocabulary size 32,001 .. 32,032."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._common.bits import num_words, pack, unpack


@pytest.mark.parametrize("vocab_size", range(32_001, 32_033))
def test_pack_and_unpack_at_every_remainder(vocab_size: int) -> None:
    legal = np.random.default_rng(vocab_size).random((2, vocab_size)) < 0.5
    legal[:, -1] = [True, False]
    words = np.zeros((2, num_words(vocab_size) * 4), np.uint8)
    packed = np.packbits(legal, axis=1, bitorder="little")
    words[:, : packed.shape[1]] = packed
    mask = jax.jit(pack)(jnp.array(legal))
    np.testing.assert_array_equal(mask, words.view("<u4"))
    np.testing.assert_array_equal(jax.jit(unpack, static_argnums=1)(mask, vocab_size), legal)


def test_the_docstrings_five_tokens() -> None:
    assert pack(jnp.array([1, 1, 0, 0, 1], bool)).tolist() == [19]


def test_bits_past_the_vocabulary_are_ignored() -> None:
    np.testing.assert_array_equal(unpack(jnp.array([0xFFFFFFFF], jnp.uint32), 5), np.ones(5, bool))
