"""What the cache hands to a running sequence, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from zllm_jax.cache.rates import Prediction
from zllm_jax.cache.residents import Resident
from zllm_jax.cache.restore import Restoring
from zllm_jax.cache.snapshot import Base
from zllm_jax.values import NearMiss, Tier


@dataclass
class Lease:
    """The state of one running sequence: its pages, its ring, and what it does not have to compute.

    pages: enough for prompt and max_tokens. cached_tokens: rows that are there already, or on their way while
    `restoring` is not None. reason: why so many, as the metrics name it. source: the conversation whose pages it
    shares. base: the snapshot whose first rows it holds.
    """

    pages: list[int]
    ring: int
    tenant: str = ""
    cached_tokens: int = 0
    tier: Tier = Tier.COLD
    reason: str = "hit"
    source: Resident | None = None
    base: Base | None = None
    restoring: Restoring | None = None
    predicted: Prediction | None = None
    near_miss: NearMiss | None = None
    bytes_read: int = 0
    bytes_copied: int = 0
    prompt_tokens: int = 0
    counted: bool = False


@dataclass
class Counters:
    """Every request is counted, whatever it hit."""

    hits: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    cached_tokens: int = 0
    prompt_tokens: int = 0
    evictions: int = 0
    dropped: int = 0
    failed_restores: int = 0
    failed_saves: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
