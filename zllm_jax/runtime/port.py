"""What the rooms above ask of a device, as a small Protocol and plain values. `Runner` is the real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from zllm_jax.buffers import RowLayout
from zllm_jax.fence import HostMatcher, Place, Position, TokenTables
from zllm_jax.values import Sampling, TokenLogprob


@dataclass(frozen=True)
class Drawn:
    """One token that the device drew; its log-probabilities only where the request asked for them."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True)
class Fenced:
    """Which grammar, where it lies in the device's table, and how far the output has come in it."""

    place: Place
    at: Position


@dataclass(frozen=True)
class Watched:
    """Watched for loops. opens, closes: the tokens that begin and end a region of thinking (-1: none); such a region is
    closed where it only loops. inside: whether the output stands in one.
    """

    opens: int = -1
    closes: int = -1
    inside: bool = False

    def after(self, tokens: Sequence[int]) -> Watched:
        """With `inside` where the output stands after `tokens`."""
        inside = self.inside
        for token in tokens if self.closes >= 0 else ():
            inside = (inside or token == self.opens) and token != self.closes
        return self if inside == self.inside else replace(self, inside=inside)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of one prompt, or of what follows it: `tokens` stand at `start`. last: draw the next token after it.

    fence: what that token must obey, on the device or as a host's matcher; None where it is free. watch: whether the
    loop guard sees it.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    ring: int
    slot: int
    sampling: Sampling
    seed: int
    last: bool
    fence: Fenced | HostMatcher | None = None
    watch: Watched | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A running sequence in a decode call: `token` is fed at `position`; at most `budget` tokens are drawn.

    fence: what they must obey, from where the output stands with `token`. One with a matcher draws one token a call,
    and so do all rows beside it. watch: whether the loop guard sees them. pauses: stop before the budget is used where
    the fence may force a run, so that the caller can append it.
    """

    token: int
    position: int
    pages: Sequence[int]
    ring: int
    slot: int
    sampling: Sampling
    seed: int
    budget: int
    stop_ids: Sequence[int]
    fence: Fenced | HostMatcher | None = None
    watch: Watched | None = None
    pauses: bool = False


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a device offers. A page holds page_tokens tokens; bytes are over all layers.

    num_stages: groups of layers that compute and move by themselves. group_tokens: of one transfer, whole pages.
    """

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
    num_stages: int
    group_tokens: int

    def state_bytes(self, num_tokens: int) -> int:
        """Of a sequence of so many tokens."""
        return -(-num_tokens // self.page_tokens) * self.page_bytes + self.ring_bytes


class Copying(Protocol):
    """A copy from host memory that the device may still be reading."""

    def done(self) -> bool:
        """Whether the memory may change. Never blocks."""

    def wait(self) -> None:
        """Return once it may."""


class Backend(Protocol):
    """A device that computes. Calls come from one thread, and take effect in their order.

    So a copy that is asked for behind a computation is done after it. A call that fails may take the state with it:
    every later one then raises `DeviceLost`.
    """

    @property
    def capacity(self) -> Capacity: ...

    @property
    def row_layout(self) -> RowLayout: ...

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """Prepare a slot for a new prompt: its penalties, its loop guard."""

    def prefill(self, chunk: Chunk) -> Drawn | None:
        """Compute one chunk, all stages in turn; the first token of the output after the last one."""

    def prefill_stage(self, chunk: Chunk, stage: int, carry: Any) -> Any:
        """Compute one stage of a chunk. Other calls may come before its next stage, those of other chunks too.

        carry: None for stage 0, then what the stage before returned. The last stage returns what `prefill` does.
        """

    def decode(self, rows: Sequence[Row], steps: int) -> list[list[Drawn]]:
        """Up to `steps` tokens for each row, fewer where a row stopped."""

    def load_fence(self, tables: TokenTables) -> Place:
        """Bring a grammar onto the device, or find it there. Each call needs a `release_fence`.

        Raises `UnsupportedGrammar` when it does not fit by itself, `Overloaded` while others need the room.
        """

    def release_fence(self, tables: TokenTables) -> None: ...

    def loops_broken(self, slot: int) -> int:
        """How many loops the output of a watched slot was led out of since `begin`."""

    def copy_page(self, source: int, target: int) -> None: ...

    def copy_ring(self, source: int, target: int) -> None: ...

    def read_pages(self, stage: int, pages: Sequence[int]) -> dict[str, Any]:
        """A stage's token rows of at most group_tokens / page_tokens pages, in new arrays on the device.

        They always have group_tokens rows, of which those of `pages` count. Nothing is waited for here: `np.asarray`
        does, on any thread.
        """

    def read_ring(self, stage: int, ring: int) -> dict[str, Any]:
        """A stage's fixed arrays, likewise; {} where it keeps none."""

    def write_pages(self, stage: int, rows: Mapping[str, np.ndarray], pages: Sequence[int]) -> Copying:
        """A stage's token rows into its part of `pages`; later calls see them.

        rows: the stage's token arrays with group_tokens rows each, at 64-byte addresses, of which those of `pages`
        count. They must not change before the copy is done; nothing is waited for here.
        """

    def write_ring(self, stage: int, rows: Mapping[str, np.ndarray], ring: int) -> Copying:
        """A stage's fixed arrays, likewise."""
