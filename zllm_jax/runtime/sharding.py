"""Sharding as data: one frozen table maps logical axes to mesh axes, and refuses collisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zllm_jax.config import ModelConfig
from zllm_jax.runtime.specs import Axis

# Tensor parallelism: whole heads, ffn columns and vocabulary rows are split over the mesh axis "model".
RULES: Mapping[str, str | None] = {
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "ffn": "model",
    "embed": None,
    "head_dim": None,
}


def partition(axes: Sequence[Axis], rules: Mapping[str, str | None] = RULES) -> PartitionSpec:
    """Logical axes of one array -> its PartitionSpec. Raises ValueError for an unknown axis and for a collision."""
    placed: list[str | None] = []
    for axis in axes:
        if axis is not None and axis not in rules:
            raise ValueError(f"logical axis {axis!r} has no rule; known: {sorted(rules)}")
        target = rules[axis] if axis is not None else None
        if target is not None and target in placed:
            raise ValueError(f"axes {tuple(axes)} map twice to mesh axis {target!r}")
        placed.append(target)
    return PartitionSpec(*placed)


def check_heads(mesh: Mesh, cfg: ModelConfig) -> None:
    """Raises ValueError when a device would get part of a head: the product's axis may divide where heads do not."""
    for axis, count in (("heads", cfg.num_heads), ("kv_heads", cfg.num_kv_heads)):
        target = RULES[axis]
        if target is not None and count % mesh.shape[target]:
            raise ValueError(f"{count} {axis} cannot be split over {mesh.shape[target]} devices")


def sharding(mesh: Mesh, axes: Sequence[Axis], shape: Sequence[int]) -> NamedSharding:
    """The placement of one array. Raises ValueError when a split dimension is not divisible by its mesh axis."""
    spec = partition(axes)
    for dim, axis, target in zip(shape, axes, spec, strict=True):
        if target is not None and dim % mesh.shape[target]:
            raise ValueError(f"axis {axis!r} of {dim} cannot be split over {mesh.shape[target]} devices")
    return NamedSharding(mesh, spec)
