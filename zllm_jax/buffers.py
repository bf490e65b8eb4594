"""The arrays of a sequence's state as logical rows, and the host memory in which they travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64


@dataclass(frozen=True)
class RowSpec:
    """One array of a sequence's state, independent of pages and mesh.

    shape: None at token_axis, the axis of the sequence's tokens; token_axis None: a ring or another fixed array.
    stage: the group of layers that it belongs to, from 0 on. A stage computes once its own arrays are there.
    """

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    token_axis: int | None
    stage: int = 0


RowLayout = Mapping[str, RowSpec]


def tokens_of(array: NDArray[Any], spec: RowSpec, start: int, stop: int) -> NDArray[Any]:
    """A view of the rows [start, stop) of an array with a token axis."""
    assert spec.token_axis is not None
    return array[(slice(None),) * spec.token_axis + (slice(start, stop),)]


def aligned_empty(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """An empty array whose data starts at a multiple of 64 bytes, which is what XLA asks for to skip a copy."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(kind).reshape(shape)


def aligned_copy(array: NDArray[Any]) -> NDArray[Any]:
    """A copy where `aligned_empty` makes room."""
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy
