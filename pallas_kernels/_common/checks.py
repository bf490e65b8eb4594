"""Argument checks shared by the contracts: each error names the argument, the rule and what came."""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp


class ArrayLike(Protocol):
    """Anything with a shape and a dtype: an array, a tracer, a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def check(name: str, array: ArrayLike, kind: type, dims: str, sizes: dict[str, int]) -> None:
    """Check the dtype against `kind`, and each letter of `dims` against `sizes`; new letters are added to `sizes`.

    Digits in `dims` are literal sizes: "B2" is two columns a row. Raises ValueError.
    """
    if not jnp.issubdtype(array.dtype, kind):
        raise ValueError(f"{name} must be {kind.__name__}, got {array.dtype}")
    if len(array.shape) != len(dims):
        raise ValueError(f"{name} must have the dimensions [{', '.join(dims)}], got shape {array.shape}")
    for dim, size in zip(dims, array.shape, strict=True):
        expected = int(dim) if dim.isdigit() else sizes.setdefault(dim, size)
        if size != expected:
            raise ValueError(f"{name} [{', '.join(dims)}] has shape {array.shape}, but {dim} is {expected}")
