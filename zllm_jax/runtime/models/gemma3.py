"""Gemma 3 (text): sliding-window layers keep rings, global ones pages; four norms a layer, GeGLU, two RoPE bases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from zllm_jax.config import ModelConfig
from zllm_jax.runtime.attend import attend
from zllm_jax.runtime.batch import Batch
from zllm_jax.runtime.layers import gated_mlp, product, rms_norm
from zllm_jax.runtime.rope import rotate, rotation
from zllm_jax.runtime.specs import ArraySpec, LayerSpec, PagedSpec, ParamSpecs, RingSpec, StateSpec, decoder_specs
from zllm_jax.runtime.state import LayerState

Weights = Mapping[str, jax.Array]


def param_specs(cfg: ModelConfig) -> ParamSpecs:
    """Name -> shape, logical axes and initialiser of every parameter."""
    D, H = cfg.embed_dim, cfg.head_dim
    more = {
        "q_norm": ArraySpec((H,), ("head_dim",), "ones"),
        "k_norm": ArraySpec((H,), ("head_dim",), "ones"),
        "post_attn_norm": ArraySpec((D,), ("embed",), "ones"),
        "post_ffn_norm": ArraySpec((D,), ("embed",), "ones"),
    }
    return decoder_specs(cfg, more)


def state_spec(cfg: ModelConfig) -> StateSpec:
    def layer(i: int) -> LayerSpec:
        if cfg.is_local(i):
            return RingSpec(cfg.num_kv_heads, cfg.head_dim, cfg.window)
        return PagedSpec(cfg.num_kv_heads, cfg.head_dim)

    return StateSpec(tuple(layer(i) for i in range(cfg.num_layers)))


def embed(params: Mapping[str, Any], batch: Batch, cfg: ModelConfig) -> jax.Array:
    """Hidden states [B, T, D] before the first layer."""
    x = params["embed"][batch.tokens]
    return x * jnp.asarray(cfg.embed_dim**0.5, x.dtype)


def blocks(
    weights: tuple[Weights, ...],
    layers: tuple[LayerState, ...],
    x: jax.Array,
    batch: Batch,
    cfg: ModelConfig,
    kinds: tuple[LayerSpec, ...],
) -> tuple[jax.Array, tuple[LayerState, ...]]:
    """Hidden states [B, T, D] after some consecutive layers, and their states with the batch's rows written.

    kinds: what each layer keeps as the model declares it, which says whether it is a local one.
    """
    wide = rotation(cfg.rope, cfg.head_dim, batch.positions)
    near = rotation(cfg.local_rope or cfg.rope, cfg.head_dim, batch.positions)
    written = []
    for one, kept, kind in zip(weights, layers, kinds, strict=True):
        x, kept = _block(one, kept, x, batch, *(near if isinstance(kind, RingSpec) else wide), cfg=cfg)
        written.append(kept)
    return x, tuple(written)


def finish(params: Mapping[str, Any], x: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Hidden states [B, T, D] after the last layer, ready for the head."""
    return rms_norm(x, params["final_norm"], cfg.rms_eps)


@partial(jax.jit, static_argnames="cfg")  # traced and lowered once a kind of layer, inlined by the compiler
def _block(
    p: Weights,
    kept: LayerState,
    x: jax.Array,
    batch: Batch,
    cos: jax.Array,
    sin: jax.Array,
    *,
    cfg: ModelConfig,
) -> tuple[jax.Array, LayerState]:
    B, T, _ = x.shape
    h = rms_norm(x, p["attn_norm"], cfg.rms_eps)
    q = product(h, p["wq"]).reshape(B, T, cfg.num_heads, cfg.head_dim)
    k = product(h, p["wk"]).reshape(B, T, cfg.num_kv_heads, cfg.head_dim)
    v = product(h, p["wv"]).reshape(B, T, cfg.num_kv_heads, cfg.head_dim)
    q = rotate(rms_norm(q, p["q_norm"], cfg.rms_eps), cos, sin)
    k = rotate(rms_norm(k, p["k_norm"], cfg.rms_eps), cos, sin)
    scale = cfg.query_scale if cfg.query_scale is not None else cfg.head_dim**-0.5
    out, kept = attend(q, k, v, kept, batch, scale=scale)
    out = product(out.reshape(B, T, -1), p["wo"])
    x = x + rms_norm(out, p["post_attn_norm"], cfg.rms_eps)
    h = rms_norm(x, p["ffn_norm"], cfg.rms_eps)
    out = gated_mlp(h, p["w_gate"], p["w_up"], p["w_down"], activation="gelu_tanh")
    return x + rms_norm(out, p["post_ffn_norm"], cfg.rms_eps), kept
