"""Host memory that XLA on a CPU can use where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64


def aligned_empty(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """An empty array whose data starts at a multiple of 64 bytes, which is what XLA asks for to skip a copy."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(kind).reshape(shape)
