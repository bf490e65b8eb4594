"""A forward pass in numpy, float64, as plain as can be: what the canonical parameters mean."""

from __future__ import annotations

import numpy as np

from zllm_jax.checkpoint import Checkpoint
from zllm_jax.config import RopeConfig


def logits(checkpoint: Checkpoint, ids: np.ndarray) -> np.ndarray:
    """f64[T, V] for the token ids i[T]."""
    config = checkpoint.config
    weights = {name: checkpoint.read(name).astype(np.float64) for name in checkpoint.shapes}
    gemma = config.arch == "gemma3"
    x = weights["embed"][ids] * (config.embed_dim**0.5 if gemma else 1.0)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_eps) * weight

    for layer in range(config.num_layers):
        w = {name.split(".")[2]: value for name, value in weights.items() if name.startswith(f"layers.{layer}.")}
        h = norm(x, w["attn_norm"])
        q, k, v = (
            (h @ w["w" + name] + w.get("b" + name, 0.0)).reshape(len(ids), -1, config.head_dim) for name in "qkv"
        )
        if config.qk_norm:
            q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
        local = config.is_local(layer)
        rope = config.local_rope if local and config.local_rope else config.rope
        q, k = rotate(q, rope), rotate(k, rope)
        out = attention(q, k, v, config.query_scale or config.head_dim**-0.5, config.window if local else len(ids))
        out = out.reshape(len(ids), -1) @ w["wo"] + w.get("bo", 0.0)
        x = x + (norm(out, w["post_attn_norm"]) if gemma else out)
        h = norm(x, w["ffn_norm"])
        out = (activation(h @ w["w_gate"], gemma) * (h @ w["w_up"])) @ w["w_down"]
        x = x + (norm(out, w["post_ffn_norm"]) if gemma else out)
    return norm(x, weights["final_norm"]) @ weights.get("head", weights["embed"]).T


def activation(x: np.ndarray, gemma: bool) -> np.ndarray:
    if gemma:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int) -> np.ndarray:
    """f64[T, N, H] of q [T, N, H], k and v [T, K, H]; each query sees itself and `window` - 1 before it."""
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("tnh,snh->nts", q, k.repeat(group, axis=1)) * scale
    distance = np.arange(len(q))[:, None] - np.arange(len(k))[None, :]
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nts,snh->tnh", weights, v.repeat(group, axis=1))


def rotate(x: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Rotary embedding by halves of x [T, N, H]; default and llama3."""
    dim = x.shape[-1]
    frequency = rope.theta ** -(np.arange(0, dim, 2) / dim)
    if rope.kind == "llama3":
        turns = rope.original_max_tokens * frequency / (2 * np.pi)
        kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
        frequency = frequency * (kept + (1 - kept) / rope.factor)
    angle = np.arange(len(x))[:, None, None] * frequency
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
    )
