"""The second tier: states of conversations on disk, committed whole, verified when read.

Chunk files are named after their content, so turns and forks of a conversation share them. A manifest, written last,
makes a snapshot exist: what has one is whole, and what has none is not there. Nothing here knows what the arrays mean.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from zllm_jax.buffers import RowLayout
from zllm_jax.cache.manifest import MAX_CHUNK_TOKENS, Manifest
from zllm_jax.cache.snapshot_files import CHUNKS, Files, open_files
from zllm_jax.cache.snapshot_layout import MAX_TOKENS, Piece, missing_pieces, shared_pieces
from zllm_jax.cache.snapshot_ledger import SnapshotInfo
from zllm_jax.cache.snapshot_reader import ChunkFiles, Filling, SnapshotReader
from zllm_jax.cache.snapshot_shelf import Shelf, Underway, manifest_path
from zllm_jax.cache.snapshot_writer import SnapshotWriter, chunk_path
from zllm_jax.errors import CacheError, CorruptSnapshot, StoreUnavailable

__all__ = ["Base", "Filling", "SnapshotInfo", "SnapshotReader", "SnapshotStore", "SnapshotWriter"]

log = logging.getLogger(__name__)

READERS = 4
Collects = list[str]  # `list` is a method below
_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Base:
    """The first num_tokens rows of a new state are, bit for bit, those of snapshot `id`."""

    id: str
    num_tokens: int


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

    root: a folder, a URL that TensorStore opens as a kvstore (`memory://`, `s3://bucket/path`), or its `Files`.
    namespace: the identity of the states (weights, layout, dtype), or its key; others are never seen.
    chunk_tokens: tokens a chunk file. max_bytes: quota; what is worth its bytes least makes room.
    grace_s: how old a chunk file that nobody names must be to count as left by a crash rather than being written.
    repair: False changes nothing on disk when opened: what is broken is listed in `broken` (id -> reason) instead.

    The index is rebuilt from the files here, and follows them in `refresh`; what is not whole is dropped with a logged
    reason. Methods may be called from any thread; several processes may share a folder (of other kvstores: one writes).
    Raises StoreUnavailable when the root cannot be listed.
    """

    def __init__(
        self,
        root: str | Path | Files,
        *,
        namespace: str,
        chunk_tokens: int = 128,
        max_bytes: int | None = None,
        grace_s: float = 3600.0,
        repair: bool = True,
    ) -> None:
        if not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
            raise ValueError(f"chunk_tokens is {chunk_tokens}, must be in [1, {MAX_CHUNK_TOKENS}]")
        self.namespace = namespace
        key = namespace_key(namespace)
        self._files = open_files(root, key) if isinstance(root, str | Path) else root
        self._chunk_tokens = chunk_tokens
        self._max_bytes = max_bytes
        self._shelf = Shelf(self._files, key, max_bytes, grace_s, repair)
        self._threads = ThreadPoolExecutor(READERS, "snapshot-read")

    @property
    def where(self) -> str:
        """The folder or URL of this namespace."""
        return self._files.where

    @property
    def nbytes(self) -> int:
        """Bytes of all files that live snapshots name, each once, and of their manifests."""
        with self._shelf.lock:
            return self._shelf.ledger.nbytes

    @property
    def broken(self) -> Mapping[str, str]:
        """Id -> reason of what is not whole and, with `repair`, not set aside yet."""
        return self._shelf.broken

    def list(self) -> list[SnapshotInfo]:
        """The whole snapshots, least recently used first."""
        with self._shelf.lock:
            return sorted(self._shelf.ledger.infos(), key=lambda info: info.last_used_s)

    def own_bytes(self, id: str) -> int:
        """Bytes that deleting a listed snapshot would free, the rest is shared with others; 0 when it is not listed."""
        with self._shelf.lock:
            return self._shelf.ledger.own_bytes(id) if id in self._shelf.ledger else 0

    def changed(self) -> bool:
        """Whether another process committed or deleted something since the last `refresh`. Cheap."""
        return self._shelf.changed()

    @property
    def version(self) -> int:
        """Another number whenever what `list` says has come or gone. Touches no file."""
        return self._shelf.ledger.version

    def refresh(self) -> None:
        """See what other processes committed or deleted; what is new and not whole is left out."""
        self._shelf.refresh()

    def writer(
        self,
        tokens: ArrayLike,
        layout: RowLayout,
        *,
        base: Base | None = None,
        tenant: str = "",
        meta: Mapping[str, Any] | None = None,
    ) -> SnapshotWriter:
        """Begin to save a state of tokens i32[S]. meta: JSON values, kept with the snapshot.

        base: a snapshot to share files with; one that is gone or does not fit is done without.
        Raises ValueError for what cannot be stored; StoreUnavailable when the store fails or the quota is too small.
        """
        ids = _token_array(tokens)
        draft = Manifest(
            id=secrets.token_hex(16),
            namespace=self._shelf.key,
            tenant=tenant,
            created_s=time.time(),
            chunk_tokens=self._chunk_tokens,
            layout=dict(layout),
            pieces=(),
            fixed=(),
            meta=dict(meta or {}),
            tokens=ids,
        )
        stages = draft.stages
        manifest_bytes = len(draft.encode())  # a meta that is not JSON fails before anything is written
        held: Collects = []
        try:
            kept = self._share(draft, base, held)
            missing = missing_pieces(kept, len(ids), self._chunk_tokens)
            new_rows = sum(stop - start for start, stop in missing)
            needed = manifest_bytes + sum(new_rows * stage.row_bytes + stage.fixed_bytes for stage in stages)
            shared = sum(piece.rows * stage.row_bytes for piece in kept for stage in stages)
            self._reserve(draft.id, needed, shared, base.id if kept and base is not None else "")
        except BaseException:
            self._let_go(draft.id, held)
            raise
        return SnapshotWriter(self._files, self, draft, kept, missing, held)

    def reader(self, id: str, layout: RowLayout) -> SnapshotReader:
        """Open a snapshot to read what is wanted of it; leave its `with`, or close it.

        layout: the arrays that must be there, no more and no less.
        Raises CorruptSnapshot when any check fails (`quarantine` it), StoreUnavailable when the store cannot be read.
        """
        manifest, nbytes = self._shelf.open(id)
        _compare(manifest, layout, f"{self.where}/{manifest_path(id)}")
        self._files.touch(manifest_path(id))
        with self._shelf.lock:
            if (info := self._shelf.ledger.info(id)) is not None:
                self._shelf.ledger.update(replace(info, last_used_s=time.time()))
        return SnapshotReader(self._files, manifest, nbytes, self._threads, self._shelf.bad.add)

    def tokens(self, id: str) -> NDArray[np.int32]:
        """The verified token ids i32[S] of a snapshot. Raises as `reader` does."""
        return self._shelf.open(id)[0].tokens

    def verify(self, id: str) -> None:
        """Read and check everything. Raises as `reader` does."""
        manifest, _ = self._shelf.open(id)
        chunks = ChunkFiles(self._files, manifest.tenant, self._shelf.bad.add)
        for file in manifest.files():
            chunks.read(file)

    def delete(self, id: str) -> None:
        """Remove a snapshot and what nobody else names; one that is gone is no error. Raises StoreUnavailable."""
        self._shelf.check_id(id)
        with self._shelf.alone():
            self._shelf.remove(id)

    def quarantine(self, id: str, reason: str) -> None:
        """Take a snapshot out of service, and the files of it that were found broken, with all that name them.

        The last few manifests and broken files are kept with the reason, for a look.
        """
        self._shelf.check_id(id)
        with self._shelf.alone():
            self._shelf.set_aside(id, reason)

    def gc(self) -> int:
        """Remove chunk files that nobody names, when older than grace_s, and what is over the quota; bytes freed."""
        with self._shelf.alone():
            freed = self._shelf.sweep(self._files.list(CHUNKS))
            before = self.nbytes
            self._shelf.make_room()
            return freed + before - self.nbytes

    def drop_page_cache(self, id: str) -> bool:
        """Ask the operating system to forget the files' cached pages; False where it cannot be asked."""
        names = self._shelf.open(id)[0].chunks()
        return [self._files.drop_page_cache(chunk_path(name)) for name in names] == [True] * len(names)

    def close(self) -> None:
        """End the store's threads; reads under way are finished. Reading is over then."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    # -- what a writer asks for ------------------------------------------------------------------------------------

    def hold(self, name: str, nbytes: int) -> bool:
        """See `Home`."""
        with self._shelf.lock:
            self._shelf.ledger.pin(name)
            bad = name in self._shelf.bad
        try:
            found = self._files.stat(chunk_path(name))
        except BaseException:
            with self._shelf.lock:
                self._shelf.ledger.unpin([name])
            raise
        if bad or found is None or found.nbytes not in (None, nbytes):
            return False
        self._files.touch(chunk_path(name))
        return True

    def commit(self, manifest: Manifest, held: Sequence[str]) -> SnapshotInfo:
        """See `Home`."""
        chunks, data = manifest.chunks(), manifest.encode()
        with self._shelf.alone():
            try:
                for name, nbytes in chunks.items():
                    self._shelf.check_chunk(name, nbytes)
            except CorruptSnapshot as error:
                raise StoreUnavailable(f"a file to share has gone, write without a base: {error}") from error
            self._shelf.make_room(manifest.id, chunks, len(data))
            try:
                self._files.write(manifest_path(manifest.id), data).wait()
            except StoreUnavailable:  # after the rename, perhaps
                self._shelf.condemn(manifest.id, chunks)
                raise
            info = self._shelf.admit(manifest, chunks, len(data), manifest.created_s)
            self._shelf.bad.difference_update(chunks)
            self._let_go(manifest.id, held)
        return info

    def abandon(self, id: str, held: Sequence[str], written: Collection[str]) -> None:
        """See `Home`."""
        self._let_go(id, held)
        if not held:
            return
        try:
            with self._shelf.alone():
                self._shelf.discard(written)
        except CacheError as error:
            log.warning("files of the unfinished snapshot %s stay until they are collected: %s", id, error)

    def _let_go(self, id: str, held: Sequence[str]) -> None:
        with self._shelf.lock:
            self._shelf.underway.pop(id, None)
            self._shelf.ledger.unpin(held)

    def _share(self, draft: Manifest, base: Base | None, held: Collects) -> Sequence[Piece]:
        """The pieces that a new state takes over from its base; the names of their files, pinned, go to `held`."""
        if base is None:
            return ()
        try:
            old, _ = self._shelf.open(base.id)
        except CorruptSnapshot as error:
            log.warning("a snapshot is written without its base: %s", error)
            return ()
        if not 0 <= base.num_tokens <= min(len(old.tokens), len(draft.tokens)):
            raise ValueError(
                f"base.num_tokens is {base.num_tokens}, of {len(old.tokens)} and {len(draft.tokens)} tokens"
            )
        if not np.array_equal(old.tokens[: base.num_tokens], draft.tokens[: base.num_tokens]):
            raise ValueError(f"the first {base.num_tokens} tokens are not those of snapshot {base.id}")
        paged = [{n: s for n, s in one.layout.items() if s.token_axis is not None} for one in (old, draft)]
        if (old.tenant, old.chunk_tokens, paged[0]) != (draft.tenant, draft.chunk_tokens, paged[1]):
            return ()
        sizes = old.chunks()
        alive = []
        for piece in (piece for piece in old.pieces if piece.start < base.num_tokens):
            there = True
            for name in piece.chunks:
                there &= self.hold(name, sizes[name])
                held.append(name)
            if there:
                alive.append(piece)
        return shared_pieces(alive, base.num_tokens, len(draft.tokens), self._chunk_tokens)

    def _reserve(self, id: str, needed: int, shared: int, base: str) -> None:
        """Make room for the bytes that a snapshot on its way may take, though not by removing its base."""
        if self._max_bytes is not None and needed + shared > self._max_bytes:
            raise StoreUnavailable(
                f"a snapshot of {needed + shared} bytes is over the quota of {self.where}, {self._max_bytes} bytes"
            )
        with self._shelf.lock:
            self._shelf.underway[id] = Underway(needed, base)
            over = self._shelf.over_quota()
        if over:
            with self._shelf.alone():
                self._shelf.make_room()


def _compare(manifest: Manifest, layout: RowLayout, where: str) -> None:
    if manifest.layout != dict(layout):
        names = manifest.layout.keys() | layout.keys()
        name = min(name for name in names if manifest.layout.get(name) != layout.get(name))
        found, wanted = manifest.layout.get(name), layout.get(name)
        raise CorruptSnapshot(f"{where}: {name} is {found}, {wanted} is expected", path=where)


def _token_array(tokens: ArrayLike | Sequence[int]) -> NDArray[np.int32]:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not 1 <= len(ids) <= MAX_TOKENS or ids.dtype.kind not in "iu":
        raise ValueError(f"tokens must be 1 to {MAX_TOKENS} ids, got {ids.dtype}{list(ids.shape)}")
    if ids.dtype != np.int32 and (int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int32).max):
        raise ValueError("tokens must be ids in [0, 2**31 - 1]")
    return np.array(ids, np.int32)
