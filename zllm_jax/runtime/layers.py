"""The few products and norms that transformer blocks are made of. Pure functions of arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """f32 weights mean f32 products everywhere: TPUs would otherwise round the operands to bf16."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def product(x: jax.Array, w: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., I] @ w [I, O] (+ bias [O]), accumulated in f32, in x.dtype."""
    out = jax.lax.dot_general(
        x, w, (((x.ndim - 1,), (0,)), ((), ())), precision=_precision(w.dtype), preferred_element_type=jnp.float32
    )
    if bias is not None:
        out = out + _along_last(bias, out.ndim)
    return out.astype(x.dtype)


def logits_of(x: jax.Array, head: jax.Array) -> jax.Array:
    """x [B, D], head [V, D] -> f32[B, V]. The head keeps the embedding's layout: a tied one needs no copy."""
    return jax.lax.dot_general(
        x, head, (((1,), (1,)), ((), ())), precision=_precision(head.dtype), preferred_element_type=jnp.float32
    )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm (arXiv 1910.07467) over the last axis, in f32; `weight` multiplies."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * _along_last(weight, x.ndim)).astype(x.dtype)


def gated_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, *, activation: str) -> jax.Array:
    """(act(x @ gate) * (x @ up)) @ down; activation "silu" or "gelu_tanh"."""
    inner = product(x, gate)
    inner = jax.nn.silu(inner) if activation == "silu" else jax.nn.gelu(inner, approximate=True)
    return product(inner * product(x, up), down)


def _along_last(vector: jax.Array, ndim: int) -> jax.Array:
    return vector.astype(jnp.float32).reshape((1,) * (ndim - 1) + vector.shape)
