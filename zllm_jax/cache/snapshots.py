"""The second tier as the cache looks at it: which snapshots there are, by their tokens; a failure is a miss."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from zllm_jax.buffers import RowLayout
from zllm_jax.cache.index import Match, PrefixIndex
from zllm_jax.cache.snapshot import Base, SnapshotInfo, SnapshotReader, SnapshotStore
from zllm_jax.errors import CacheError, CorruptSnapshot, StoreStalled

log = logging.getLogger(__name__)

PATIENCE_S = 30.0  # of an operator
LOOK_S = 0.005  # how long a look at the store is waited for; one that takes longer counts for a later request
REST_S = 30.0  # how long a snapshot that could not be read is left alone, and all of them when the store hangs


@dataclass(frozen=True)
class _Seen:
    """What a look at the store found that was not in the index: tokens i32[S], or why they cannot be read."""

    version: int
    found: Mapping[str, np.ndarray | CacheError]


class Snapshots:
    """What `store` holds, to be looked up. All but `open` belong to the device's thread, which waits for no file.

    truncatable: whether a state may be cut at any token.
    """

    def __init__(self, store: SnapshotStore, *, truncatable: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._truncatable, self._clock = truncatable, clock
        self._thread = ThreadPoolExecutor(1, "zllm-tidy")  # deletes and quarantines, which may have to wait for a lock
        self._eyes = ThreadPoolExecutor(1, "zllm-look")
        self._looking: Future[_Seen | None] | None = None
        self._version = -1  # of the store's list when it was last looked at
        self._hangs_until = clock()
        self._leaving: dict[str, Future[bool]] = {}
        self._held: Counter[str] = Counter()
        self._doomed: set[str] = set()  # to be deleted when nobody holds them
        self._index = PrefixIndex()
        self._meta: dict[str, Mapping[str, Any]] = {}
        self._resting: dict[str, float] = {}
        self._replaced: dict[str, Base] = {}  # by which snapshot, and how many of its first rows are the same
        self.look_well()

    def __contains__(self, id: str) -> bool:
        return id in self._index

    def __iter__(self) -> Iterator[str]:
        return (str(key) for key in self._index)

    def tokens(self, id: str) -> np.ndarray:
        return self._index.tokens(id)

    def meta(self, id: str) -> Mapping[str, Any]:
        return self._meta[id]

    def look(self) -> None:
        """Note what other processes, and this one's threads, committed or deleted: now, or later if it takes long."""
        self._look(0.0, LOOK_S)

    def look_well(self) -> None:
        """The same, with patience."""
        self._look(PATIENCE_S, PATIENCE_S)

    def _look(self, old_s: float, new_s: float) -> None:
        """End the look that is under way, then look anew: what an old one saw may be long ago."""
        if self._looking is not None:
            self._end_look(old_s)
        if self._looking is None:
            self._begin_look()
            self._end_look(new_s)

    def _begin_look(self) -> None:
        now, again = self._clock(), False
        for id, work in list(self._leaving.items()):
            if work.done():
                del self._leaving[id]
                again = True
                if not work.result():
                    self._resting[id] = now + REST_S
        for id, until in list(self._resting.items()):
            if until <= now:
                del self._resting[id]
                again = True
        skip = {*self._resting, *self._leaving, *self._doomed}
        self._looking = self._eyes.submit(self._see, skip, -1 if again else self._version)

    def _end_look(self, wait_s: float) -> None:
        assert self._looking is not None
        if not wait([self._looking], wait_s).done:
            return
        looking, self._looking = self._looking, None
        try:
            seen = looking.result()
        except CacheError as error:
            log.warning("the snapshots in %s cannot be listed: %s", self.store.where, error)
        else:
            if seen is not None:
                self._note(seen)

    def _see(self, skip: Collection[str], version: int) -> _Seen | None:
        """Runs in its own thread. None when the store's list is still that of `version`."""
        if self.store.changed():
            self.store.refresh()
        if self.store.version == version:
            return None
        version, found = self.store.version, dict[str, np.ndarray | CacheError]()
        for info in self.store.list():
            if info.id not in self._index and info.id not in skip:
                try:
                    found[info.id] = self.store.tokens(info.id)
                except CacheError as error:
                    found[info.id] = error
        return _Seen(version, found)

    def _note(self, seen: _Seen) -> None:
        self._version = seen.version
        there = self.forget_gone()
        for id, tokens in seen.found.items():
            if id not in there or id in self._index or id in self._resting or id in self._leaving or id in self._doomed:
                continue
            if isinstance(tokens, CacheError):
                self.fail(id, tokens)
            else:
                self.add(there[id], tokens)

    def forget_gone(self) -> Mapping[str, SnapshotInfo]:
        """Forget what the store lists no more; what it lists. Touches no file."""
        there = {info.id: info for info in self.store.list()}
        for id in [id for id in self if id not in there]:
            self.forget(id)
        return there

    def add(self, info: SnapshotInfo, tokens: np.ndarray) -> None:
        if info.id not in self._index:
            self._index.add(info.id, tokens, info.tenant)
            self._meta[info.id] = info.meta

    def longest(self, prompt: np.ndarray, tenant: str) -> Match | None:
        """The longest common prefix, whether or not it can be reused."""
        return self._index.longest(prompt, tenant)

    def usable(self, prompt: np.ndarray, tenant: str) -> Match | None:
        """The longest prefix that can be reused; none while the store hangs."""
        return self._reusable(prompt, tenant) if self._clock() >= self._hangs_until else None

    def holds(self, tokens: np.ndarray, tenant: str) -> bool:
        """Whether all of a state is there: as it is, or in one that goes on from it."""
        found = self._reusable(tokens, tenant)
        return found is not None and found.common == len(tokens)

    def _reusable(self, prompt: np.ndarray, tenant: str) -> Match | None:
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
        """Wait, with patience, for what is being deleted."""
        wait(self._leaving.values(), PATIENCE_S)
        self.look_well()

    def close(self) -> None:
        """End the threads; what is being deleted is."""
        self._thread.shutdown(wait=True)
        self._eyes.shutdown(wait=True)
        self.store.close()

    def _quarantine(self, id: str, reason: str) -> bool:
        try:
            self.store.quarantine(id, reason)
        except CacheError as error:
            log.warning("snapshot %s could not be quarantined: %s", id, error)
            return False
        return True

    def _delete(self, id: str) -> bool:
        try:
            self.store.delete(id)
        except CacheError as error:
            log.warning("snapshot %s stays on disk: %s", id, error)
            return False
        return True

    def forget(self, id: str) -> None:
        if id in self._index:
            self._index.remove(id)
            del self._meta[id]
