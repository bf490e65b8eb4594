"""Parameters: from a checkpoint or an initialiser to a pytree of device arrays.

The pytree is nested: `{"embed", "final_norm", "head"?, "layers": ({...}, ...)}`; checkpoints name its leaves
`layers.3.wq`. What a model declares is compared with what the file has before any memory is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zllm_jax.config import Dtype, ModelConfig
from zllm_jax.errors import BadCheckpoint
from zllm_jax.memory import trim
from zllm_jax.runtime.models import architecture
from zllm_jax.runtime.sharding import check_mesh, sharding
from zllm_jax.runtime.specs import ArraySpec

Progress = Callable[[str, int, int], None]


class Source(Protocol):
    """What a checkpoint must offer: shapes from its headers, and one canonical tensor at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def read(self, name: str, dtype: Dtype) -> np.ndarray: ...


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"layers.0.wq": x, "embed": y} -> {"layers": ({"wq": x},), "embed": y}."""
    layers: dict[int, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for name, value in flat.items():
        if name.startswith("layers."):
            _, index, leaf = name.split(".")
            layers.setdefault(int(index), {})[leaf] = value
        else:
            top[name] = value
    return {**top, "layers": tuple(layers[i] for i in sorted(layers))}


def check_shapes(source: Source, cfg: ModelConfig) -> Mapping[str, ArraySpec]:
    """What the model declares, if the source has exactly that. Raises `BadCheckpoint` naming the tensor."""
    specs = architecture(cfg).param_specs(cfg)
    for name, spec in specs.items():
        if name not in source.shapes:
            raise BadCheckpoint(f"tensor {name} is missing; expected shape {spec.shape}", tensor=name)
        if tuple(source.shapes[name]) != spec.shape:
            raise BadCheckpoint(
                f"tensor {name} has shape {tuple(source.shapes[name])}, expected {spec.shape}", tensor=name
            )
    for name in source.shapes:
        if name not in specs:
            raise BadCheckpoint(f"tensor {name} is not part of architecture {cfg.arch!r}", tensor=name)
    return specs


def load_params(
    source: Source, cfg: ModelConfig, dtype: Dtype, *, mesh: Mesh | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Read every parameter to the device, one tensor in host memory at a time and a worker.

    With a mesh each array is placed by its logical axes; a source that can restore shards directly does so.
    """
    specs = check_shapes(source, cfg)
    if mesh is not None:
        check_mesh(mesh, cfg, specs)
    if hasattr(source, "restore_sharded") and mesh is not None:
        targets = {
            name: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(dtype), sharding=sharding(mesh, spec.axes, spec.shape))
            for name, spec in specs.items()
        }
        return nest(source.restore_sharded(targets))

    def load(item: tuple[str, ArraySpec]) -> tuple[str, jax.Array]:
        name, spec = item
        host = source.read(name, dtype)
        return name, jax.device_put(host, None if mesh is None else sharding(mesh, spec.axes, spec.shape))

    flat: dict[str, jax.Array] = {}
    with ThreadPoolExecutor(2) as pool:
        for name, value in pool.map(load, specs.items()):
            flat[name] = value
            if progress is not None:
                progress("load weights", len(flat), len(specs))
    trim()
    return nest(flat)


def init_params(cfg: ModelConfig, key: jax.Array, dtype: Dtype = "float32") -> dict[str, Any]:
    """Random parameters by each array's declared initialiser."""
    return nest({name: init_array(spec, jax.random.fold_in(key, i), dtype) for i, (name, spec) in _numbered(cfg)})


def _numbered(cfg: ModelConfig) -> list[tuple[int, tuple[str, ArraySpec]]]:
    return list(enumerate(architecture(cfg).param_specs(cfg).items()))


def init_array(spec: ArraySpec, key: jax.Array, dtype: Dtype) -> jax.Array:
    """ "normal" has standard deviation 1/sqrt(fan in): the first axis of a product, the last of a table of vectors."""
    if spec.init == "ones":
        return jnp.ones(spec.shape, dtype)
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, dtype)
    fan_in = spec.shape[-1] if spec.axes[0] == "vocab" else spec.shape[0]
    return jax.random.normal(key, spec.shape, jnp.dtype(dtype)) * fan_in**-0.5


def params_bytes(params: Mapping[str, Any]) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))
