"""What the rooms above ask of a device, as a small Protocol and plain values. `Runner` is the real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from zllm_jax.buffers import RowSource
from zllm_jax.values import Sampling, TokenLogprob

RowLayout = Mapping[str, tuple[np.dtype, tuple[int | None, ...], int | None]]


@dataclass(frozen=True)
class Drawn:
    """One token that the device drew; its log-probabilities only where the request asked for them."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of one prompt: `tokens` stand at `start`. last: draw the first token of the output after it."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    ring: int
    slot: int
    sampling: Sampling
    seed: int
    last: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """A running sequence in a decode call: `token` is fed at `position`; at most `budget` tokens are drawn."""

    token: int
    position: int
    pages: Sequence[int]
    ring: int
    slot: int
    sampling: Sampling
    seed: int
    budget: int
    stop_ids: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a device offers. A page holds page_tokens tokens; bytes are over all layers."""

    num_pages: int
    page_tokens: int
    num_rings: int
    num_slots: int
    max_pages: int
    page_bytes: int
    ring_bytes: int
    truncatable: bool
    chunk_sizes: tuple[int, ...]
    decode_steps: int


class Backend(Protocol):
    """A device that computes. Calls come from one thread; none of them keeps what it is given."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def row_layout(self) -> RowLayout: ...

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Prepare a slot's penalties for a new prompt."""

    def prefill(self, chunk: Chunk) -> Drawn | None:
        """Compute one chunk; the first token of the output after the last one."""

    def decode(self, rows: Sequence[Row], steps: int) -> list[list[Drawn]]:
        """Up to `steps` tokens for each row, fewer where a row stopped."""

    def copy_page(self, source: int, target: int) -> None: ...

    def copy_ring(self, source: int, target: int) -> None: ...

    def read(self, pages: Sequence[int], ring: int, num_tokens: int) -> dict[str, np.ndarray]:
        """A sequence's state as logical rows on the host."""

    def write(self, source: RowSource, pages: Sequence[int], ring: int) -> int:
        """A sequence's logical rows into its pages and its ring; returns the bytes copied."""
