"""The index of snapshots and the files below it, in step: recovery, other processes, quarantine, quota, collection.

What says "the caller is alone" needs `alone`; the rest may be called from any thread.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

from zllm_jax.cache.manifest import MAX_MANIFEST_BYTES, BadManifest, Manifest, parse, valid_id
from zllm_jax.cache.snapshot_files import CHUNKS, MANIFESTS, Files, Stat
from zllm_jax.cache.snapshot_ledger import Ledger, SnapshotInfo
from zllm_jax.cache.snapshot_reader import ChunkFiles
from zllm_jax.cache.snapshot_writer import chunk_path
from zllm_jax.errors import CacheError, CorruptSnapshot, StoreUnavailable

log = logging.getLogger(__name__)

_OURS = re.compile(r"[0-9a-f]{32}(\.__lock)?")
_HALF = re.compile(r"[0-9a-f]{32}\.__lock")  # TensorStore writes beside the target first
_NOTHING: Mapping[str, Stat] = MappingProxyType({})


@dataclass(frozen=True)
class Underway:
    """A snapshot that is being written: the bytes that it may take more, and its base ("" without)."""

    nbytes: int
    base: str


def manifest_path(id: str) -> str:
    return f"{MANIFESTS}/{id}"


class Shelf:
    """The live snapshots of one namespace. The options are those of `SnapshotStore`.

    lock: of `ledger` and `underway`; taken last, and never held while files are touched.
    broken: id -> reason of what is not whole; with `repair` it is set aside as soon as somebody is `alone`.
    bad: chunk files that somebody found to be other than a manifest says.
    """

    def __init__(self, files: Files, key: str, max_bytes: int | None, grace_s: float, repair: bool) -> None:
        self.files = files
        self.key = key
        self.broken: dict[str, str] = {}
        self.bad: set[str] = set()
        self.lock = threading.Lock()
        self.ledger = Ledger()
        self.underway: dict[str, Underway] = {}
        self._max_bytes, self._grace_s, self._repair = max_bytes, grace_s, repair
        self._turn = threading.Lock()  # one thread at a time changes index and files
        self._undeleted: dict[str, Collection[str]] = {}  # manifests to delete, and what they pin until then
        self._passed: set[str] = set()  # manifests of another version, which may name any chunk
        self._unread: set[str] = set()  # and those that could not be read last time
        self._stamp: object = None
        there = files.list(CHUNKS)
        with self._turn:
            self._refresh(there)
        self._start(there)

    def changed(self) -> bool:
        """Whether somebody else announced a change since the last refresh."""
        return self.files.changes() != self._stamp

    def refresh(self) -> None:
        """See what other processes did; what is new and not whole is left out."""
        with self._turn:
            self._refresh()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Change files while no other thread or process does, knowing what they did before."""
        with self._turn, self.files.exclusive():
            if self.changed():
                self._refresh()
            self._mend()
            try:
                yield
            finally:
                try:
                    self.files.announce()
                    self._stamp = self.files.changes()
                except StoreUnavailable as error:
                    log.warning("other processes learn of a change of %s later: %s", self.files.where, error)

    def open(self, id: str) -> tuple[Manifest, int]:
        """The manifest, checked against the entry's name and the namespace; its size. Raises CacheError."""
        self.check_id(id)
        where = f"{self.files.where}/{manifest_path(id)}"
        data = self.files.read(manifest_path(id), MAX_MANIFEST_BYTES)
        try:
            manifest = parse(data)
        except BadManifest as error:
            raise CorruptSnapshot(f"{where}: {error}", path=where) from error
        if manifest.id != id or manifest.namespace != self.key:
            raise CorruptSnapshot(f"{where} belongs to another snapshot or namespace", path=where)
        return manifest, len(data)

    def check_id(self, id: str) -> None:
        if not valid_id(id):
            raise CorruptSnapshot(f"{id!r} is no snapshot of {self.files.where}", path=self.files.where)

    def over_quota(self) -> bool:
        """Whether what is there and on its way is too much. The caller holds `lock`."""
        taken = self.ledger.nbytes + sum(one.nbytes for one in self.underway.values())
        return self._max_bytes is not None and taken > self._max_bytes

    def make_room(
        self, id: str = "", chunks: Mapping[str, int] = MappingProxyType({}), manifest_bytes: int = 0
    ) -> None:
        """The caller is alone: remove snapshots until all fits the quota; `id`, on its way, takes what is given.

        Raises StoreUnavailable when `id` does not fit beside the bases of what is being written, which stay.
        """
        now_s, new = time.time(), 0
        while True:
            with self.lock:
                if id:
                    new = sum(nbytes for name, nbytes in chunks.items() if self.ledger.size(name) is None)
                    self.underway[id] = replace(self.underway[id], nbytes=new + manifest_bytes)
                bases = {one.base for one in self.underway.values()}
                victim = self.ledger.cheapest(now_s, bases) if self.over_quota() else None
                too_large = (
                    id and self._max_bytes is not None and self.ledger.nbytes + new + manifest_bytes > self._max_bytes
                )
            if victim is None and too_large:
                raise StoreUnavailable(
                    f"snapshot {id} and the bases of what is being written are over {self._max_bytes} bytes, the quota"
                )
            if victim is None:
                return
            log.info("snapshot %s makes room in %s", victim, self.files.where)
            self.remove(victim)

    def remove(self, id: str) -> None:
        """The caller is alone: delete a snapshot's manifest, then the chunks that it alone named."""
        self.condemn(id, self.ledger.chunks(id))
        self._finish_deleting(id)

    def condemn(self, id: str, chunks: Collection[str]) -> None:
        """The caller is alone: a manifest is to go, now or when somebody is alone next; until then it pins chunks."""
        with self.lock:
            self.ledger.remove(id)
            if id not in self._undeleted:
                self._undeleted[id] = tuple(chunks)
                for name in chunks:
                    self.ledger.pin(name)

    def discard(self, written: Collection[str]) -> None:
        """The caller is alone: remove what was written for a snapshot that does not come, unless another needs it."""
        with self.lock:
            unused = self.ledger.unused(written)
        self._delete_chunks(unused)

    def _finish_deleting(self, id: str) -> None:
        self.files.delete(manifest_path(id))
        self._delete_chunks(self._bury(id))

    def _bury(self, id: str) -> Sequence[str]:
        """A condemned manifest is gone: the chunks that nobody names now."""
        with self.lock:
            chunks = self._undeleted.pop(id)
            self.ledger.unpin(chunks)
            return self.ledger.unused(chunks)

    @property
    def _knows_all_names(self) -> bool:
        """Whether no manifest that is left out may name chunks, for other versions, processes or moments."""
        return not (self._passed or self._unread or self.broken)

    def _delete_chunks(self, names: Iterable[str]) -> None:
        """Remove files that no known snapshot names, unless one that is left out may."""
        if not self._knows_all_names:
            log.warning("files stay in %s, whatever its quota: what is left out may need them", self.files.where)
            return
        for name in names:
            self.files.delete(chunk_path(name))

    def admit(self, manifest: Manifest, chunks: Mapping[str, int], manifest_bytes: int, used_s: float) -> SnapshotInfo:
        """List a snapshot that is whole."""
        info = SnapshotInfo(
            id=manifest.id,
            namespace=self.key,
            tenant=manifest.tenant,
            num_tokens=len(manifest.tokens),
            nbytes=manifest_bytes + sum(chunks.values()),
            created_s=manifest.created_s,
            last_used_s=used_s,
            meta=manifest.meta,
        )
        with self.lock:
            self.ledger.add(info, chunks, manifest_bytes)
        return info

    def check_chunk(self, name: str, nbytes: int) -> None:
        """Raises CorruptSnapshot for a chunk that is not there or has another size."""
        found = self.files.stat(chunk_path(name))
        if found is None or found.nbytes not in (None, nbytes):
            self.bad.add(name)
            where = f"{self.files.where}/{chunk_path(name)}"
            there = "no file" if found is None else f"{found.nbytes} bytes"
            raise CorruptSnapshot(f"{where}: there is {there}, the manifest says {nbytes} bytes", path=where)

    def set_aside(self, id: str, reason: str) -> None:
        """The caller is alone: move a manifest and its broken chunks away, and with them whoever names these."""
        try:
            chunks: Sequence[str] = tuple(self.open(id)[0].chunks())
        except CacheError:
            chunks = ()
        bad, also = self._really_bad(id, [name for name in chunks if name in self.bad])
        gone = (id, *also)
        for other in gone:  # to be deleted later, should this fail
            self.condemn(other, self.ledger.chunks(other) or chunks)
        paths = [*map(manifest_path, gone), *map(chunk_path, bad)]
        target = self.files.set_aside(paths, id, reason)
        unused = [name for other in gone for name in self._bury(other)]
        self.bad.difference_update(bad)
        self._delete_chunks(unused)
        log.warning("snapshot %s in %s is out of service (%s): %s", id, self.files.where, target, reason)
        for other in also:
            log.warning("snapshot %s in %s goes too: it needs the same broken file", other, self.files.where)

    def _really_bad(self, id: str, names: Iterable[str]) -> tuple[Sequence[str], Collection[str]]:
        """Those of the files, found bad by a reader of `id`, that are no better for others; and who these others are.

        A chunk is only ever right for a tenant and a place: a manifest may also be wrong in naming it.
        """
        bad, also = [], set[str]()
        for name in names:
            with self.lock:
                others = [other for other in self.ledger.naming(name) if other != id]
            if any(self._serves(other, name) for other in others):
                self.bad.discard(name)
            else:
                bad.append(name)
                also.update(others)
        return bad, also

    def _serves(self, id: str, name: str) -> bool:
        """Whether a chunk file is what a snapshot needs it to be. Raises StoreUnavailable where that cannot be told."""
        try:
            manifest, _ = self.open(id)
            chunks = ChunkFiles(self.files, manifest.tenant, lambda name: None)
            for file in manifest.files():
                if file.name == name:
                    chunks.read(file)
        except CorruptSnapshot:
            return False
        return True

    def sweep(self, there: Mapping[str, Stat]) -> int:
        """The caller is alone: remove files that nobody names and that are old enough; the bytes that they took."""
        freed = 0
        for path in self._orphans(there):
            now = self.files.stat(path)
            if now is not None and self._is_old(now):
                self.files.delete(path)
                freed += now.nbytes or 0
        if freed:
            log.warning("%d bytes that were never committed are removed from %s", freed, self.files.where)
        return freed

    def _refresh(self, there: Mapping[str, Stat] = _NOTHING) -> None:
        """Read new manifests, forget those that are gone. there: chunk files that were seen."""
        stamp = self.files.changes()
        found = {id: stat for id, stat in self.files.list(MANIFESTS).items() if valid_id(id)}
        with self.lock:
            known = {info.id: info for info in self.ledger.infos()}
            for id in known.keys() - found.keys():
                self.ledger.remove(id)
            for id in known.keys() & found.keys():
                used_s = found[id].changed_s
                if used_s is not None and used_s > known[id].last_used_s:
                    self.ledger.update(replace(known[id], last_used_s=used_s))
        self._passed &= found.keys()
        self.broken = {id: reason for id, reason in self.broken.items() if id in found}
        self._unread.clear()
        for id in found.keys() - known.keys() - self._passed - self.broken.keys() - self._undeleted.keys():
            self._look_at(id, found[id], there)
        self._stamp = stamp

    def _look_at(self, id: str, found: Stat, there: Mapping[str, Stat]) -> None:
        """List a snapshot when it is whole, drop it with a reason when it is not."""
        try:
            manifest, manifest_bytes = self.open(id)
            chunks = manifest.chunks()
            for name, nbytes in chunks.items():
                with self.lock:
                    known = self.ledger.size(name)
                if known != nbytes and (name not in there or there[name].nbytes != nbytes):
                    self.check_chunk(name, nbytes)
        except CacheError as error:
            if isinstance(error, CorruptSnapshot):
                self._leave_out(id, error)
            else:
                self._unread.add(id)
            log.warning("snapshot %s is left out: %s", id, error)
        else:
            used_s = manifest.created_s if found.changed_s is None else found.changed_s
            self.admit(manifest, chunks, manifest_bytes, used_s)

    def _leave_out(self, id: str, error: CorruptSnapshot) -> None:
        if isinstance(error.__cause__, BadManifest) and error.__cause__.unknown_version:
            self._passed.add(id)
        else:
            self.broken[id] = str(error)

    def _mend(self) -> None:
        """The caller is alone: delete what could not be deleted, set aside what is broken unless it is whole by now."""
        for id in list(self._undeleted):
            try:
                self._finish_deleting(id)
            except CacheError as error:
                log.warning("snapshot %s is not deleted yet: %s", id, error)
        for id in list(self.broken) if self._repair else ():
            reason = self.broken.pop(id)
            try:
                found = self.files.stat(manifest_path(id))
                if found is not None:
                    self._look_at(id, found, _NOTHING)
                if id in self.broken:
                    self.set_aside(id, self.broken.pop(id))
            except CacheError as error:
                log.warning("snapshot %s is left where it is: %s", id, error)
                self.broken[id] = reason

    def _start(self, there: Mapping[str, Stat]) -> None:
        """After the first look: speak of what an older version left, collect what crashes left."""
        try:
            old = [name for name in self.files.list("") if valid_id(name)]
            if old:
                log.warning("%d snapshots of version 1 in %s are left alone: remove them", len(old), self.files.where)
            if self._repair and (self.broken or self._orphans(there)):
                with self.alone():
                    self._refresh()
                    self.sweep(there)
        except StoreUnavailable as error:
            log.warning("what crashes left in %s stays: %s", self.files.where, error)

    def _orphans(self, there: Mapping[str, Stat]) -> Sequence[str]:
        """The paths of chunk files that nobody names, and of half-written files, that are old enough."""
        if not self._knows_all_names:
            return ()
        with self.lock:
            unused = self.ledger.unused(name for name in there if _OURS.fullmatch(name))
        found = {chunk_path(name): there[name] for name in unused}
        manifests = self.files.list(MANIFESTS).items()
        found |= {manifest_path(name): stat for name, stat in manifests if _HALF.fullmatch(name)}
        return [path for path, stat in found.items() if self._is_old(stat)]

    def _is_old(self, found: Stat) -> bool:
        if found.nbytes == -1:
            return False
        return self._grace_s == 0 if found.changed_s is None else found.changed_s <= time.time() - self._grace_s
