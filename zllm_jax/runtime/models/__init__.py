"""Architectures, one file each. A model knows its arrays, its state and its mathematics, and no other model.

Each module exports `param_specs(cfg)`, `state_spec(cfg)` and a forward pass in three parts:
`embed(params, batch, cfg)`, `blocks(weights, layers, x, batch, cfg, kinds)` for any consecutive layers, and
`finish(params, x, cfg)`.
"""

from zllm_jax.runtime.models.registry import architecture

__all__ = ["architecture"]
