"""What a model declares, as data: the shape, logical axes and initialiser of each array it owns or keeps.

`ArraySpec` describes parameters; `PagedSpec` and `RingSpec` describe the state of one layer. No other room
needs to know an architecture: allocation, bytes, admission and snapshots are derived from these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zllm_jax.config import ModelConfig

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


def decoder_specs(cfg: ModelConfig, more: ParamSpecs) -> ParamSpecs:
    """What every decoder here has: embedding, head unless tied, and in each layer attention, a gated MLP, their norms.

    `more` is added to each layer. Products are x @ W; norm weights are plain multipliers.
    """
    D, F, V, H = cfg.embed_dim, cfg.ffn_dim, cfg.vocab_size, cfg.head_dim
    q_dim, kv_dim = cfg.num_heads * H, cfg.num_kv_heads * H
    specs = {"embed": ArraySpec((V, D), ("vocab", "embed")), "final_norm": ArraySpec((D,), ("embed",), "ones")}
    if not cfg.tied_embeddings:
        specs["head"] = ArraySpec((V, D), ("vocab", "embed"))
    layer = {
        "attn_norm": ArraySpec((D,), ("embed",), "ones"),
        "wq": ArraySpec((D, q_dim), ("embed", "heads")),
        "wk": ArraySpec((D, kv_dim), ("embed", "kv_heads")),
        "wv": ArraySpec((D, kv_dim), ("embed", "kv_heads")),
        "wo": ArraySpec((q_dim, D), ("heads", "embed")),
        "ffn_norm": ArraySpec((D,), ("embed",), "ones"),
        "w_gate": ArraySpec((D, F), ("embed", "ffn")),
        "w_up": ArraySpec((D, F), ("embed", "ffn")),
        "w_down": ArraySpec((F, D), ("ffn", "embed")),
        **more,
    }
    for i in range(cfg.num_layers):
        specs.update({f"layers.{i}.{name}": spec for name, spec in layer.items()})
    return specs


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
