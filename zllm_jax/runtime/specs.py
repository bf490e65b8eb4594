"""What a model declares, as data: the shape, logical axes and initialiser of each array it owns or keeps.

`ArraySpec` describes parameters; `PagedSpec` and `RingSpec` describe the state of one layer. No other room
needs to know an architecture: allocation, bytes, admission and snapshots are derived from these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Axis = Literal["vocab", "embed", "heads", "kv_heads", "head_dim", "ffn"] | None


@dataclass(frozen=True)
class ArraySpec:
    """One parameter. `axes`: a logical axis a dimension; `init`: "normal" (1/sqrt(fan in)), "ones" or "zeros"."""

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")


ParamSpecs = Mapping[str, ArraySpec]


@dataclass(frozen=True)
class PagedSpec:
    """A layer that keeps keys and values of every token: rows in pages `[P, K, C, H]`, truncatable at any token."""

    num_kv_heads: int
    head_dim: int

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of one token: 2 K H b (seed figures: KV bytes a token, per layer)."""
        return 2 * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class RingSpec:
    """A layer that keeps the last `window` tokens: row of position p at p mod window. Not truncatable."""

    num_kv_heads: int
    head_dim: int
    window: int

    def ring_bytes(self, itemsize: int) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.window * itemsize


LayerSpec = PagedSpec | RingSpec


@dataclass(frozen=True)
class StateSpec:
    """The state of a whole model, a `LayerSpec` a layer."""

    layers: tuple[LayerSpec, ...]

    @property
    def paged(self) -> tuple[PagedSpec, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, PagedSpec))

    @property
    def rings(self) -> tuple[RingSpec, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, RingSpec))

    @property
    def truncatable(self) -> bool:
        """True when the state may be cut at any token: then every common prefix is a legal hit."""
        return not self.rings

    def token_bytes(self, itemsize: int) -> int:
        return sum(layer.row_bytes(itemsize) for layer in self.paged)

    def ring_bytes(self, itemsize: int) -> int:
        return sum(layer.ring_bytes(itemsize) for layer in self.rings)
