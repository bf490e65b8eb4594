"""Tile sizes of the TPU kernel and the rule that picks them where nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels._common.bits import WORD_BITS, num_words

LANES = 128
MAX_TILE_WORDS = 4 * LANES  # 16,384 tokens: half a MiB of logits a tile, two tiles in flight


@dataclass(frozen=True)
class Config:
    """rows_per_tile: rows of a tile. words_per_tile: mask words of a tile, a multiple of 128; 32 tokens each."""

    rows_per_tile: int
    words_per_tile: int

    @property
    def tokens_per_tile(self) -> int:
        return self.words_per_tile * WORD_BITS


def heuristic(*, vocab_size: int, itemsize: int) -> Config:
    """Rows that fill one register tile of the logits' dtype, and no more words than the vocabulary has."""
    words = -(-num_words(vocab_size) // LANES) * LANES
    return Config(rows_per_tile=32 // itemsize, words_per_tile=min(words, MAX_TILE_WORDS))
