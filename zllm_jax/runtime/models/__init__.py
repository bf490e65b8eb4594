"""Architectures, one file each. A model knows its arrays, its state and its mathematics, and no other model.

Each module exports `param_specs(cfg)`, `state_spec(cfg)` and `forward(params, layers, batch, cfg)`.
"""

from zllm_jax.runtime.models.registry import architecture

__all__ = ["architecture"]
