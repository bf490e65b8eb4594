"""Training: flax declares and initialises the parameters, and the same architecture computes, differentiably.

A module has no state besides its parameters: each call makes empty rings as long as its input and throws them away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zllm_jax.config import Dtype, ModelConfig
from zllm_jax.runtime.batch import Batch
from zllm_jax.runtime.models import architecture
from zllm_jax.runtime.specs import ArraySpec, LayerSpec, RingSpec
from zllm_jax.runtime.state import Rings
from zllm_jax.runtime.steps import forward, logits
from zllm_jax.runtime.weights import init_array, nest


class LanguageModel(nn.Module):
    """Any architecture of this room as a flax module.

    `init(key, tokens)["params"]` is the tree of `init_params`, each leaf boxed with its logical axes
    (`nn.get_partition_spec` and `nn.logical_to_mesh_sharding` with `sharding.RULES` place it); unboxed it is what
    `prefill` and `decode` take. `apply({"params": params}, tokens)` takes either.
    """

    cfg: ModelConfig
    dtype: Dtype = "float32"

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits f32[B, T, V] after each of tokens i32[B, T], which stand at 0 .. T-1."""
        declared = nest(architecture(self.cfg).param_specs(self.cfg))
        params = {name: self.param(name, _initialiser(specs, self.dtype)) for name, specs in declared.items()}
        return _forward(params, tokens, self.cfg)


def loss(params: Mapping[str, Any], tokens: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """Mean negative log-likelihood in nats of each next token of i32[B, T], T at least 2, as f32[]."""
    predicted = jax.nn.log_softmax(_forward(nn.meta.unbox(params), tokens[:, :-1], cfg), axis=-1)
    return -jnp.mean(jnp.take_along_axis(predicted, tokens[:, 1:, None], axis=-1))


def _forward(params: Mapping[str, Any], tokens: jax.Array, cfg: ModelConfig) -> jax.Array:
    B, T = tokens.shape
    rows = jnp.arange(B, dtype=jnp.int32)
    batch = Batch(
        tokens=tokens,
        positions=jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T)),
        valid=jnp.ones((B, T), jnp.bool_),
        table=rows[:, None],
        rings=rows,
    )
    dtype = params["embed"].dtype

    def empty(layer: LayerSpec) -> Rings:
        window = layer.window if isinstance(layer, RingSpec) else T  # a window of T tokens sees them all
        rows = jnp.zeros((B, layer.num_kv_heads, window, layer.head_dim), dtype)
        return Rings(k=rows, v=rows)

    model = architecture(cfg)
    hidden, _ = forward(params, tuple(empty(layer) for layer in model.state_spec(cfg).layers), batch, cfg)
    return logits(params, hidden.reshape(B * T, -1)).reshape(B, T, -1)


def _initialiser(specs: Any, dtype: Dtype) -> Callable[[jax.Array], Any]:
    """A function of a key that makes the arrays of a tree of `ArraySpec`, each in a box with its axes."""
    leaves, tree = jax.tree.flatten(specs)

    def boxed(spec: ArraySpec, key: jax.Array) -> nn.LogicallyPartitioned:
        return nn.LogicallyPartitioned(init_array(spec, key, dtype), spec.axes)

    def init(key: jax.Array) -> Any:
        return jax.tree.unflatten(tree, map(boxed, leaves, jax.random.split(key, len(leaves))))

    return init
