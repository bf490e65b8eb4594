"""Rotary position embedding (arXiv 2104.09864) in the half-rotation convention, with scaled variants."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from zllm_jax.config import ContextExtension, ModelConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """(f32[H/2] radians a token, factor on cos and sin) of a rope configuration.

    linear: f/s. ntk: theta * s^(H/(H-2)). llama3: Llama 3.1's blend by wavelength. yarn: arXiv 2309.00071,
    eq. 23 (blend between f and f/s by number of turns) with the attention factor 0.1 ln s + 1.
    """
    theta = rope.theta
    if rope.kind == "ntk":
        theta *= rope.factor ** (head_dim / (head_dim - 2))
    freq = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    if rope.kind == "linear":
        freq = freq / rope.factor
    elif rope.kind == "llama3":
        freq = _llama3(freq, rope)
    elif rope.kind == "yarn":
        freq = _yarn(freq, rope, head_dim)
    scale = 0.1 * math.log(rope.factor) + 1.0 if rope.kind == "yarn" and rope.factor > 1 else 1.0
    return freq.astype(np.float32), scale


def _llama3(freq: np.ndarray, rope: RopeConfig) -> np.ndarray:
    turns = rope.original_max_tokens * freq / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * freq / rope.factor + smooth * freq


def _yarn(freq: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    def dim_of(turns: float) -> float:
        span = rope.original_max_tokens / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low = max(math.floor(dim_of(rope.beta_fast)), 0)
    high = min(math.ceil(dim_of(rope.beta_slow)), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0.0, 1.0)
    return freq / rope.factor * ramp + freq * (1 - ramp)


def extend_context(cfg: ModelConfig, extension: ContextExtension | None) -> ModelConfig:
    """The same model with its context stretched; local (sliding-window) layers keep their positions."""
    if extension is None or extension.factor == 1.0:
        return cfg
    if cfg.rope.kind != "default":
        raise ValueError(f"the model's rope is already scaled ({cfg.rope.kind}); it cannot be extended again")
    rope = replace(cfg.rope, kind=extension.kind, factor=extension.factor, original_max_tokens=cfg.max_context_tokens)
    return replace(cfg, rope=rope, max_context_tokens=int(cfg.max_context_tokens * extension.factor))


def rotation(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of `positions` i32[B, T] -> two f32[B, T, 1, H/2]."""
    freq, scale = inverse_frequencies(rope, head_dim)
    angle = positions[..., None, None].astype(jnp.float32) * freq[None, None, None]
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [B, T, N, H] turned by the angles of `rotation`, computed in f32, returned in x.dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
