"""How a state's arrays become chunk files, as arithmetic: stages, pieces, and what a new state shares with an old one.

Token rows are cut into *pieces*, each inside one window [i * chunk_tokens, (i + 1) * chunk_tokens). A chunk file holds
the rows of one piece of one stage: of each token array, in the order of their names, the bytes u8[lead, rows, width].
f32[30, 3, S, 64] with token_axis=2 is lead 90, width 256. The fixed arrays of a stage are one file more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from zllm_jax.buffers import RowLayout, RowSpec

Array = np.ndarray[Any, np.dtype[Any]]
Rows = NDArray[np.uint8]  # u8[lead, rows, width]

MAX_TOKENS = 1 << 22
MAX_ARRAYS = 4096
MAX_STAGES = 1024
MAX_CHUNK_BYTES = 256 << 20
MAX_PIECES = 9  # in one window: turns of an eighth of it make no more

FIXED = -1  # in place of a first row: the fixed arrays of a stage

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@cache
def dtypes() -> Mapping[str, np.dtype[Any]]:
    """The element types that a snapshot may hold, by name."""
    plain = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    floats = ("float16", "float32", "float64")
    small = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    return {dtype.name: dtype for dtype in map(np.dtype, (*plain, *floats, *small))}


@dataclass(frozen=True)
class Stage:
    """One stage's arrays, each group in the order of names. row_bytes: of one token over all token arrays."""

    paged: tuple[tuple[str, RowSpec], ...]
    fixed: tuple[tuple[str, RowSpec], ...]
    row_bytes: int
    fixed_bytes: int

    def parts(self, buffer: NDArray[np.uint8], rows: int) -> dict[str, Array]:
        """The token arrays in the bytes u8[rows * row_bytes] of a chunk file, each `rows` long, not copied."""
        return _split(self.paged, buffer, rows)

    def fixed_parts(self, buffer: NDArray[np.uint8]) -> dict[str, Array]:
        """The fixed arrays in the bytes of their file, not copied."""
        return _split(self.fixed, buffer, 0)


def _split(arrays: Iterable[tuple[str, RowSpec]], buffer: NDArray[np.uint8], rows: int) -> dict[str, Array]:
    found = {}
    offset = 0
    for name, spec in arrays:
        shape = tuple(rows if size is None else size for size in spec.shape)
        end = offset + math.prod(shape) * spec.dtype.itemsize
        found[name] = buffer[offset:end].view(spec.dtype).reshape(shape)
        offset = end
    return found


def rows_of(array: Array, spec: RowSpec, start: int, stop: int) -> Array:
    """A view of the token rows [start, stop) of an array."""
    assert spec.token_axis is not None
    return array[(slice(None),) * spec.token_axis + (slice(start, stop),)]


def lead_width(spec: RowSpec) -> tuple[int, int]:
    """(lead, width in bytes) of an array with a token axis."""
    assert spec.token_axis is not None
    before, after = spec.shape[: spec.token_axis], spec.shape[spec.token_axis + 1 :]
    return math.prod(_known(before)), math.prod(_known(after)) * spec.dtype.itemsize


def stages_of(layout: RowLayout, chunk_tokens: int) -> tuple[Stage, ...]:
    """The stages of a layout. Raises ValueError for one that a snapshot cannot hold."""
    if len(layout) > MAX_ARRAYS:
        raise ValueError(f"a layout of {len(layout)} arrays, at most {MAX_ARRAYS} are possible")
    for name, spec in layout.items():
        _check_spec(name, spec)
    found = []
    for index in range(max((spec.stage for spec in layout.values()), default=-1) + 1):
        mine = sorted((name, spec) for name, spec in layout.items() if spec.stage == index)
        paged = tuple(item for item in mine if item[1].token_axis is not None)
        fixed = tuple(item for item in mine if item[1].token_axis is None)
        row_bytes = sum(math.prod(lead_width(spec)) for _, spec in paged)
        fixed_bytes = sum(math.prod(_known(spec.shape)) * spec.dtype.itemsize for _, spec in fixed)
        for what, nbytes in ((f"{chunk_tokens} tokens", row_bytes * chunk_tokens), ("fixed arrays", fixed_bytes)):
            if nbytes > MAX_CHUNK_BYTES:
                raise ValueError(f"stage {index}: {what} take {nbytes} bytes, a chunk file holds {MAX_CHUNK_BYTES}")
        found.append(Stage(paged, fixed, row_bytes, fixed_bytes))
    return tuple(found)


def _check_spec(name: str, spec: RowSpec) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"array name {name!r}: letters, digits, '.', '_' and '-' only, at most 64, no '.' first")
    if dtypes().get(spec.dtype.name) != spec.dtype:
        raise ValueError(f"{name}: dtype {spec.dtype} cannot be stored, only {', '.join(dtypes())}")
    axis = spec.token_axis
    if len(spec.shape) > 16 or (axis is not None and not 0 <= axis < len(spec.shape)):
        raise ValueError(f"{name}: token_axis {axis} is no axis of shape {spec.shape}")
    if any((size is None) != (index == axis) for index, size in enumerate(spec.shape)):
        raise ValueError(f"{name}: shape {spec.shape} must have None at token_axis {axis} and nowhere else")
    if not all(1 <= size <= MAX_CHUNK_BYTES for size in _known(spec.shape)):
        raise ValueError(f"{name}: shape {spec.shape} must hold an element, and at most {MAX_CHUNK_BYTES} on an axis")
    if not 0 <= spec.stage < MAX_STAGES:
        raise ValueError(f"{name}: stage {spec.stage} must be in [0, {MAX_STAGES})")


def _known(shape: Iterable[int | None]) -> list[int]:
    return [size for size in shape if size is not None]


def as_rows(array: Array, spec: RowSpec) -> Rows:
    """The bytes u8[lead, rows, width] of a C-contiguous array with any number of tokens, not copied."""
    lead, width = lead_width(spec)
    return array.reshape(-1).view(np.uint8).reshape(lead, -1, width)


@dataclass(frozen=True)
class Piece:
    """The token rows [start, stop). The files, one a stage with token arrays, hold `rows` rows from `start` on.

    They hold more than stop - start where a fork left a conversation in the middle of a piece.
    """

    start: int
    stop: int
    rows: int
    chunks: tuple[str, ...]


def shared_pieces(pieces: Sequence[Piece], shared: int, total: int, chunk_tokens: int) -> list[Piece]:
    """The pieces of a base that a state of `total` tokens refers to, when its first `shared` rows are the base's.

    Small pieces at the end are left out, for the new piece to take their rows in, as far as that writes at most a fifth
    more than the new rows. A window with MAX_PIECES pieces is written anew: turns of few tokens cost at most that.
    """
    kept = [
        Piece(piece.start, min(piece.stop, shared), piece.rows, piece.chunks)
        for piece in pieces
        if piece.start < shared
    ]
    window = shared - shared % chunk_tokens
    last = [piece for piece in kept if piece.start >= window]
    if not last or total <= shared:
        return kept
    whole, spare = kept[: len(kept) - len(last)], (total - shared) // 5
    if len(last) >= MAX_PIECES:
        return whole
    while last and shared - last[-1].start <= spare:
        last.pop()
    return whole + last


def missing_pieces(kept: Sequence[Piece], total: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """The row ranges, each inside a window, that with `kept` (ascending) make [0, total)."""
    found = []
    start = 0
    for until, resume in [*((piece.start, piece.stop) for piece in kept), (total, total)]:
        while start < until:
            stop = min(until, start - start % chunk_tokens + chunk_tokens)
            found.append((start, stop))
            start = stop
        start = resume
    return found


def joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ascending ranges, with those that touch made one."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
