"""Frozen configurations: what a model is, what an engine may use. Hashable, so that jit can take them as static."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from zllm_jax.errors import ConfigError


def zllm_home() -> Path:
    """The folder of models, snapshots and compilations: `ZLLM_HOME`, else `zllm` in the user's cache folder."""
    if home := os.environ.get("ZLLM_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zllm"


RopeKind = Literal["default", "linear", "ntk", "yarn", "llama3"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base `theta` and, for longer contexts, how its frequencies are scaled.

    linear: positions divided by `factor`. ntk: base raised so that the lowest frequency is divided by `factor`.
    yarn: per-frequency blend (arXiv 2309.00071). llama3: Llama 3.1's blend.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """An architecture's numbers. Letters as in docs/glossary.md: D embed, N query heads, K kv heads, H head dim, ..."""

    arch: Literal["llama", "gemma3"]
    num_layers: int  # L
    embed_dim: int  # D
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    ffn_dim: int  # F
    vocab_size: int  # V
    max_context_tokens: int
    rms_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tied_embeddings: bool = True
    qk_norm: bool = False
    attention_bias: bool = False  # biases on q, k, v
    output_bias: bool = False  # bias on the attention's output product
    window: int = 0  # sliding window of the local layers, in tokens; 0: none
    local_layers: tuple[bool, ...] = ()  # per layer: True for a sliding-window layer
    local_rope: RopeConfig | None = None
    query_scale: float | None = None  # None: 1/sqrt(H)
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")

    def is_local(self, layer: int) -> bool:
        return bool(self.local_layers) and self.local_layers[layer]


Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class ContextExtension:
    """Stretch a model's context by `factor`; quality drops beyond what the model was trained on."""

    kind: Literal["linear", "ntk", "yarn"] = "yarn"
    factor: float = 2.0

    def __post_init__(self) -> None:
        if not self.factor >= 1.0:
            raise ConfigError(f"ContextExtension.factor is {self.factor}, must be at least 1")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What one engine may use.

    max_batch: decode slots. max_seq_tokens: the most tokens one sequence may hold (None: the model's context).
    page_tokens: tokens a page (C). device_cache_bytes: budget of pages and rings in device memory (None: what one
        sequence needs).
    prefill_buckets, decode_buckets: compiled lengths and row counts. decode_steps: steps a device call.
    tensor_parallel: devices that share every layer by heads, ffn columns and vocabulary.
    dtype: of weights and activations; state_dtype: of keys and values (None: same).
    store: folder of the snapshots (None: below ZLLM_HOME); disk_cache: False keeps no second tier.
    disk_cache_bytes: quota of the snapshots of one namespace (model, tokenizer, layout); those worth least make room.
    cache_policy: who leaves device memory first: "cost" (seconds saved per byte, with age) or "lru".
    prefix_rounds: where a state cannot be cut (sliding windows), how many earlier turns of a conversation stay
        reusable.
    checkpoint_tokens: likewise, each how many tokens of a prompt its state is kept, in whole pages (0: never).
    staged_restore: compute a group of layers as soon as its own rows are there (False: once all are, to compare).
    save_on_close: write the resident conversations to disk when the engine is closed.
    fence_states: states of all grammars that running requests may follow together (0: no fences).
    loop_guard: whether outputs are kept from looping where the request says nothing about it.
    forced_runs: append at once what a fence leaves no choice about (False: token by token, to compare).
    max_queue: waiting requests before `Overloaded`. salt: the tenant's part of the identity.
    """

    max_batch: int = 8
    max_seq_tokens: int | None = None
    page_tokens: int = 128
    device_cache_bytes: int | None = 1 << 30
    prefill_buckets: tuple[int, ...] = (32, 256)
    decode_buckets: tuple[int, ...] = (1, 8)
    decode_steps: int = 4
    tensor_parallel: int = 1
    dtype: Dtype = "float32"
    state_dtype: Dtype | None = None
    store: Path | None = None
    disk_cache: bool = True
    disk_cache_bytes: int = 16 << 30
    cache_policy: Literal["cost", "lru"] = "cost"
    prefix_rounds: int = 1
    checkpoint_tokens: int = 1024
    staged_restore: bool = True
    save_on_close: bool = True
    fence_states: int = 2048
    loop_guard: bool = False
    forced_runs: bool = True
    max_queue: int = 256
    salt: str = ""
    context_extension: ContextExtension | None = None
    compilation_cache: bool = True

    def __post_init__(self) -> None:
        def positive(name: str) -> None:
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConfigError(f"EngineConfig.{name} is {getattr(self, name)}, must be positive")

        for name in ("max_batch", "max_seq_tokens", "page_tokens", "device_cache_bytes", "decode_steps"):
            positive(name)
        for name in ("tensor_parallel", "max_queue", "disk_cache_bytes"):
            positive(name)
        for name in ("prefix_rounds", "checkpoint_tokens", "fence_states"):
            if getattr(self, name) < 0:
                raise ConfigError(f"EngineConfig.{name} is {getattr(self, name)}, must be at least 0")
        if self.cache_policy not in ("cost", "lru"):
            raise ConfigError(f"EngineConfig.cache_policy is {self.cache_policy!r}, must be cost or lru")
        for name in ("dtype", "state_dtype"):
            value = getattr(self, name)
            if value not in get_args(Dtype) and not (value is None and name == "state_dtype"):
                raise ConfigError(f"EngineConfig.{name} is {value!r}, must be one of {', '.join(get_args(Dtype))}")
        for name in ("prefill_buckets", "decode_buckets"):
            buckets = getattr(self, name)
            if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
                raise ConfigError(f"EngineConfig.{name} is {buckets}, must be positive and increasing")
        if self.decode_buckets[-1] < self.max_batch:
            object.__setattr__(self, "decode_buckets", (*self.decode_buckets, self.max_batch))
