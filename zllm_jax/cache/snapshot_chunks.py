"""Arrays to and from chunk files.

TensorStore (zarr3, no metadata file: the manifest is the metadata) writes and reads the chunks. Uncompressed chunks in
a folder are read past it, by `preadv` from the page cache straight into the destination: one copy instead of two.
Digests are taken of the rows as they lie in the caller's arrays, so a check covers the whole way there and back.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash
from numpy.typing import NDArray

from zllm_jax.cache.manifest import (
    TOKENS,
    ArrayEntry,
    Chunk,
    Codec,
    Grid,
    Manifest,
    Span,
    chunk_path,
    dtypes,
    part_dir,
    valid_name,
)
from zllm_jax.cache.snapshot_files import Files, context, open_regular, store_errors
from zllm_jax.errors import CorruptSnapshot

Rows = NDArray[np.uint8]  # u8[lead, rows, width]

READERS = 4
IN_FLIGHT_BYTES = 64 << 20  # of buffers that a save holds while TensorStore writes
IOV_MAX = 1024
BLOSC_HEADER_BYTES = 16


@dataclass(frozen=True)
class StateArray:
    """One array of a state. token_axis: the axis of length S (the snapshot's tokens), or None for a ring or fixed one.

    C-contiguous arrays are written without a copy; they must not change until `save` returns.
    """

    value: np.ndarray[Any, np.dtype[Any]]
    token_axis: int | None


def check_arrays(arrays: Mapping[str, StateArray], num_tokens: int) -> None:
    """Raises ValueError for an array that a snapshot cannot hold."""
    for name, array in arrays.items():
        value, axis = array.value, array.token_axis
        if name == TOKENS:
            raise ValueError(f"array name {name!r} is taken: the store keeps the token ids under it")
        if not valid_name(name):
            raise ValueError(f"array name {name!r}: letters, digits, '.', '_' and '-' only, at most 64, no '.' first")
        if dtypes().get(value.dtype.name) != value.dtype:
            raise ValueError(f"{name}: dtype {value.dtype} cannot be stored, only {', '.join(dtypes())}")
        if value.size == 0:
            raise ValueError(f"{name}: shape {value.shape} holds no element; leave the array out")
        if axis is not None and not (0 <= axis < value.ndim and value.shape[axis] == num_tokens):
            raise ValueError(f"{name}: token_axis {axis} of shape {value.shape} does not have {num_tokens} tokens")


def part_dirs(arrays: Mapping[str, StateArray], chunk_tokens: int) -> list[str]:
    """The folders that the chunks of `arrays` go to."""
    return sorted(
        {part_dir(name, span) for name, array in arrays.items() for span in _grid_of(array, chunk_tokens).spans()}
    )


def write_arrays(
    files: Files, id: str, arrays: Mapping[str, StateArray], codec: Codec, chunk_tokens: int
) -> tuple[ArrayEntry, ...]:
    """Write every chunk; return when all are on disk. Raises StoreUnavailable, and then no write goes on behind."""
    views = {name: _view(array, chunk_tokens) for name, array in arrays.items()}
    digests: dict[str, list[str]] = {name: [] for name in arrays}
    writer = _Writer()
    try:
        with store_errors("write", f"{files.where}/{id}"):
            for name, (grid, rows) in views.items():
                for span, store in _stores(files, f"{id}/{name}", grid, codec, arrays[name].value.dtype.itemsize):
                    digests[name].append(digest(writer.write(store, rows[:, span.start : span.stop])))
            files.settle(id)
            writer.finish()
    finally:
        writer.abandon()

    def entry(name: str, array: StateArray) -> ArrayEntry:
        grid, _ = views[name]
        sizes = (
            grid.nbytes(span) if codec == "raw" else files.size(f"{id}/{chunk_path(name, span)}")
            for span in grid.spans()
        )
        chunks = tuple(Chunk(size, text) for size, text in zip(sizes, digests[name], strict=True))
        return ArrayEntry(name, array.value.dtype, array.value.shape, array.token_axis, chunks)

    return tuple(entry(name, array) for name, array in arrays.items())


class _Writer:
    """Chunks on their way to disk, in few reused buffers: TensorStore writes what is contiguous without a copy."""

    def __init__(self) -> None:
        self._pending: deque[tuple[ts.WriteFutures, NDArray[np.uint8] | None, int]] = deque()
        self._pending_bytes = 0
        self._free: list[NDArray[np.uint8]] = []

    def write(self, store: ts.TensorStore, rows: Rows) -> Rows:
        """Begin to write one chunk; its rows, contiguous, valid until the next call."""
        buffer = None
        if not rows.flags.c_contiguous:
            buffer = self._buffer(rows.nbytes)
            staged = buffer[: rows.size].reshape(rows.shape)
            np.copyto(staged, rows)
            rows = staged
        # One future a chunk: that of several fails before all of them are done.
        self._pending.append((store.write(rows, can_reference_source_data_indefinitely=True), buffer, rows.nbytes))
        self._pending_bytes += rows.nbytes
        return rows

    def finish(self) -> None:
        """Return when everything is on disk, or raise for what is not."""
        while self._pending:
            self._finish_one()

    def abandon(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        for write, _, _ in self._pending:
            write.commit.exception()

    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        while self._pending and self._pending_bytes + nbytes > IN_FLIGHT_BYTES:
            self._finish_one()
        if self._free and self._free[-1].size >= nbytes:
            return self._free.pop()
        return np.empty(nbytes, np.uint8)

    def _finish_one(self) -> None:
        write, buffer, nbytes = self._pending[0]
        write.result()
        self._pending.popleft()
        self._pending_bytes -= nbytes
        if buffer is not None:
            self._free.append(buffer)


def read_arrays(
    files: Files, manifest: Manifest, entries: Sequence[ArrayEntry] | None = None
) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Some or all arrays of a snapshot whose manifest and file sizes were checked, each chunk verified.

    Raises CorruptSnapshot for the first chunk that is missing, truncated or not what was saved.
    """
    where = f"{files.where}/{manifest.id}"
    entries = manifest.arrays if entries is None else entries
    with store_errors("load", where):
        arrays = {entry.name: np.empty(entry.shape, entry.dtype) for entry in entries}
    jobs = [job for entry in entries for job in chunk_jobs(manifest, entry, arrays[entry.name])]
    if readable_in_place(files, manifest):
        with ThreadPoolExecutor(READERS, "snapshot-read") as pool:
            for _ in pool.map(partial(read_chunk, files), jobs):
                pass
    else:
        _read_tensorstore(files, manifest, entries, jobs)
    return arrays


@dataclass(frozen=True)
class ChunkJob:
    """A chunk to read: from `path`, into `rows`."""

    path: str
    chunk: Chunk
    rows: Rows


def chunk_jobs(
    manifest: Manifest, entry: ArrayEntry, array: np.ndarray[Any, np.dtype[Any]], start: int = 0
) -> Iterator[ChunkJob]:
    """The chunks that go into C-contiguous `array`: the whole entry, or as many of its rows as fit from `start` on.

    No chunk may lie across the array's ends.
    """
    grid = entry.grid(manifest.chunk_tokens)
    rows = as_rows(array, grid)
    for span in grid.spans(start, start + rows.shape[1]):
        path = f"{manifest.id}/{chunk_path(entry.name, span)}"
        chunk = entry.chunks[span.start // grid.chunk_rows]
        yield ChunkJob(path, chunk, rows[:, span.start - start : span.stop - start])


def readable_in_place(files: Files, manifest: Manifest) -> bool:
    """Whether `read_chunk` can read the chunks: uncompressed files in a folder."""
    return files.local is not None and manifest.codec == "raw"


def read_chunk(files: Files, job: ChunkJob) -> None:
    """Read one chunk file to where its rows belong, and verify it. Raises CorruptSnapshot, StoreUnavailable."""
    where = f"{files.where}/{job.path}"
    with store_errors("read", where, reading=True), open_regular(where) as descriptor:
        nbytes = job.chunk.nbytes
        if os.fstat(descriptor).st_size != nbytes or _scatter(descriptor, job.rows) != nbytes:
            raise CorruptSnapshot(f"{where} does not have {nbytes} bytes", path=where)
    _check(job, where)


def _read_tensorstore(
    files: Files, manifest: Manifest, entries: Sequence[ArrayEntry], jobs: Sequence[ChunkJob]
) -> None:
    if manifest.codec != "raw" and files.local is not None:
        for job in jobs:
            _check_frame(f"{files.where}/{job.path}", job.rows.nbytes)
    stores = [
        store
        for entry in entries
        for _, store in _stores(
            files,
            f"{manifest.id}/{entry.name}",
            entry.grid(manifest.chunk_tokens),
            manifest.codec,
            entry.dtype.itemsize,
        )
    ]
    copies = [
        ts.array(job.rows, copy=False, context=context()).write(store) for store, job in zip(stores, jobs, strict=True)
    ]
    try:
        for copy, job in zip(copies, jobs, strict=True):
            where = f"{files.where}/{job.path}"
            with store_errors("read", where, reading=True):
                copy.result()
            _check(job, where)
    finally:
        for copy in copies:  # none may write into the arrays once the caller has dropped them
            copy.commit.exception()


def as_rows(value: np.ndarray[Any, np.dtype[Any]], grid: Grid) -> Rows:
    """The bytes of a C-contiguous array of the grid's kind, with any number of rows, not copied."""
    return value.reshape(-1).view(np.uint8).reshape(grid.lead, -1, grid.width)


def digest(rows: Rows) -> str:
    """xxh3-128 of rows in C order."""
    hasher = xxhash.xxh3_128()
    for block in [rows] if rows.flags.c_contiguous else rows:
        hasher.update(block.data)
    return hasher.hexdigest()


def _check(job: ChunkJob, where: str) -> None:
    if digest(job.rows) != job.chunk.digest:
        raise CorruptSnapshot(f"{where}: the checksum does not match the manifest", path=where)


def _check_frame(where: str, nbytes: int) -> None:
    """Refuse a blosc frame that claims another size than its chunk: the decoder would allocate what it claims."""
    with store_errors("read", where, reading=True), open_regular(where) as descriptor:
        header = os.pread(descriptor, BLOSC_HEADER_BYTES, 0)
    if len(header) < BLOSC_HEADER_BYTES or int.from_bytes(header[4:8], "little") != nbytes:
        raise CorruptSnapshot(f"{where}: not a blosc frame of {nbytes} bytes", path=where)


def _scatter(descriptor: int, rows: Rows) -> int:
    """Read a file from its start into `rows`; the number of bytes there were."""
    done = 0
    if rows.flags.c_contiguous:
        rows = rows.reshape(1, -1)
    for first in range(0, len(rows), IOV_MAX):
        blocks = list(rows[first : first + IOV_MAX])
        done += os.preadv(descriptor, blocks, done)
    return done


def _view(array: StateArray, chunk_tokens: int) -> tuple[Grid, Rows]:
    grid = _grid_of(array, chunk_tokens)
    return grid, as_rows(np.asarray(array.value, order="C"), grid)


def _grid_of(array: StateArray, chunk_tokens: int) -> Grid:
    return Grid.of(array.value.shape, array.value.dtype.itemsize, array.token_axis, chunk_tokens)


def _stores(
    files: Files, prefix: str, grid: Grid, codec: Codec, itemsize: int
) -> Iterator[tuple[Span, ts.TensorStore]]:
    """For every chunk the TensorStore view u8[lead, rows of the chunk, width] that is exactly its file."""
    opened: dict[str, ts.TensorStore] = {}
    for span in grid.spans():
        if span.part not in opened:
            opened[span.part] = _open(files, f"{prefix}@{span.part}", grid, span, codec, itemsize)
        first = span.start - int(span.part)
        yield span, opened[span.part][:, first : first + span.stop - span.start].translate_to[0, 0, 0]


def _open(files: Files, path: str, grid: Grid, span: Span, codec: Codec, itemsize: int) -> ts.TensorStore:
    rows = span.stop - span.start
    spec = {
        "driver": "zarr3",
        "kvstore": files.spec(path),
        "metadata": {
            "data_type": "uint8",
            "fill_value": 0,
            "shape": [grid.lead, grid.rows - int(span.part), grid.width],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [grid.lead, rows, grid.width]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": _codecs(codec, itemsize),
        },
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }
    return ts.open(spec, open=True, assume_metadata=True, context=context()).result()


def _codecs(codec: Codec, itemsize: int) -> list[dict[str, Any]]:
    if codec == "raw":
        return [{"name": "bytes"}]
    blosc = {"cname": codec.removeprefix("blosc-"), "clevel": 1, "shuffle": "bitshuffle", "typesize": itemsize}
    return [{"name": "bytes"}, {"name": "blosc", "configuration": blosc}, {"name": "crc32c"}]
