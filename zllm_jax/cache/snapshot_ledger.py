"""Who names which chunk file, what that weighs, and which snapshot is worth its bytes least.

Plain bookkeeping without I/O. Not safe for threads: its owner takes turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

RECENT_S = 600.0


@dataclass(frozen=True)
class SnapshotInfo:
    """What the index knows of a snapshot. nbytes: of all files that it needs; times: seconds since the epoch."""

    id: str
    namespace: str
    tenant: str
    num_tokens: int
    nbytes: int
    created_s: float
    last_used_s: float
    meta: Mapping[str, Any]


def value_per_byte(info: SnapshotInfo, freed_bytes: int, now_s: float) -> float:
    """What keeping a snapshot is worth: tokens that a hit saves, less with every ten minutes without one, per byte."""
    age_s = max(0.0, now_s - info.last_used_s)
    return info.num_tokens / (1.0 + age_s / RECENT_S) / max(1, freed_bytes)


@dataclass(slots=True)
class _Chunk:
    """num_owners of the snapshots that name it, and the sum of their numbers: the one's number when there is one."""

    nbytes: int
    num_owners: int = 0
    owners: int = 0


@dataclass(slots=True)
class _Owner:
    """own_bytes: of the manifest and of the chunks that nobody else names."""

    info: SnapshotInfo
    number: int
    manifest_bytes: int
    own_bytes: int
    chunks: tuple[str, ...] = field(repr=False)


class Ledger:
    """The live snapshots, and the sizes of the files that they name, each once.

    version: another number whenever a snapshot has come or gone.
    """

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._chunks: dict[str, _Chunk] = {}
        self._by_number: dict[int, _Owner] = {}
        self._numbers = itertools.count(1)
        self._pins: dict[str, int] = {}
        self.nbytes = 0
        self.version = 0

    def __contains__(self, id: str) -> bool:
        return id in self._owners

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def info(self, id: str) -> SnapshotInfo | None:
        owner = self._owners.get(id)
        return None if owner is None else owner.info

    def infos(self) -> list[SnapshotInfo]:
        return [owner.info for owner in self._owners.values()]

    def update(self, info: SnapshotInfo) -> None:
        """Replace what is known of a live snapshot."""
        if info.id in self._owners:
            self._owners[info.id].info = info

    def add(self, info: SnapshotInfo, chunks: Mapping[str, int], manifest_bytes: int) -> None:
        """A snapshot becomes live. chunks: name -> size of each file that it names."""
        self.version += 1
        owner = _Owner(info, next(self._numbers), manifest_bytes, manifest_bytes, ())
        self._owners[info.id] = self._by_number[owner.number] = owner
        self.nbytes += manifest_bytes
        names = []
        for name, nbytes in chunks.items():
            chunk = self._chunks.setdefault(name, _Chunk(nbytes))
            if chunk.num_owners == 0:
                self.nbytes += nbytes
                owner.own_bytes += nbytes
            elif chunk.num_owners == 1:
                self._by_number[chunk.owners].own_bytes -= nbytes
            chunk.num_owners += 1
            chunk.owners += owner.number
            names.append(name)
        owner.chunks = tuple(names)

    def remove(self, id: str) -> list[str]:
        """A snapshot is no more; the chunks that nobody names or pins any longer."""
        owner = self._owners.pop(id, None)
        if owner is None:
            return []
        self.version += 1
        del self._by_number[owner.number]
        self.nbytes -= owner.manifest_bytes
        for name in owner.chunks:
            chunk = self._chunks[name]
            chunk.num_owners -= 1
            chunk.owners -= owner.number
            if chunk.num_owners == 1:
                self._by_number[chunk.owners].own_bytes += chunk.nbytes
            elif chunk.num_owners == 0:
                self.nbytes -= chunk.nbytes
                del self._chunks[name]
        return self.unused(owner.chunks)

    def chunks(self, id: str) -> tuple[str, ...]:
        """What a live snapshot names; () for another."""
        return self._owners[id].chunks if id in self._owners else ()

    def pin(self, name: str) -> None:
        """Keep a chunk that a snapshot on its way will name."""
        self._pins[name] = self._pins.get(name, 0) + 1

    def unpin(self, names: Iterable[str]) -> None:
        for name in names:
            self._pins[name] -= 1
            if not self._pins[name]:
                del self._pins[name]

    def unused(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that no live snapshot names and none on its way will."""
        return [name for name in names if name not in self._chunks and name not in self._pins]

    def size(self, name: str) -> int | None:
        """Bytes of a chunk that a live snapshot names."""
        chunk = self._chunks.get(name)
        return None if chunk is None else chunk.nbytes

    def naming(self, name: str) -> list[str]:
        """The live snapshots that name a chunk."""
        return [id for id, owner in self._owners.items() if name in owner.chunks]

    def own_bytes(self, id: str) -> int:
        """What removing a live snapshot would free."""
        return self._owners[id].own_bytes

    def cheapest(self, now_s: float, keep: Iterable[str]) -> str | None:
        """The live snapshot that is worth its bytes least, of those not in `keep`."""
        spare = [owner for id, owner in self._owners.items() if id not in keep]
        found = min(spare, key=lambda owner: value_per_byte(owner.info, owner.own_bytes, now_s), default=None)
        return None if found is None else found.info.id
