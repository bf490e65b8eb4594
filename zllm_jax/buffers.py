"""The arrays of a sequence's state as logical rows, and the host memory in which they travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class RowSource(Protocol):
    """The state of one sequence as logical rows, wherever they lie, asked for in groups of tokens from the first on."""

    def fill(self, start: int, room: Mapping[str, NDArray[Any]]) -> Callable[[], None]:
        """Begin to put the rows from token `start` on into `room`: each array with a token axis, a group of it long.

        The call that is returned waits until they are there, or raises. Room past the last token keeps what it held.
        """

    def fixed(self) -> Mapping[str, NDArray[Any]]:
        """The arrays without a token axis."""


class HostRows:
    """Rows in host arrays. token_axes: name -> the axis of length S, or None."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], token_axes: Mapping[str, int | None]) -> None:
        self._arrays, self._axes = arrays, token_axes

    def fill(self, start: int, room: Mapping[str, NDArray[Any]]) -> Callable[[], None]:
        for name, part in room.items():
            axis = self._axes[name]
            assert axis is not None
            here = _tokens(self._arrays[name], axis, start, start + part.shape[axis])
            _tokens(part, axis, 0, here.shape[axis])[...] = here
        return lambda: None

    def fixed(self) -> Mapping[str, NDArray[Any]]:
        return {name: array for name, array in self._arrays.items() if self._axes[name] is None}


def _tokens(array: NDArray[Any], axis: int, start: int, stop: int) -> NDArray[Any]:
    return array[(slice(None),) * axis + (slice(start, stop),)]
