"""Tile sizes of the TPU kernel and the rule that picks them where nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass

TILE_TOKENS = 512  # scores of a tile fill whole 128-lane registers, and a copy in flight hides behind a tile's products
TILES_BYTES = 4 << 20  # of VMEM for the tiles in use and in flight: a quarter of the smallest default limit (16 MiB)
BUFFERS = 2  # one tile is used while the next is in flight


@dataclass(frozen=True)
class Config:
    """pages_per_tile: pages that are in VMEM together and go through one pair of products."""

    pages_per_tile: int


def heuristic(*, tokens_per_page: int, num_kv_heads: int, head_dim: int, itemsize: int, max_pages: int) -> Config:
    """The largest tile that TILE_TOKENS, TILES_BYTES and a sequence's page count allow, at least one page."""
    page_bytes = 2 * num_kv_heads * tokens_per_page * head_dim * itemsize  # K and V
    fitting = min(TILE_TOKENS // tokens_per_page, TILES_BYTES // (BUFFERS * page_bytes), max_pages)
    return Config(pages_per_tile=max(1, fitting))
