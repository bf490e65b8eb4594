"""The second tier: states of conversations on disk, committed whole, verified when read.

A snapshot is a folder of chunk files, the token ids, and a manifest that is written last. Whatever happens in between,
what has a manifest is whole and what has none is not there. Nothing here knows what the arrays mean.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from zllm_jax.cache import manifest as format_
from zllm_jax.cache.manifest import CODECS, MANIFEST_FILE, TOKENS, BadManifest, Codec, Manifest
from zllm_jax.cache.snapshot_chunks import StateArray, check_arrays, part_dirs, read_arrays, write_arrays
from zllm_jax.cache.snapshot_files import open_files, open_regular
from zllm_jax.cache.snapshot_reader import SnapshotReader
from zllm_jax.errors import CacheError, CorruptSnapshot, StoreUnavailable

__all__ = ["Snapshot", "SnapshotInfo", "SnapshotStore", "StateArray"]

log = logging.getLogger(__name__)

Layout = tuple[DTypeLike, tuple[int | None, ...]]
_ID = re.compile(r"[0-9a-f]{32}")
_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class SnapshotInfo:
    """What the index knows of a snapshot. nbytes: sizes of its files; times: seconds since the epoch."""

    id: str
    namespace: str
    num_tokens: int
    nbytes: int
    created_s: float
    last_used_s: float
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """A restored state: token ids i32[S] and the arrays by name, bit for bit as saved. bytes_read: from the store."""

    info: SnapshotInfo
    tokens: NDArray[np.int32]
    arrays: dict[str, np.ndarray[Any, np.dtype[Any]]]
    bytes_read: int


def namespace_key(namespace: str) -> str:
    """The folder name of a namespace. A key stays itself, so that what `keys_below` lists opens a store."""
    return namespace if _KEY.fullmatch(namespace) else hashlib.sha256(namespace.encode()).hexdigest()[:32]


def keys_below(root: str | Path) -> list[str]:
    """The keys of the namespaces in a folder of snapshots. Raises StoreUnavailable when it cannot be listed."""
    try:
        return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and _KEY.fullmatch(entry.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreUnavailable(f"{root} cannot be listed ({error.strerror}): give a folder of snapshots") from error


class SnapshotStore:
    """Snapshots of one namespace below `root`.

    root: a folder, or a URL that TensorStore opens as a kvstore (`memory://`, `s3://bucket/path`).
    namespace: the identity of the states (weights, layout, dtype, tenant), or its key; others are never seen.
    chunk_tokens: tokens a chunk file of an array with a token axis.
    max_bytes: quota; the least recently used snapshots make room. codec: of new snapshots; all are read.
    grace_s: how old an entry without a manifest must be to count as left by a crash rather than being written.

    repair: False changes nothing on disk when opened: what is broken is listed in `broken` (id -> reason) instead.

    The index is rebuilt from the files here and in `refresh`; what is not whole is dropped with a logged reason.
    Methods may be called from any thread; several processes may share a root.
    Raises StoreUnavailable when the root cannot be listed.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        namespace: str,
        chunk_tokens: int = 256,
        max_bytes: int | None = None,
        codec: Codec = "raw",
        grace_s: float = 3600.0,
        repair: bool = True,
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}, must be at least 1")
        if codec not in CODECS:
            raise ValueError(f"codec is {codec!r}, must be one of {', '.join(CODECS)}")
        self.namespace = namespace
        self._key = namespace_key(namespace)
        self._files = open_files(root, self._key)
        self._chunk_tokens = chunk_tokens
        self._max_bytes = max_bytes
        self._codec: Codec = codec
        self._grace_s = grace_s
        self._repair = repair
        self.broken: dict[str, str] = {}
        self._lock = threading.Lock()
        self._index: dict[str, SnapshotInfo] = {}
        self._writing: set[str] = set()
        self._refreshing = threading.Lock()
        self._forgotten: set[str] = set()  # and perhaps still on disk
        self.refresh()

    @property
    def where(self) -> str:
        """The folder or URL of this namespace."""
        return self._files.where

    @property
    def nbytes(self) -> int:
        """Bytes on disk of everything that `list` shows."""
        with self._lock:
            return sum(info.nbytes for info in self._index.values())

    def list(self) -> list[SnapshotInfo]:
        """The whole snapshots, least recently used first."""
        with self._lock:
            return sorted(self._index.values(), key=lambda info: info.last_used_s)

    def refresh(self) -> None:
        """Rebuild the index: see what other processes committed or deleted, drop what is not whole."""
        with self._refreshing:
            with self._lock:
                before = set(self._index)
            there = self._files.ids()
            found = {id: info for id in there if (info := self._recover(id)) is not None}
            with self._lock:
                saved = {
                    id: info for id, info in self._index.items() if id not in before
                }  # meanwhile, by other threads
                self._index = {id: info for id, info in found.items() if id not in self._forgotten} | saved
                self._forgotten.intersection_update(there)

    def save(
        self, tokens: ArrayLike, arrays: Mapping[str, StateArray], *, meta: Mapping[str, Any] | None = None
    ) -> SnapshotInfo:
        """Write a state and return once it is on disk, whole.

        tokens: ids i32[S], S >= 1. meta: JSON values, kept with the snapshot.
        Raises ValueError for what cannot be stored; StoreUnavailable when the store fails: then nothing of it stays.
        """
        ids = _token_array(tokens)
        check_arrays(arrays, len(ids))
        self._make_room(ids.nbytes + sum(array.value.nbytes for array in arrays.values()))
        id = secrets.token_hex(16)
        with self._lock:
            self._writing.add(id)
        try:
            manifest, manifest_bytes = self._write(id, {TOKENS: StateArray(ids, None), **arrays}, dict(meta or {}))
        except BaseException:
            self._discard(id)
            raise
        finally:
            with self._lock:
                self._writing.discard(id)
        info = self._info(manifest, manifest_bytes)
        with self._lock:
            self._index[id] = info
        return info

    def load(self, id: str, *, expect: Mapping[str, Layout] | None = None) -> Snapshot:
        """Read a snapshot and verify every byte of it.

        expect: the arrays that must be there, no more and no less: name -> (dtype, shape), None at the token axis.
        Raises CorruptSnapshot when any check fails (`quarantine` it), StoreUnavailable when the store cannot be read.
        """
        manifest, info = self._open(id, expect)
        arrays = read_arrays(self._files, manifest)
        tokens = arrays.pop(TOKENS)
        return Snapshot(self._used(info), tokens, arrays, info.nbytes)

    @contextmanager
    def reading(self, id: str, *, expect: Mapping[str, Layout]) -> Iterator[SnapshotReader]:
        """Read a snapshot group by group, each verified, to where its rows are wanted. Raises as `load` does."""
        manifest, info = self._open(id, expect)
        manifest_bytes = info.nbytes - sum(manifest.files().values())
        with SnapshotReader(self._files, manifest, manifest_bytes) as reader:
            yield reader
        self._used(info)

    def tokens(self, id: str) -> NDArray[np.int32]:
        """The verified token ids i32[S] of a snapshot, without its arrays. Raises as `load` does."""
        manifest, _ = self._open(id)
        return read_arrays(self._files, manifest, [manifest.tokens])[TOKENS]

    def verify(self, id: str) -> None:
        """Read and check everything. Raises as `load` does."""
        manifest, _ = self._open(id)
        read_arrays(self._files, manifest)

    def delete(self, id: str) -> None:
        """Remove a snapshot; removing one that is gone does nothing. Raises StoreUnavailable."""
        self._check_id(id)
        self._forget(id)
        self._files.remove(id)

    def quarantine(self, id: str, reason: str) -> None:
        """Take a snapshot out of service and keep its files (the last few such) with the reason, for a look."""
        self._check_id(id)
        self._forget(id)
        target = self._files.set_aside(id, reason)
        log.warning("snapshot %s in %s is quarantined (%s): %s", id, self.where, target, reason)

    def drop_page_cache(self, id: str) -> bool:
        """Ask the operating system to forget the files' cached pages; False where it cannot be asked."""
        folder = self._files.local
        if folder is None or not hasattr(os, "posix_fadvise"):
            return False
        for name in self._files.sizes(id) or ():
            with open_regular(folder / id / name) as descriptor:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return True

    def _write(self, id: str, arrays: Mapping[str, StateArray], meta: Mapping[str, Any]) -> tuple[Manifest, int]:
        manifest = Manifest(
            id=id,
            namespace=self._key,
            created_s=time.time(),
            codec=self._codec,
            chunk_tokens=self._chunk_tokens,
            arrays=(),
            meta=meta,
        )
        manifest.encode()  # a meta that is not JSON fails before anything is written
        self._files.prepare(id, part_dirs(arrays, self._chunk_tokens))
        entries = write_arrays(self._files, id, arrays, self._codec, self._chunk_tokens)
        manifest = replace(manifest, arrays=entries)
        return manifest, self._files.write(f"{id}/{MANIFEST_FILE}", manifest.encode())

    def _used(self, info: SnapshotInfo) -> SnapshotInfo:
        self._files.mark_used(info.id)
        info = replace(info, last_used_s=time.time())
        with self._lock:
            if info.id in self._index:
                self._index[info.id] = info
        return info

    def _open(self, id: str, expect: Mapping[str, Layout] | None = None) -> tuple[Manifest, SnapshotInfo]:
        """The manifest, checked against the entry's name, the namespace, the files on disk, and what is expected."""
        self._check_id(id)
        path = f"{id}/{MANIFEST_FILE}"
        where = f"{self.where}/{path}"
        text = self._files.read(path, format_.MAX_MANIFEST_BYTES)
        try:
            manifest = format_.parse(text)
        except BadManifest as error:
            raise CorruptSnapshot(f"{where}: {error}", path=where) from error
        if manifest.id != id or manifest.namespace != self._key:
            raise CorruptSnapshot(f"{where} belongs to another snapshot or namespace", path=where)
        expected = {**manifest.files(), MANIFEST_FILE: len(text)}
        found = self._files.sizes(id)
        if found is not None and found != expected:
            name = min(name for name, _ in found.items() ^ expected.items())
            what = f"{name} has {found.get(name, 'no')} bytes, the manifest says {expected.get(name, 'none')}"
            raise CorruptSnapshot(f"{self.where}/{id}: {what}", path=f"{self.where}/{id}/{name}")
        if expect is not None:
            self._compare(manifest, expect)
        return manifest, self._info(manifest, len(text))

    def _info(self, manifest: Manifest, manifest_bytes: int) -> SnapshotInfo:
        used_s = self._files.used_s(manifest.id)
        return SnapshotInfo(
            id=manifest.id,
            namespace=self.namespace,
            num_tokens=manifest.num_tokens,
            nbytes=manifest_bytes + sum(manifest.files().values()),
            created_s=manifest.created_s,
            last_used_s=manifest.created_s if used_s is None else used_s,
            meta=manifest.meta,
        )

    def _compare(self, manifest: Manifest, expect: Mapping[str, Layout]) -> None:
        found = {array.name: (array.dtype, array.layout) for array in manifest.arrays[1:]}
        wanted = {name: (np.dtype(dtype), tuple(shape)) for name, (dtype, shape) in expect.items()}
        if found != wanted:
            name = min(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            where = f"{self.where}/{manifest.id}"
            raise CorruptSnapshot(f"{where}: {name} is {found.get(name)}, {wanted.get(name)} is expected", path=where)

    def _recover(self, id: str) -> SnapshotInfo | None:
        """The entry's info when it is whole. Leftovers of a crash are removed, broken entries quarantined."""
        with self._lock:
            if id in self._writing:
                return None
        if not _ID.fullmatch(id):
            return None
        try:
            if self._files.committed(id):
                return self._open(id)[1]
            if not self._repair:
                return None
            if self._files.age_s(id) <= self._grace_s:
                log.info("snapshot %s in %s is not committed", id, self.where)
            elif not self._files.committed(id):  # its writer may have been slow, and has finished just now
                log.warning("snapshot %s in %s was never committed and is removed", id, self.where)
                self._files.remove(id)
        except CorruptSnapshot as error:
            self._take_out(id, error)
        except CacheError as error:
            log.warning("snapshot %s is left out: %s", id, error)
        return None

    def _take_out(self, id: str, error: CorruptSnapshot) -> None:
        if isinstance(error.__cause__, BadManifest) and error.__cause__.unknown_version:
            log.warning("snapshot %s is left alone: %s", id, error)
        elif not self._repair:
            self.broken[id] = str(error)
        else:
            try:
                if self._files.committed(id):  # else another process has deleted it meanwhile
                    self.quarantine(id, str(error))
            except CacheError as second:
                log.warning("snapshot %s is left out: %s (%s)", id, error, second)

    def _make_room(self, nbytes: int) -> None:
        if self._max_bytes is None:
            return
        if nbytes > self._max_bytes:
            raise StoreUnavailable(
                f"a snapshot of {nbytes} bytes does not fit {self.where} with its quota of {self._max_bytes} bytes"
            )
        for info in self.list():
            if self.nbytes + nbytes <= self._max_bytes:
                return
            self.delete(info.id)

    def _discard(self, id: str) -> None:
        try:
            self._files.remove(id)
        except StoreUnavailable as error:
            log.warning("the unfinished snapshot %s stays until the next start: %s", id, error)

    def _forget(self, id: str) -> None:
        with self._lock:
            self._index.pop(id, None)
            self._forgotten.add(id)

    def _check_id(self, id: str) -> None:
        if not _ID.fullmatch(id):
            raise CorruptSnapshot(f"{id!r} is no snapshot of {self.where}", path=self.where)


def _token_array(tokens: ArrayLike | Sequence[int]) -> NDArray[np.int32]:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not 1 <= len(ids) <= format_.MAX_TOKENS or ids.dtype.kind not in "iu":
        raise ValueError(f"tokens must be 1 to {format_.MAX_TOKENS} ids, got {ids.dtype}{list(ids.shape)}")
    if ids.dtype != np.int32 and (int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int32).max):
        raise ValueError("tokens must be ids in [0, 2**31 - 1]")
    return np.ascontiguousarray(ids, dtype="<i4")
