"""The Llama family: Llama 2/3, SmolLM2, Qwen2 (biases on q, k, v), Qwen3 (norms on q and k). All layers are paged."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from zllm_jax.config import ModelConfig
from zllm_jax.runtime.attend import attend
from zllm_jax.runtime.batch import Batch
from zllm_jax.runtime.layers import gated_mlp, product, rms_norm
from zllm_jax.runtime.rope import rotate, rotation
from zllm_jax.runtime.specs import ArraySpec, LayerSpec, PagedSpec, ParamSpecs, StateSpec, decoder_specs
from zllm_jax.runtime.state import LayerState

Weights = Mapping[str, jax.Array]


def param_specs(cfg: ModelConfig) -> ParamSpecs:
    """Name -> shape, logical axes and initialiser of every parameter."""
    D, H = cfg.embed_dim, cfg.head_dim
    q_dim, kv_dim = cfg.num_heads * H, cfg.num_kv_heads * H
    more = {}
    if cfg.attention_bias:
        more["bq"] = ArraySpec((q_dim,), ("heads",), "zeros")
        more["bk"] = ArraySpec((kv_dim,), ("kv_heads",), "zeros")
        more["bv"] = ArraySpec((kv_dim,), ("kv_heads",), "zeros")
    if cfg.output_bias:
        more["bo"] = ArraySpec((D,), ("embed",), "zeros")
    if cfg.qk_norm:
        more["q_norm"] = ArraySpec((H,), ("head_dim",), "ones")
        more["k_norm"] = ArraySpec((H,), ("head_dim",), "ones")
    return decoder_specs(cfg, more)


def state_spec(cfg: ModelConfig) -> StateSpec:
    return StateSpec((PagedSpec(cfg.num_kv_heads, cfg.head_dim),) * cfg.num_layers)


def embed(params: Mapping[str, Any], batch: Batch, cfg: ModelConfig) -> jax.Array:
    """Hidden states [B, T, D] before the first layer."""
    return params["embed"][batch.tokens]


def blocks(
    weights: tuple[Weights, ...],
    layers: tuple[LayerState, ...],
    x: jax.Array,
    batch: Batch,
    cfg: ModelConfig,
    kinds: tuple[LayerSpec, ...],
) -> tuple[jax.Array, tuple[LayerState, ...]]:
    """Hidden states [B, T, D] after some consecutive layers, and their states with the batch's rows written."""
    cos, sin = rotation(cfg.rope, cfg.head_dim, batch.positions)
    written = []
    for one, kept, _ in zip(weights, layers, kinds, strict=True):
        x, kept = _block(one, kept, x, batch, cos, sin, cfg=cfg)
        written.append(kept)
    return x, tuple(written)


def finish(params: Mapping[str, Any], x: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Hidden states [B, T, D] after the last layer, ready for the head."""
    return rms_norm(x, params["final_norm"], cfg.rms_eps)


@partial(jax.jit, static_argnames="cfg")  # traced and lowered once for all layers, inlined by the compiler
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
    q = product(h, p["wq"], p.get("bq")).reshape(B, T, cfg.num_heads, cfg.head_dim)
    k = product(h, p["wk"], p.get("bk")).reshape(B, T, cfg.num_kv_heads, cfg.head_dim)
    v = product(h, p["wv"], p.get("bv")).reshape(B, T, cfg.num_kv_heads, cfg.head_dim)
    if cfg.qk_norm:
        q, k = rms_norm(q, p["q_norm"], cfg.rms_eps), rms_norm(k, p["k_norm"], cfg.rms_eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    scale = cfg.query_scale if cfg.query_scale is not None else cfg.head_dim**-0.5
    out, kept = attend(q, k, v, kept, batch, scale=scale)
    x = x + product(out.reshape(B, T, -1), p["wo"], p.get("bo"))
    h = rms_norm(x, p["ffn_norm"], cfg.rms_eps)
    return x + gated_mlp(h, p["w_gate"], p["w_up"], p["w_down"], activation="silu"), kept
