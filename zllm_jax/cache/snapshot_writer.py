"""A state on its way to the store: rows are gathered into pieces, pieces become chunk files, then the manifest."""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import xxhash

from zllm_jax.buffers import tokens_of
from zllm_jax.cache.manifest import Manifest
from zllm_jax.cache.snapshot_files import CHUNKS, Blocks, Files, Writing
from zllm_jax.cache.snapshot_layout import FIXED, Array, Piece, Stage, joined
from zllm_jax.cache.snapshot_ledger import SnapshotInfo

IN_FLIGHT_BYTES = 64 << 20


def tenant_prefix(tenant: str) -> bytes:
    """What the names of a tenant's chunks depend on, so that two tenants never share a file."""
    return hashlib.sha256(tenant.encode()).digest()


def chunk_name(prefix: bytes, stage: int, start: int, blocks: Blocks) -> str:
    """xxh3-128 of the tenant, of the place, and of C-contiguous blocks, one after the other.

    start: the first row of the piece, or FIXED. With the place in it, a file is never taken for its neighbour.
    """
    hasher = xxhash.xxh3_128(prefix + struct.pack("<qq", stage, start))
    for block in blocks:
        hasher.update(block.data)
    return hasher.hexdigest()


def chunk_path(name: str) -> str:
    return f"{CHUNKS}/{name}"


class Home(Protocol):
    """What a writer needs of its store. All raise StoreUnavailable."""

    def hold(self, name: str, nbytes: int) -> bool:
        """Keep a chunk file from being removed until `commit` or `abandon`; whether one of its size is there."""

    def commit(self, manifest: Manifest, held: Sequence[str]) -> SnapshotInfo:
        """Make the snapshot exist, durably, when everything that it names is there; lets go of `held`."""

    def abandon(self, id: str, held: Sequence[str], written: Collection[str]) -> None:
        """Nothing of the snapshot stays: removes the files `written` for it, lets go of `held`. Raises nothing."""


@dataclass
class _Open:
    """The rows of one stage that are awaited: piece number `index`, of which `buffer` holds those before row `next`.

    parts: the token arrays as they lie in the buffer, which is used again for the next piece of its size.
    """

    index: int = 0
    next: int = 0
    buffer: bytearray = field(default_factory=bytearray)
    parts: dict[str, Array] = field(default_factory=dict)


class SnapshotWriter:
    """Takes the rows and fixed arrays of one state, stage by stage. From `SnapshotStore.writer`; for one thread.

    spans: the token ranges whose rows must be put, ascending; what lies between is shared with the base.
    Every method may raise StoreUnavailable: then nothing of the snapshot stays. Leaving its `with` aborts what was not
    committed.
    """

    def __init__(
        self,
        files: Files,
        home: Home,
        draft: Manifest,
        kept: Sequence[Piece],
        missing: Sequence[tuple[int, int]],
        held: Sequence[str],
    ) -> None:
        self._files, self._home, self._draft = files, home, draft
        self._kept, self._missing = kept, missing
        self._held: list[str] = list(held)
        self._written: set[str] = set()
        self.spans = joined(missing)
        self._stages = draft.stages
        self._prefix = tenant_prefix(draft.tenant)
        first = missing[0][0] if missing else 0
        self._open = {index: _Open(next=first) for index, stage in enumerate(self._stages) if stage.paged}
        self._names: dict[int, list[str]] = {index: [] for index in self._open}
        self._fixed: list[str | None] = [None] * len(self._stages)
        self._pending: deque[tuple[Writing, int]] = deque()
        self._pending_bytes = 0
        self._ended = False
        self.bytes_written = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abort()

    def put(self, start: int, stop: int, stage: int, rows: Mapping[str, Array]) -> None:
        """The token rows [start, stop) of a stage: each of its token arrays, stop - start long along its token axis.

        The rows of a stage come in the order of `spans`, in any number of calls; they may change afterwards. Blocks
        while more than 64 MiB are being written. Raises ValueError for rows that are not what the layout says or not
        the next ones.
        """
        self._check_open()
        awaited = self._open.get(stage)
        if awaited is None:
            raise ValueError(f"stage {stage} has no token arrays; {sorted(self._open)} have")
        _check_rows(self._stages[stage], rows, stop - start)
        if start != awaited.next or not any(begin <= start < stop <= end for begin, end in self.spans):
            raise ValueError(f"rows [{start}, {stop}) of stage {stage}: row {awaited.next} is the next of {self.spans}")
        first = start
        try:
            while start < stop:
                end = min(stop, self._missing[awaited.index][1])
                self._gather(stage, awaited, end, first, rows)
                start = end
        except BaseException:
            self.abort()
            raise

    def put_fixed(self, stage: int, arrays: Mapping[str, Array]) -> None:
        """The fixed arrays of a stage that has some; they may change afterwards."""
        self._check_open()
        fixed = self._stages[stage].fixed if 0 <= stage < len(self._stages) else ()
        if arrays.keys() != {name for name, _ in fixed}:
            raise ValueError(f"stage {stage} has the fixed arrays {[name for name, _ in fixed]}, got {sorted(arrays)}")
        for name, spec in fixed:
            if (arrays[name].dtype, arrays[name].shape) != (spec.dtype, spec.shape):
                raise ValueError(f"{name} is {arrays[name].dtype}{arrays[name].shape}, not {spec.dtype}{spec.shape}")
        if not fixed:
            return
        try:
            data = bytearray(b"".join(arrays[name].tobytes() for name, _ in fixed))
            self._fixed[stage] = self._write(stage, FIXED, data)
        except BaseException:
            self.abort()
            raise

    def commit(self) -> SnapshotInfo:
        """Return when the snapshot is on disk, whole. Raises ValueError while rows or arrays are missing."""
        self._check_open()
        for index, awaited in self._open.items():
            if awaited.index < len(self._missing):
                raise ValueError(f"stage {index} lacks the rows from {awaited.next} on of {self.spans}")
        for index, (name, stage) in enumerate(zip(self._fixed, self._stages, strict=True)):
            if stage.fixed and name is None:
                raise ValueError(f"stage {index} lacks its fixed arrays")
        try:
            while self._pending:
                self._finish_one()
            new = [
                Piece(start, stop, stop - start, tuple(self._names[stage][index] for stage in sorted(self._names)))
                for index, (start, stop) in enumerate(self._missing)
            ]
            pieces = tuple(sorted([*self._kept, *new], key=lambda piece: piece.start))
            manifest = replace(self._draft, pieces=pieces, fixed=tuple(self._fixed))
            info = self._home.commit(manifest, self._held)
            self.bytes_written += info.nbytes - sum(manifest.chunks().values())
        except BaseException:
            self.abort()
            raise
        self._ended = True
        return info

    def abort(self) -> None:
        """Nothing of the snapshot stays. Does nothing after `commit` or the first time."""
        if self._ended:
            return
        self._ended = True
        for writing, _ in self._pending:
            with suppress(Exception):
                writing.wait()
        self._pending.clear()
        self._open.clear()
        self._home.abandon(self._draft.id, self._held, self._written)

    def _check_open(self) -> None:
        if self._ended:
            raise ValueError("the writer has ended: open another one")

    def _gather(self, index: int, awaited: _Open, stop: int, first: int, rows: Mapping[str, Array]) -> None:
        """Copy the rows up to `stop`, which lie in one piece, into its buffer; `rows` begin with row `first`."""
        stage = self._stages[index]
        begin, end = self._missing[awaited.index]
        nbytes = (end - begin) * stage.row_bytes
        if len(awaited.buffer) != nbytes:
            awaited.buffer = bytearray(nbytes)
            awaited.parts = stage.parts(np.frombuffer(awaited.buffer, np.uint8), end - begin)
        for name, spec in stage.paged:
            here = tokens_of(rows[name], spec, awaited.next - first, stop - first)
            tokens_of(awaited.parts[name], spec, awaited.next - begin, stop - begin)[...] = here
        awaited.next = stop
        if stop < end:
            return
        awaited.index += 1
        if awaited.index < len(self._missing):
            awaited.next = self._missing[awaited.index][0]
        self._names[index].append(self._write(index, begin, awaited.buffer))

    def _write(self, stage: int, start: int, data: bytearray) -> str:
        """Begin to write a chunk, unless there is such a file; its name."""
        name = chunk_name(self._prefix, stage, start, [np.frombuffer(data, np.uint8)])
        there = self._home.hold(name, len(data))
        self._held.append(name)
        if there or name in self._written:
            return name
        while self._pending and self._pending_bytes + len(data) > IN_FLIGHT_BYTES:
            self._finish_one()
        self._written.add(name)
        self._pending.append((self._files.write(chunk_path(name), data), len(data)))
        self._pending_bytes += len(data)
        self.bytes_written += len(data)
        return name

    def _finish_one(self) -> None:
        writing, nbytes = self._pending[0]
        writing.wait()
        self._pending.popleft()
        self._pending_bytes -= nbytes


def _check_rows(stage: Stage, rows: Mapping[str, Array], count: int) -> None:
    if rows.keys() != {name for name, _ in stage.paged}:
        raise ValueError(f"token arrays are {[name for name, _ in stage.paged]}, got {sorted(rows)}")
    for name, spec in stage.paged:
        shape = tuple(count if size is None else size for size in spec.shape)
        if (rows[name].dtype, rows[name].shape) != (spec.dtype, shape):
            raise ValueError(f"{name} is {rows[name].dtype}{rows[name].shape}, must be {spec.dtype}{shape}")
