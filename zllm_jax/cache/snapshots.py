"""The second tier as the cache looks at it: which snapshots there are, by their tokens; a failure is a miss."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from zllm_jax.buffers import RowLayout
from zllm_jax.cache.index import Match, PrefixIndex
from zllm_jax.cache.snapshot import Base, SnapshotInfo, SnapshotReader, SnapshotStore
from zllm_jax.errors import CacheError, CorruptSnapshot, StoreStalled

log = logging.getLogger(__name__)

REST_S = 30.0  # how long a snapshot that could not be read is left alone, and all of them when the store hangs


class Snapshots:
    """What `store` holds, to be looked up. All but `open` belong to the device's thread.

    truncatable: whether a state may be cut at any token.
    """

    def __init__(self, store: SnapshotStore, *, truncatable: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._truncatable, self._clock = truncatable, clock
        self._thread = ThreadPoolExecutor(1, "zllm-tidy")  # deletes and quarantines, which may have to wait for a lock
        self._hangs_until = clock()
        self._leaving: dict[str, Future[None]] = {}
        self._held: Counter[str] = Counter()
        self._doomed: set[str] = set()  # to be deleted when nobody holds them
        self._index = PrefixIndex()
        self._meta: dict[str, Mapping[str, Any]] = {}
        self._resting: dict[str, float] = {}
        self._replaced: dict[str, Base] = {}  # by which snapshot, and how many of its first rows are the same
        self.sync()

    def __contains__(self, id: str) -> bool:
        return id in self._index

    def __iter__(self) -> Iterator[str]:
        return (str(key) for key in self._index)

    @property
    def index_bytes(self) -> int:
        return self._index.nbytes

    def tokens(self, id: str) -> np.ndarray:
        return self._index.tokens(id)

    def meta(self, id: str) -> Mapping[str, Any]:
        return self._meta[id]

    def look(self) -> None:
        """Note what other processes committed or deleted; costs one stat when they did not."""
        now = self._clock()
        rested = any(until <= now for until in self._resting.values())
        try:
            if self.store.changed():
                if self.store.refresh(wait=False):
                    self.sync()
            elif rested or any(work.done() for work in self._leaving.values()):
                self.sync()
        except CacheError as error:
            log.warning("the snapshots in %s cannot be listed: %s", self.store.where, error)

    def sync(self) -> None:
        """Index what the store lists, forget what it does not."""
        now = self._clock()
        self._resting = {id: until for id, until in self._resting.items() if until > now}
        self._leaving = {id: work for id, work in self._leaving.items() if not work.done()}
        there = {info.id: info for info in self.store.list()}
        for id in [id for id in self if id not in there]:
            self.forget(id)
        for id, info in there.items():
            if not (id in self._index or id in self._resting or id in self._leaving or id in self._doomed):
                try:
                    self.add(info, self.store.tokens(id))
                except CacheError as error:
                    self.fail(id, error)

    def add(self, info: SnapshotInfo, tokens: np.ndarray) -> None:
        if info.id not in self._index:
            self._index.add(info.id, tokens, info.tenant)
            self._meta[info.id] = info.meta

    def longest(self, prompt: np.ndarray, tenant: str) -> Match | None:
        """The longest common prefix, whether or not it can be reused."""
        return self._index.longest(prompt, tenant)

    def usable(self, prompt: np.ndarray, tenant: str) -> Match | None:
        """The longest prefix that can be reused."""
        if self._clock() < self._hangs_until:
            return None
        return (self._index.longest if self._truncatable else self._index.longest_whole)(prompt, tenant)

    def base(self, base: Base | None) -> Base | None:
        """The same rows in a snapshot that is still there; None when no such is known."""
        while base is not None and base.id not in self._index:
            heir = self._replaced.get(base.id)
            base = Base(heir.id, min(base.num_tokens, heir.num_tokens)) if heir is not None else None
        return base

    def supersede(self, info: SnapshotInfo, tokens: np.ndarray, base: Base | None) -> None:
        """Delete the snapshots whose every use the new one serves as well."""
        for key in self._index.prefixes_of(tokens, info.tenant):
            old = str(key)
            same = len(self._index.tokens(key)) == len(tokens)
            if old != info.id and (self._truncatable or same):
                if base is not None and base.id == old:
                    self._replaced[old] = Base(info.id, base.num_tokens)
                self.delete(old)

    def open(self, id: str, tokens: np.ndarray, layout: RowLayout) -> SnapshotReader:
        """A reader of the snapshot that was indexed with `tokens`. Any thread. Raises CacheError."""
        reader = self.store.reader(id, layout)
        if not np.array_equal(reader.tokens, tokens):
            reader.close()
            raise CorruptSnapshot(f"snapshot {id} holds other tokens than when it was indexed")
        return reader

    def fail(self, id: str, error: CacheError) -> None:
        """A snapshot that could not be read: out of the index, for good when it is broken."""
        log.warning("snapshot %s is a miss: %s", id, error)
        if isinstance(error, StoreStalled):
            self._hangs_until = self._clock() + REST_S
            return
        self.forget(id)
        if not isinstance(error, CorruptSnapshot):
            self._resting[id] = self._clock() + REST_S
            return
        self._leaving[id] = self._thread.submit(self._quarantine, id, str(error))

    def hold(self, id: str) -> None:
        """Keep the files of a snapshot while it is being restored, even when a longer one takes its place."""
        self._held[id] += 1

    def release(self, id: str) -> None:
        self._held[id] -= 1
        if not self._held[id]:
            del self._held[id]
            if id in self._doomed:
                self._doomed.remove(id)
                self.delete(id)

    def delete(self, id: str) -> None:
        """Out of the index now, off the disk soon."""
        self.forget(id)
        if id in self._held:
            self._doomed.add(id)
        else:
            self._leaving[id] = self._thread.submit(self._delete, id)

    def settle(self) -> None:
        """Wait for what is being deleted."""
        for work in self._leaving.values():
            work.result()
        self.sync()

    def close(self) -> None:
        """End the threads; what is being deleted is."""
        self._thread.shutdown(wait=True)
        self.store.close()

    def _quarantine(self, id: str, reason: str) -> None:
        try:
            self.store.quarantine(id, reason)
        except CacheError as error:
            log.warning("snapshot %s could not be quarantined: %s", id, error)

    def _delete(self, id: str) -> None:
        try:
            self.store.delete(id)
        except CacheError as error:
            log.warning("snapshot %s stays on disk: %s", id, error)

    def forget(self, id: str) -> None:
        if id in self._index:
            self._index.remove(id)
            del self._meta[id]
