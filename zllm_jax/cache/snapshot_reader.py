"""A snapshot on its way back: the store's threads read chunk files straight to where the rows belong, and verify."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from zllm_jax.buffers import tokens_of
from zllm_jax.cache.manifest import ChunkFile, Manifest
from zllm_jax.cache.snapshot_files import Blocks, Files, store_errors
from zllm_jax.cache.snapshot_layout import FIXED, Array, Piece, Stage, as_rows
from zllm_jax.cache.snapshot_writer import chunk_name, chunk_path, tenant_prefix
from zllm_jax.errors import CorruptSnapshot, StoreUnavailable

Broken = Callable[[str], None]
"""Told the name of each chunk file that is not what it should be."""


@dataclass(frozen=True)
class Filling:
    """Rows under way."""

    _reads: Sequence[Future[None]]

    def on_done(self, tell: Callable[[], None]) -> None:
        """Call `tell`, from any thread, when something of it is done: at the latest when all is."""
        for read in self._reads:
            read.add_done_callback(lambda _: tell())

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(read.done() for read in self._reads)

    def wait(self) -> None:
        """Return when the rows are there and verified. Raises CorruptSnapshot, StoreUnavailable: then they are not."""
        concurrent.futures.wait(self._reads)
        for read in self._reads:
            if read.cancelled():
                raise StoreUnavailable("the reader was closed before its reads were done")
            read.result()


class ChunkFiles:
    """Reads chunk files of one tenant, each verified, and reports those that are broken."""

    def __init__(self, files: Files, tenant: str, broken: Broken) -> None:
        self._files, self._broken = files, broken
        self._prefix = tenant_prefix(tenant)

    def read_into(self, file: ChunkFile, blocks: Blocks) -> None:
        """Fill C-contiguous blocks, together of the file's size."""
        where = f"{self._files.where}/{chunk_path(file.name)}"
        try:
            self._files.read_into(chunk_path(file.name), blocks)
            if chunk_name(self._prefix, file.stage, file.start, blocks) != file.name:
                raise CorruptSnapshot(f"{where}: the checksum does not match its name and place", path=where)
        except CorruptSnapshot:
            self._broken(file.name)
            raise

    def read(self, file: ChunkFile) -> NDArray[np.uint8]:
        """The bytes of a file; room is made only for what is there."""
        found = self._files.stat(chunk_path(file.name))
        if found is None or found.nbytes not in (None, file.nbytes):
            self._broken(file.name)
            where = f"{self._files.where}/{chunk_path(file.name)}"
            there = "is missing" if found is None else f"has {found.nbytes} bytes"
            raise CorruptSnapshot(f"{where} {there}, it should have {file.nbytes} bytes", path=where)
        with store_errors("read", self._files.where):
            buffer = np.empty(file.nbytes, np.uint8)
        self.read_into(file, [buffer])
        return buffer


class SnapshotReader:
    """The rows of one snapshot, asked for by stage. From `SnapshotStore.reader`; for one thread.

    bytes_read: of the manifest, and of the files that were asked for so far.
    """

    def __init__(
        self, files: Files, manifest: Manifest, manifest_bytes: int, threads: ThreadPoolExecutor, broken: Broken
    ) -> None:
        self._manifest, self._threads, self._where = manifest, threads, files.where
        self._stages = manifest.stages
        self._column: dict[int, int] = {}  # stage -> place of its file among those of a piece
        for index, stage in enumerate(self._stages):
            if stage.paged:
                self._column[index] = len(self._column)
        self._chunks = ChunkFiles(files, manifest.tenant, broken)
        self._reads: list[Future[None]] = []
        self._closed = False
        self.bytes_read = manifest_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The verified token ids i32[S]."""
        return self._manifest.tokens

    def fill(self, stage: int, start: int, stop: int, room: Mapping[str, Array]) -> Filling:
        """Begin to read the token rows [start, stop) of a stage into the first rows of `room`.

        Whole pieces are read; those that reach over start or stop take a copy more, which a start at a multiple of the
        store's chunk_tokens spares. room: each token array of the stage, C-contiguous, at least stop - start long along
        its token axis; it belongs to the reads until all are done. Raises ValueError for anything else,
        StoreUnavailable when closed.
        """
        if self._closed:
            raise StoreUnavailable("the reader is closed")
        if not 0 <= start < stop <= len(self.tokens):
            raise ValueError(f"rows [{start}, {stop}) must be some of the {len(self.tokens)} that there are")
        arrays = self._stages[stage]
        _check_room(arrays, room, stop - start)
        pieces = [
            piece for piece in self._manifest.pieces if piece.start < stop and start < piece.stop and arrays.paged
        ]
        self.bytes_read += sum(piece.rows * arrays.row_bytes for piece in pieces)
        self._reads = [read for read in self._reads if not read.done()]
        reads = [self._begin(stage, piece, start, stop, room) for piece in pieces]
        self._reads += reads
        return Filling(reads)

    def _begin(self, stage: int, piece: Piece, start: int, stop: int, room: Mapping[str, Array]) -> Future[None]:
        """A read, or the failure to begin one: others into the same room may be under way."""
        try:
            return self._threads.submit(self._read, stage, piece, start, stop, room)
        except RuntimeError as error:  # no more threads, or the store was closed
            failed = Future[None]()
            failed.set_exception(StoreUnavailable(f"cannot read {self._where}: {error}"))
            return failed

    def fixed(self, stage: int) -> dict[str, Array]:
        """The fixed arrays of a stage, read and verified ({} without). Raises CorruptSnapshot, StoreUnavailable."""
        name, arrays = self._manifest.fixed[stage], self._stages[stage]
        if name is None:
            return {}
        self.bytes_read += arrays.fixed_bytes
        return arrays.fixed_parts(self._chunks.read(ChunkFile(name, arrays.fixed_bytes, stage, FIXED)))

    def close(self) -> None:
        """Return when no read is under way any more: the room may be used for something else."""
        self._closed = True
        for read in self._reads:
            read.cancel()
        concurrent.futures.wait(self._reads)
        self._reads = []

    def _read(self, index: int, piece: Piece, start: int, stop: int, room: Mapping[str, Array]) -> None:
        """Read the file of a piece straight into the room, or, where not all its rows belong there, aside."""
        stage, begin, end = self._stages[index], max(piece.start, start), min(piece.stop, stop)
        file = ChunkFile(piece.chunks[self._column[index]], piece.rows * stage.row_bytes, index, piece.start)
        if end - begin == piece.rows:
            blocks: list[NDArray[np.uint8]] = []
            for array, spec in stage.paged:
                rows = as_rows(room[array], spec)[:, begin - start : end - start]
                blocks += [rows.reshape(-1)] if rows.flags.c_contiguous else list(rows)
            self._chunks.read_into(file, blocks)
            return
        parts = stage.parts(self._chunks.read(file), piece.rows)
        for array, spec in stage.paged:
            here = tokens_of(parts[array], spec, begin - piece.start, end - piece.start)
            tokens_of(room[array], spec, begin - start, end - start)[...] = here


def _check_room(stage: Stage, room: Mapping[str, Array], count: int) -> None:
    if room.keys() != {name for name, _ in stage.paged}:
        raise ValueError(f"token arrays are {[name for name, _ in stage.paged]}, got {sorted(room)}")
    for name, spec in stage.paged:
        array = room[name]
        fits = len(array.shape) == len(spec.shape) and all(
            have >= count if size is None else have == size for have, size in zip(array.shape, spec.shape, strict=True)
        )
        if array.dtype != spec.dtype or not fits or not array.flags.c_contiguous:
            raise ValueError(f"{name} is {array.dtype}{array.shape}, must be {spec.dtype}{spec.shape} and contiguous")
