"""A snapshot on its way to the device: groups of tokens are read and verified while the one before is copied."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zllm_jax.buffers import HostRows
from zllm_jax.cache.manifest import TOKENS, ArrayEntry, Manifest
from zllm_jax.cache.snapshot_chunks import READERS, chunk_jobs, read_arrays, read_chunk, readable_in_place
from zllm_jax.cache.snapshot_files import Files, store_errors


class SnapshotReader:
    """The rows of one snapshot whose manifest and file sizes were checked (a `RowSource`). Leave it to end its threads.

    Files are read straight into the room that is given, where they lie in a folder, are not compressed, and the groups
    asked for hold whole chunks; otherwise the arrays are read at once and copied from.
    `fill`'s waits and `fixed` raise CorruptSnapshot or StoreUnavailable: what was filled is then worth nothing.
    bytes_read: of the manifest, and of the files that were asked for so far.
    """

    def __init__(self, files: Files, manifest: Manifest, manifest_bytes: int) -> None:
        self._files, self._manifest = files, manifest
        self._entries = {entry.name: entry for entry in manifest.arrays}
        self._in_place = readable_in_place(files, manifest)
        self._threads = ThreadPoolExecutor(READERS, "snapshot-read")
        self._whole: HostRows | None = None
        self.bytes_read = manifest_bytes

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def tokens(self) -> NDArray[np.int32]:
        """The verified token ids i32[S]."""
        return self._read(self._manifest.tokens)[TOKENS]

    def fixed(self) -> Mapping[str, NDArray[Any]]:
        return self._read(*(entry for entry in self._manifest.arrays[1:] if entry.token_axis is None))

    def fill(self, start: int, room: Mapping[str, NDArray[Any]]) -> Callable[[], None]:
        if self._whole is not None or not all(self._holds_whole_chunks(name, start, room[name]) for name in room):
            return self._from_whole(start, room)
        jobs = [
            job for name, part in room.items() for job in chunk_jobs(self._manifest, self._entries[name], part, start)
        ]
        self.bytes_read += sum(job.chunk.nbytes for job in jobs)
        with store_errors("read", self._files.where):
            reads = [self._threads.submit(read_chunk, self._files, job) for job in jobs]

        def wait() -> None:
            concurrent.futures.wait(reads)
            for read in reads:
                read.result()

        return wait

    def _holds_whole_chunks(self, name: str, start: int, part: NDArray[Any]) -> bool:
        entry = self._entries[name]
        assert entry.token_axis is not None
        grid, room = entry.grid(self._manifest.chunk_tokens), part.shape[entry.token_axis]
        size = grid.chunk_rows
        whole = start % size == 0 and (room % size == 0 or start + room >= grid.rows)
        return self._in_place and part.flags.c_contiguous and whole

    def _from_whole(self, start: int, room: Mapping[str, NDArray[Any]]) -> Callable[[], None]:
        if self._whole is None:
            paged = [entry for entry in self._manifest.arrays[1:] if entry.token_axis is not None]
            self._whole = HostRows(self._read(*paged), {entry.name: entry.token_axis for entry in paged})
        return self._whole.fill(start, room)

    def _read(self, *entries: ArrayEntry) -> dict[str, NDArray[Any]]:
        self.bytes_read += sum(chunk.nbytes for entry in entries for chunk in entry.chunks)
        return read_arrays(self._files, self._manifest, entries)
