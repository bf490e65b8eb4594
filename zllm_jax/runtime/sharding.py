"""Sharding as data: one frozen table maps logical axes to mesh axes, and refuses collisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zllm_jax.config import ModelConfig
from zllm_jax.runtime.specs import Axis, ParamSpecs

T = TypeVar("T")

MODEL_AXIS = "model"

# Tensor parallelism: whole heads, ffn columns and vocabulary rows are split over the mesh axis "model".
RULES: Mapping[str, str | None] = {
    "vocab": MODEL_AXIS,
    "heads": MODEL_AXIS,
    "kv_heads": MODEL_AXIS,
    "ffn": MODEL_AXIS,
    "embed": None,
    "head_dim": None,
}


def make_mesh(num_devices: int) -> Mesh | None:
    """The first devices in a row, for tensor parallelism; None for one. Raises ValueError when there are fewer."""
    if num_devices == 1:
        return None
    devices = jax.devices()
    if len(devices) < num_devices:
        raise ValueError(f"{num_devices} devices are asked for, but there are {len(devices)} ({devices[0].platform})")
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((num_devices,), (MODEL_AXIS,), axis_types=kinds, devices=devices[:num_devices])


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


def check_mesh(mesh: Mesh, cfg: ModelConfig, specs: ParamSpecs) -> None:
    """Raises ValueError when the model cannot be split over the mesh.

    Heads are checked by themselves: a product's columns may divide where its heads do not.
    """
    if MODEL_AXIS not in mesh.shape:
        raise ValueError(f"the mesh has the axes {tuple(mesh.shape)}, but parameters are split over {MODEL_AXIS!r}")
    count = mesh.shape[MODEL_AXIS]
    for axis, size in (("heads", cfg.num_heads), ("kv_heads", cfg.num_kv_heads)):
        if size % count:
            raise ValueError(f"{size} {axis} cannot be split over {count} devices")
    for spec in specs.values():
        sharding(mesh, spec.axes, spec.shape)


def sharding(mesh: Mesh, axes: Sequence[Axis], shape: Sequence[int]) -> NamedSharding:
    """The placement of one array. Raises ValueError when a split dimension is not divisible by its mesh axis."""
    spec = partition(axes)
    for dim, axis, target in zip(shape, axes, spec, strict=True):
        if target is not None and dim % mesh.shape[target]:
            raise ValueError(f"axis {axis!r} of {dim} cannot be split over {mesh.shape[target]} devices")
    return NamedSharding(mesh, spec)


def whole(mesh: Mesh | None) -> NamedSharding | None:
    """The placement of what each device has all of."""
    return None if mesh is None else sharding(mesh, (), ())


def pin(tree: T, mesh: Mesh | None, axes: Sequence[Axis] = ()) -> T:
    """Inside a program: arrays that stay where their logical axes put them (without axes: whole, on every device)."""
    if mesh is None:
        return tree
    where = NamedSharding(mesh, partition(axes))
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, where), tree)
