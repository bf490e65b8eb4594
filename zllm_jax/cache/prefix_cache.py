"""The two-tier prefix cache: what finished sequences computed stays on the device, and moves to disk under pressure.

All methods run on the thread that owns the backend. A failure of the second tier is logged and becomes a miss.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from zllm_jax.cache.index import Match, PrefixIndex
from zllm_jax.cache.pool import Pool
from zllm_jax.cache.rates import Rates
from zllm_jax.cache.snapshot import SnapshotStore, StateArray
from zllm_jax.errors import CacheError, CorruptSnapshot
from zllm_jax.values import Tier

if TYPE_CHECKING:
    from zllm_jax.runtime import Backend  # importing it would bring jax to those who only list snapshots

log = logging.getLogger(__name__)


@dataclass
class Lease:
    """The state of one running sequence: its pages, its ring, and what it did not have to compute.

    pages: enough for prompt and max_tokens. cached_tokens: rows that are there already.
    """

    pages: list[int]
    ring: int
    cached_tokens: int = 0
    tier: Tier = Tier.COLD
    bytes_read: int = 0
    bytes_copied: int = 0


@dataclass
class Resident:
    """A finished conversation in device memory."""

    id: str
    tokens: np.ndarray
    pages: list[int]
    ring: int | None
    last_used: int


@dataclass
class Counters:
    """Every request is counted, whatever it hit."""

    hits: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    cached_tokens: int = 0
    prompt_tokens: int = 0
    evictions: int = 0
    dropped: int = 0
    failed_restores: int = 0
    failed_saves: int = 0
    bytes_written: int = 0
    bytes_read: int = 0


class PrefixCache:
    """Looks prompts up, leases pages, keeps finished states, evicts the least recently used.

    store: the second tier, or None.
    """

    def __init__(self, backend: Backend, store: SnapshotStore | None) -> None:
        self._backend, self._store = backend, store
        self._capacity = backend.capacity
        self._pages, self._rings = Pool(self._capacity.num_pages), Pool(self._capacity.num_rings)
        self._residents: dict[str, Resident] = {}
        self._on_device, self._on_disk = PrefixIndex(), PrefixIndex()
        self._leases = 0
        self._clock = itertools.count()
        self._names = itertools.count(1)
        self.rates = Rates()
        self.counters = Counters()
        self._index_store()

    def acquire(self, prompt: np.ndarray, max_tokens: int, *, look_up: bool = True) -> Lease | None:
        """Pages for a prompt i32[S] and its output, with the longest known prefix already in them.

        None when running sequences hold too much memory: try again after one has finished. A prefix of the whole
        prompt is cut by a token, because the last one must be computed to predict the next.
        """
        wanted = -(-(len(prompt) + max_tokens) // self._capacity.page_tokens)
        while True:
            hit = self._look_up(prompt) if look_up else None
            if hit is None:
                lease = self._lease_cold(wanted)
            elif hit[0] is Tier.RESIDENT:
                lease = self._lease_resident(hit[1], wanted)
                if lease is None and self._leases == 0:
                    self._evict(self._residents[str(hit[1].key)])  # it stands in its own continuation's way
                    continue
            else:
                lease = self._lease_restored(hit[1], wanted)
                if lease is None and hit[1].key not in self._on_disk:
                    continue  # the snapshot was bad and is gone: look again
            if lease is not None:
                self._leases += 1
                self._count(prompt, lease)
            return lease

    def finish(self, lease: Lease, tokens: np.ndarray) -> str | None:
        """Keep the state of `tokens` i32[S] (exactly the rows that are in the lease). Returns its id."""
        if len(tokens) == 0:
            self.abort(lease)
            return None
        self._leases -= 1
        used = -(-len(tokens) // self._capacity.page_tokens)
        self._pages.release(lease.pages[used:])
        for key in self._superseded(self._on_device, tokens):
            self._drop(self._residents[str(key)])
        ring = lease.ring if self._capacity.num_rings else None
        one = Resident(f"c{next(self._names)}", tokens, lease.pages[:used], ring, next(self._clock))
        self._residents[one.id] = one
        self._on_device.add(one.id, tokens)
        return one.id

    def abort(self, lease: Lease) -> None:
        """Return everything of a lease whose state is not worth keeping."""
        self._leases -= 1
        self._return(lease)

    def evict(self) -> int:
        """Move every resident conversation to disk; returns the bytes written. What cannot be saved is dropped."""
        before = self.counters.bytes_written
        for one in self._by_age():
            self._evict(one)
        return self.counters.bytes_written - before

    def forget(self) -> None:
        """Drop both tiers."""
        for one in self._by_age():
            self._drop(one)
        if self._store is None:
            return
        for info in self._store.list():
            self._forget_snapshot(info.id)
            self._delete(self._store, info.id)

    def drop_page_cache(self) -> bool:
        """Ask the operating system to forget its copies of the snapshots; False where it cannot."""
        try:
            return self._store is not None and all(self._store.drop_page_cache(info.id) for info in self._store.list())
        except (CacheError, OSError):  # another process removed one
            return False

    def report(self) -> dict[str, Any]:
        """What is where, in bytes and tokens; JSON-able."""
        c = self._capacity
        held = c.num_pages - self._pages.free
        return {
            "resident": [
                {"id": one.id, "tokens": len(one.tokens), "pages": len(one.pages)}
                for one in list(self._residents.values())
            ],
            "disk": [
                {"id": info.id, "tokens": info.num_tokens, "bytes": info.nbytes}
                for info in (self._store.list() if self._store else ())
            ],
            "device_bytes": held * c.page_bytes + (self._rings.size - self._rings.free) * c.ring_bytes,
            "device_budget_bytes": c.num_pages * c.page_bytes + self._rings.size * c.ring_bytes,
            "disk_bytes": self._store.nbytes if self._store else 0,
            "pages": {"total": c.num_pages, "free": self._pages.free, "tokens": c.page_tokens},
            "rings": {"total": self._rings.size, "free": self._rings.free},
            "hits": {tier.value: count for tier, count in self.counters.hits.items()},
            "counters": {name: value for name, value in vars(self.counters).items() if isinstance(value, int)},
        }

    # -- look-up ---------------------------------------------------------------------------------------------------

    def _look_up(self, prompt: np.ndarray) -> tuple[Tier, Match] | None:
        """The longest verified prefix; a longer one on disk wins when reading it beats computing the difference."""
        usable = prompt[:-1]
        near, far = self._match(self._on_device, usable), self._match(self._on_disk, usable)
        if far is not None and (near is None or far.common > near.common):
            here = near.common if near is not None else 0
            if self.rates.restoring_wins(self._state_bytes(far.common), far.common - here):
                return Tier.DISK, far
        return (Tier.RESIDENT, near) if near is not None else None

    def _state_bytes(self, num_tokens: int) -> int:
        c = self._capacity
        return -(-num_tokens // c.page_tokens) * c.page_bytes + c.ring_bytes

    def _match(self, index: PrefixIndex, prompt: np.ndarray) -> Match | None:
        return index.longest(prompt) if self._capacity.truncatable else index.longest_whole(prompt)

    def _superseded(self, index: PrefixIndex, tokens: np.ndarray) -> list[Hashable]:
        """The states whose every use one of `tokens` serves as well: its prefixes, or only its equals with a ring."""
        found = index.prefixes_of(tokens)
        return found if self._capacity.truncatable else [key for key in found if len(index.tokens(key)) == len(tokens)]

    # -- leases ----------------------------------------------------------------------------------------------------

    def _lease_cold(self, wanted: int) -> Lease | None:
        if not self._make_room(wanted, keep=None):
            return None
        return Lease(self._pages.take(wanted), self._take_ring())

    def _lease_resident(self, match: Match, wanted: int) -> Lease | None:
        one = self._residents[str(match.key)]
        whole, rest = divmod(match.common, self._capacity.page_tokens)
        if not self._make_room(wanted - whole, keep=one):
            return None
        one.last_used = next(self._clock)
        shared = one.pages[:whole]
        self._pages.share(shared)
        lease = Lease([*shared, *self._pages.take(wanted - whole)], self._take_ring(), match.common, Tier.RESIDENT)
        with self._returned_on_failure(lease):
            if rest:  # the page is written further on: copy it, the conversation keeps its own
                self._backend.copy_page(one.pages[whole], lease.pages[whole])
                lease.bytes_copied += self._capacity.page_bytes
            if one.ring is not None:
                self._backend.copy_ring(one.ring, lease.ring)
                lease.bytes_copied += self._capacity.ring_bytes
        return lease

    def _lease_restored(self, match: Match, wanted: int) -> Lease | None:
        """Read the snapshot into fresh pages; a failure removes it and returns None."""
        if self._store is None or not self._make_room(wanted, keep=None) or match.key not in self._on_disk:
            return None  # what moved to disk to make room may have superseded it, or the quota removed it
        lease = Lease(self._pages.take(wanted), self._take_ring(), match.common, Tier.DISK)
        key = str(match.key)
        try:
            with self._returned_on_failure(lease):
                self._restore(key, lease, self._store)
        except CacheError as error:
            self._fail_restore(key, error)
            return None
        return lease

    def _restore(self, key: str, lease: Lease, store: SnapshotStore) -> None:
        """A snapshot into the pages of a lease. Raises CacheError; then they hold anything."""
        start = time.perf_counter()
        expect = {name: (dtype, shape) for name, (dtype, shape, _) in self._backend.row_layout.items()}
        used = -(-lease.cached_tokens // self._capacity.page_tokens)
        with store.reading(key, expect=expect) as rows:
            if not np.array_equal(rows.tokens(), self._on_disk.tokens(key)):
                raise CorruptSnapshot(f"snapshot {key} holds other tokens than when it was indexed")
            lease.bytes_copied = self._backend.write(rows, lease.pages[:used], lease.ring)
        lease.bytes_read = rows.bytes_read
        self.counters.bytes_read += rows.bytes_read
        self.rates.restored(rows.bytes_read, time.perf_counter() - start)

    @contextmanager
    def _returned_on_failure(self, lease: Lease) -> Iterator[None]:
        """A device call that fails must not keep the pages of a lease that nobody gets."""
        try:
            yield
        except BaseException:
            self._return(lease)
            raise

    def _return(self, lease: Lease) -> None:
        self._pages.release(lease.pages)
        self._release_ring(lease.ring)

    def _fail_restore(self, key: str, error: CacheError) -> None:
        log.warning("snapshot %s is a miss: %s", key, error)
        self.counters.failed_restores += 1
        self._forget_snapshot(key)
        if isinstance(error, CorruptSnapshot) and self._store is not None:
            try:
                self._store.quarantine(key, str(error))
            except CacheError as second:
                log.warning("snapshot %s could not be quarantined: %s", key, second)

    def _count(self, prompt: np.ndarray, lease: Lease) -> None:
        self.counters.hits[lease.tier] += 1
        self.counters.cached_tokens += lease.cached_tokens
        self.counters.prompt_tokens += len(prompt)

    # -- room ------------------------------------------------------------------------------------------------------

    def _make_room(self, pages: int, keep: Resident | None) -> bool:
        """Evict, least recently used first, until `pages` pages and a ring are free."""
        need_ring = 1 if self._capacity.num_rings else 0
        for one in self._by_age():
            if self._pages.free >= pages and self._rings.free >= need_ring:
                return True
            if one is not keep:
                self._evict(one)
        return self._pages.free >= pages and self._rings.free >= need_ring

    def _by_age(self) -> list[Resident]:
        return sorted(self._residents.values(), key=lambda one: one.last_used)

    def _evict(self, one: Resident) -> None:
        self.counters.evictions += 1
        if self._store is None or not self._save(one, self._store):
            self.counters.dropped += 1
        self._drop(one)

    def _save(self, one: Resident, store: SnapshotStore) -> bool:
        layout = self._backend.row_layout
        rows = self._backend.read(one.pages, one.ring or 0, len(one.tokens))
        arrays = {name: StateArray(value, layout[name][2]) for name, value in rows.items()}
        try:
            info = store.save(one.tokens, arrays)
        except CacheError as error:
            log.warning("conversation %s is dropped, its state could not be saved: %s", one.id, error)
            self.counters.failed_saves += 1
            self._reconcile(store)
            return False
        self.counters.bytes_written += info.nbytes
        older = self._superseded(self._on_disk, one.tokens)
        self._on_disk.add(info.id, one.tokens)
        for key in older:
            self._forget_snapshot(str(key))
            self._delete(store, str(key))
        self._reconcile(store)
        return True

    def _delete(self, store: SnapshotStore, key: str) -> None:
        try:
            store.delete(key)
        except CacheError as error:
            log.warning("snapshot %s stays on disk: %s", key, error)

    def _reconcile(self, store: SnapshotStore) -> None:
        """The store's quota may have removed older snapshots."""
        there = {info.id for info in store.list()}
        for key in [key for key in self._on_disk if key not in there]:
            self._forget_snapshot(str(key))

    def _drop(self, one: Resident) -> None:
        del self._residents[one.id]
        self._on_device.remove(one.id)
        self._pages.release(one.pages)
        if one.ring is not None:
            self._release_ring(one.ring)

    def _forget_snapshot(self, key: str) -> None:
        if key in self._on_disk:
            self._on_disk.remove(key)

    def _index_store(self) -> None:
        """After a start: whatever is listed can be looked up, or is dropped with a reason."""
        for info in self._store.list() if self._store is not None else ():
            try:
                self._on_disk.add(info.id, self._store.tokens(info.id))  # type: ignore[union-attr]
            except CacheError as error:
                self._fail_restore(info.id, error)

    def _take_ring(self) -> int:
        return self._rings.take(1)[0] if self._capacity.num_rings else 0

    def _release_ring(self, ring: int) -> None:
        if self._capacity.num_rings:
            self._rings.release([ring])
