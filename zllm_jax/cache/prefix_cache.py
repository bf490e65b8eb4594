"""The two-tier prefix cache: what finished sequences computed stays on the device, and moves to disk under pressure.

All methods run on the thread that owns the backend, and none of them waits for a disk, except `evict`, `forget`,
`save` and `close`, which say so. A failure of the second tier is logged and becomes a miss.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from zllm_jax.cache.evictor import Evictor
from zllm_jax.cache.index import Match
from zllm_jax.cache.lease import Counters, Lease
from zllm_jax.cache.look_up import LookUp
from zllm_jax.cache.policy import CostAware, Policy
from zllm_jax.cache.rates import Rates
from zllm_jax.cache.residents import Resident, Residents
from zllm_jax.cache.restore import Restoring, Rooms
from zllm_jax.cache.saver import Saver
from zllm_jax.cache.snapshot import Base, SnapshotStore
from zllm_jax.cache.snapshots import Snapshots
from zllm_jax.errors import CacheError, StoreStalled
from zllm_jax.metrics import Metrics
from zllm_jax.values import Tier

if TYPE_CHECKING:
    from zllm_jax.runtime import Backend  # importing it would bring jax to those who only list snapshots

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


class PrefixCache:
    """Looks prompts up, leases pages, keeps finished states, moves to disk what `policy` says is worth least.

    store: the second tier, or None. prefix_rounds: of a state that cannot be cut, how many earlier turns of a
    conversation stay reusable. staged: a restored stage may compute before the others are there.

    Its attribute `wake` is called from any thread when `advance` may get further.
    """

    def __init__(
        self,
        backend: Backend,
        store: SnapshotStore | None,
        *,
        policy: Policy | None = None,
        prefix_rounds: int = 1,
        staged: bool = True,
        metrics: Metrics | None = None,
    ) -> None:
        self._backend, self._capacity, self._prefix_rounds = backend, backend.capacity, prefix_rounds
        self.staged = staged
        self._residents = Residents(self._capacity)
        self._threads = ThreadPoolExecutor(2, "zllm-restore")
        self._rooms = Rooms(backend.row_layout, self._capacity.group_tokens)
        self._snapshots: Snapshots | None = None
        self._saver: Saver | None = None
        if store is not None:
            self._snapshots = Snapshots(store, truncatable=self._capacity.truncatable)
            self._saver = Saver(backend, store, lambda: self.wake())
        self._leases = 0
        self.metrics = metrics or Metrics()
        self.rates, self.counters = Rates(), Counters()
        self._evictor = Evictor(
            self._residents,
            self._snapshots,
            self._saver,
            policy or CostAware(),
            state_bytes=self._capacity.state_bytes,
            rates=self.rates,
            counters=self.counters,
            metrics=self.metrics,
        )
        self._look_up = LookUp(self._residents, self._snapshots, self._capacity, self.rates)
        self.wake: Callable[[], None] = lambda: None
        self.metrics.watch("zllm_device_state_bytes", "State in device memory", lambda: self.device_bytes)
        self.metrics.watch("zllm_disk_state_bytes", "Files of the second tier", lambda: self.disk_bytes)
        self.metrics.watch("zllm_resident_conversations", "In device memory", lambda: len(self._residents))

    @property
    def device_bytes(self) -> int:
        """Of the pages and rings that somebody holds."""
        c, pages, rings = self._capacity, self._residents.pages, self._residents.rings
        return (pages.size - pages.free) * c.page_bytes + (rings.size - rings.free) * c.ring_bytes

    @property
    def disk_bytes(self) -> int:
        """Of the files of all snapshots, each once."""
        return self._snapshots.store.nbytes if self._snapshots is not None else 0

    @property
    def patience_ends(self) -> float | None:
        """When, on `time.perf_counter`, `advance` gives up on a store that takes nothing; None without a save."""
        return self._saver.hangs_at if self._saver is not None else None

    @property
    def meta_of(self) -> Callable[[np.ndarray], Mapping[str, Any]]:
        """What to keep with the snapshot of a state, by its tokens; JSON-able."""
        return self._evictor.meta_of

    @meta_of.setter
    def meta_of(self, meta_of: Callable[[np.ndarray], Mapping[str, Any]]) -> None:
        self._evictor.meta_of = meta_of

    # -- leases ----------------------------------------------------------------------------------------------------

    def acquire(
        self,
        prompt: np.ndarray,
        max_tokens: int,
        *,
        look_up: bool = True,
        tenant: str = "",
        conversation: str | None = None,
        after: str = "no_prefix",
    ) -> Lease | None:
        """Pages for a prompt i32[S] and its output, with the longest known prefix in them or on its way there.

        None while there is not enough memory: try again after a sequence has ended or `advance` got further. A prefix
        of the whole prompt is cut by a token, because the last one must be computed to predict the next.
        conversation: a hint, which of two equal prefixes to take. after: why nothing can be reused, if that is so.
        """
        wanted = -(-(len(prompt) + max_tokens) // self._capacity.page_tokens)
        owner = tenant_key(tenant)
        if not look_up:
            return self._leased(self._lease_cold(wanted, owner, "off"), prompt)
        if self._snapshots is not None:
            self._snapshots.look()
        while True:
            match, tier, predicted = self._look_up.longest(prompt, owner, conversation)
            if match is None:
                lease = self._lease_cold(wanted, owner, "not_faster" if predicted is not None else after)
            elif tier is Tier.RESIDENT:
                lease = self._lease_resident(match, wanted, owner)
            else:
                lease = self._lease_restored(match, wanted, owner)
            if lease is None and match is not None and not self._look_up.knows(match, tier):
                continue  # what makes room may take away the very state that was found
            if lease is not None:
                lease.predicted = predicted
                if predicted is not None and not predicted.restoring_wins:
                    self.rates.doubt()
                lease.near_miss = self._look_up.near_miss(prompt, owner, lease.cached_tokens)
                if lease.near_miss is not None:
                    self.metrics.near_miss()
            return self._leased(lease, prompt)

    def advance(self) -> bool:
        """Take the background writing further and free what is saved; whether something was. Waits for nothing."""
        return self._evictor.advance()

    def restored(self, lease: Lease) -> None:
        """The rows of a lease are all on the device, or on their way there before whatever is called next."""
        assert lease.restoring is not None
        lease.bytes_read, lease.bytes_copied = lease.restoring.bytes_read, lease.restoring.bytes_copied
        self._end_restore(lease)
        self._count(lease)
        self.counters.bytes_read += lease.bytes_read

    def measured(self, lease: Lease, seconds: float) -> None:
        """By how much a restore delayed the first token: what the next one is predicted from."""
        self.rates.restored(lease.bytes_read, seconds)
        predicted_s = lease.predicted.restore_s if lease.predicted is not None else None
        self.metrics.restored(predicted_s, seconds, lease.bytes_read, lease.cached_tokens)

    def failed(self, lease: Lease, error: CacheError) -> None:
        """The snapshot of a lease could not be restored: it is out of the index, and the lease is gone."""
        assert self._snapshots is not None
        assert lease.base is not None
        self.counters.failed_restores += 1
        if lease.base.id in self._snapshots or isinstance(error, StoreStalled):
            self._snapshots.fail(lease.base.id, error)
        lease.counted = True  # its request looks up again
        self.abort(lease)

    def checkpoint(self, lease: Lease, tokens: np.ndarray) -> None:
        """Keep the state within a prompt, after whole pages of `tokens`, when a ring is free: it can then be reused."""
        whole, rest = divmod(len(tokens), self._capacity.page_tokens)
        if rest or not self._residents.rings.free:
            return
        if any(len(one.tokens) == len(tokens) for one in self._residents.prefixes_of(tokens, lease.tenant)):
            return
        (ring,) = self._residents.rings.take(1)
        try:
            self._backend.copy_ring(lease.ring, ring)
        except BaseException:
            self._residents.rings.release([ring])
            raise
        pages = lease.pages[:whole]
        self._residents.pages.share(pages)
        self._keep(lease, tokens, pages, ring, turn_end=False)

    def share(self, lease: Lease, prompt: np.ndarray) -> None:
        """Let others reuse the prompt i32[S] of a lease that goes on, if its state can be cut there.

        The page that the lease writes further on is copied, or left out while none is free. Of a state with rings,
        others find its checkpoints.
        """
        whole, rest = divmod(len(prompt), self._capacity.page_tokens)
        pages, tokens = lease.pages[:whole], prompt
        if not (rest and self._residents.pages.free):
            tokens, rest = prompt[: whole * self._capacity.page_tokens], 0
        known = self._residents.longest(tokens, lease.tenant)
        if not len(tokens) or not self._capacity.truncatable or (known is not None and known.common == len(tokens)):
            return
        self._residents.pages.share(pages)
        if rest:
            (copy,) = self._residents.pages.take(1)
            pages = [*pages, copy]
            with self._released_on_failure(pages):
                self._backend.copy_page(lease.pages[whole], copy)
        self._keep(lease, tokens, pages, None, turn_end=False)

    def finish(self, lease: Lease, tokens: np.ndarray) -> str | None:
        """Keep the state of `tokens` i32[S] (exactly the rows that are in the lease). Returns its id."""
        if len(tokens) == 0 or lease.restoring is not None:
            self.abort(lease)
            return None
        self._leases -= 1
        used = -(-len(tokens) // self._capacity.page_tokens)
        self._residents.pages.release(lease.pages[used:])
        for one in self._superseded(tokens, lease.tenant):
            self._residents.drop(one)
        ring = lease.ring if self._capacity.num_rings else None
        return self._keep(lease, tokens, lease.pages[:used], ring, turn_end=True).id

    def abort(self, lease: Lease) -> None:
        """Return everything of a lease whose state is not worth keeping."""
        self._leases -= 1
        self._count(lease)
        self._end_restore(lease)
        self._return(lease)

    # -- for the operator: these wait ------------------------------------------------------------------------------

    def evict(self) -> int:
        """Move every resident conversation to disk; returns the bytes written. What cannot be saved is dropped."""
        before = self.counters.bytes_written
        for one in self._evictor.by_worth():
            self._evictor.evict(one)
        self._evictor.drain()
        if self._snapshots is not None:
            self._snapshots.settle()
        return self.counters.bytes_written - before

    def save(self, progress: Progress | None = None) -> int:
        """Write every resident conversation that is not on disk yet, and keep it; returns how many were written."""
        if self._snapshots is None:
            return 0
        for one in self._residents:
            self._evictor.check(one)
        todo = [one for one in self._residents if one.saved is None]
        for i, one in enumerate(todo):
            if progress is not None:
                progress("save conversations", i, len(todo))
            if one.here:
                self._save(one)
        if progress is not None and todo:
            progress("save conversations", len(todo), len(todo))
        return sum(one.saved is not None for one in todo)

    def _save(self, one: Resident) -> None:
        """One that cannot be saved takes no other with it."""
        try:
            self._evictor.save(one)
            self._evictor.drain()
        except Exception as error:
            self.counters.failed_saves += 1
            log.warning("conversation %s could not be saved: %s: %s", one.id, type(error).__name__, error)

    def forget(self, *, keep_disk: bool = False) -> None:
        """Drop both tiers, or only what is in device memory: unsaved."""
        if not keep_disk:
            self._evictor.give_up()
        self._evictor.drain()
        for one in self._residents:
            self._residents.drop(one)
        if self._snapshots is not None and not keep_disk:
            self._snapshots.look_well()
            for id in list(self._snapshots):
                self._snapshots.delete(id)
            self._snapshots.settle()

    def drop_page_cache(self) -> bool:
        """Ask the operating system to forget its copies of the snapshots; False where it cannot."""
        if self._snapshots is None:
            return False
        store = self._snapshots.store
        try:
            return all(store.drop_page_cache(info.id) for info in store.list())
        except (CacheError, OSError):  # another process removed one
            return False

    def close(self) -> None:
        """End the threads. What is being saved is given up; `save` first."""
        if self._saver is not None:
            self._saver.close()
        self._threads.shutdown(wait=True)
        try:
            self._rooms.settle()
        finally:
            if self._snapshots is not None:
                self._snapshots.close()

    def stored(self) -> Iterator[tuple[np.ndarray, Mapping[str, Any]]]:
        """Tokens and meta of every snapshot."""
        for id in self._snapshots or ():
            assert self._snapshots is not None
            yield self._snapshots.tokens(id), self._snapshots.meta(id)

    def report(self) -> dict[str, Any]:
        """What is where, in bytes and tokens; JSON-able."""
        c, pages, rings = self._capacity, self._residents.pages, self._residents.rings
        store = self._snapshots.store if self._snapshots is not None else None
        return {
            "resident": [
                {
                    "id": one.id,
                    "tokens": len(one.tokens),
                    "pages": len(one.pages),
                    "page_ids": list(one.pages),
                    "on_disk": one.saved is not None,
                }
                for one in self._residents
            ],
            "disk": [
                {"id": info.id, "tokens": info.num_tokens, "bytes": info.nbytes}
                for info in (store.list() if store is not None else ())
            ],
            "device_bytes": self.device_bytes,
            "device_budget_bytes": pages.size * c.page_bytes + rings.size * c.ring_bytes,
            "disk_bytes": self.disk_bytes,
            "saving": self._saver.pending if self._saver is not None else 0,
            "buffers": {"in_use": self._rooms.in_use},
            "leases": self._leases,
            "pages": {"total": pages.size, "free": pages.free, "tokens": c.page_tokens},
            "rings": {"total": rings.size, "free": rings.free},
            "hits": {tier.value: count for tier, count in self.counters.hits.items()},
            "counters": {name: value for name, value in vars(self.counters).items() if isinstance(value, int)},
        }

    # -- how a lease comes and goes --------------------------------------------------------------------------------

    def _leased(self, lease: Lease | None, prompt: np.ndarray) -> Lease | None:
        if lease is None:
            return None
        self._leases += 1
        lease.prompt_tokens = len(prompt)
        if lease.restoring is None:
            self._count(lease)
        return lease

    def _count(self, lease: Lease) -> None:
        """Every request is counted once, when it is known what it hit."""
        if lease.counted:
            return
        lease.counted = True
        self.counters.hits[lease.tier] += 1
        self.counters.cached_tokens += lease.cached_tokens
        self.counters.prompt_tokens += lease.prompt_tokens
        self.metrics.looked_up(lease.tier, lease.reason, lease.prompt_tokens, lease.cached_tokens)

    def _lease_cold(self, wanted: int, tenant: str, reason: str) -> Lease | None:
        if not self._evictor.make_room(wanted, keep=None):
            return None
        return Lease(self._residents.pages.take(wanted), self._take_ring(), tenant, reason=reason)

    def _lease_resident(self, match: Match, wanted: int, tenant: str) -> Lease | None:
        one = self._residents.get(str(match.key))
        assert one is not None
        whole, rest = divmod(match.common, self._capacity.page_tokens)
        if not self._evictor.make_room(wanted - whole, keep=one):
            if self._leases == 0 and not self._evictor.coming():
                self._evictor.evict(one)  # it stands in its own continuation's way
            return None
        one.last_used, one.uses = self._residents.tick(), one.uses + 1
        shared = one.pages[:whole]
        self._residents.pages.share(shared)
        pages = [*shared, *self._residents.pages.take(wanted - whole)]
        lease = Lease(pages, self._take_ring(), tenant, match.common, Tier.RESIDENT, source=one)
        with self._returned_on_failure(lease):
            if rest:  # the page is written further on: copy it, the conversation keeps its own
                self._backend.copy_page(one.pages[whole], lease.pages[whole])
                lease.bytes_copied += self._capacity.page_bytes
            if one.ring is not None:
                self._backend.copy_ring(one.ring, lease.ring)
                lease.bytes_copied += self._capacity.ring_bytes
        return lease

    def _lease_restored(self, match: Match, wanted: int, tenant: str) -> Lease | None:
        """Fresh pages, and a snapshot on its way into them."""
        snapshots = self._snapshots
        assert snapshots is not None
        id = str(match.key)
        if not self._evictor.make_room(wanted, keep=None) or id not in snapshots:
            return None
        lease = Lease(self._residents.pages.take(wanted), self._take_ring(), tenant, match.common, Tier.DISK)
        lease.base = Base(id, match.common)
        snapshots.hold(id)
        tokens, layout = snapshots.tokens(id), self._backend.row_layout
        used = -(-match.common // self._capacity.page_tokens)
        lease.restoring = Restoring(
            self._backend,
            self._rooms,
            self._threads,
            lambda: snapshots.open(id, tokens, layout),
            lease.pages[:used],
            lease.ring,
            match.common,
            lambda: self.wake(),
            self.staged,
        )
        return lease

    def _end_restore(self, lease: Lease) -> None:
        if lease.restoring is None:
            return
        lease.restoring.close()
        lease.restoring = None
        assert self._snapshots is not None
        assert lease.base is not None
        self._snapshots.release(lease.base.id)

    @contextmanager
    def _returned_on_failure(self, lease: Lease) -> Iterator[None]:
        """A device call that fails must not keep the pages of a lease that nobody gets."""
        try:
            yield
        except BaseException:
            self._return(lease)
            raise

    @contextmanager
    def _released_on_failure(self, pages: list[int]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._residents.pages.release(pages)
            raise

    def _return(self, lease: Lease) -> None:
        self._residents.release(lease.pages, lease.ring if self._capacity.num_rings else None)

    def _keep(
        self, lease: Lease, tokens: np.ndarray, pages: list[int], ring: int | None, *, turn_end: bool
    ) -> Resident:
        now, source = self._residents.tick(), lease.source
        base = source.base_for(lease.cached_tokens) if source is not None else lease.base
        id = f"c{secrets.token_hex(8)}"
        one = Resident(id, tokens, pages, ring, lease.tenant, now, now, base=base, turn_end=turn_end)
        if source is not None:  # what continues a conversation is as old and as much used as that is
            one.created, one.uses = source.created, source.uses
        self._residents.add(one)
        return one

    def _superseded(self, tokens: np.ndarray, tenant: str) -> list[Resident]:
        """The states whose every use one of `tokens` serves as well, or which are too many rounds back."""
        prefixes = self._residents.prefixes_of(tokens, tenant)
        if self._capacity.truncatable:
            return prefixes
        earlier = sorted((one for one in prefixes if len(one.tokens) < len(tokens)), key=lambda one: -len(one.tokens))
        turns = [one for one in earlier if one.turn_end]
        return [one for one in prefixes if len(one.tokens) == len(tokens)] + turns[self._prefix_rounds :]

    def _take_ring(self) -> int:
        return self._residents.rings.take(1)[0] if self._capacity.num_rings else 0


def tenant_key(tenant: str) -> str:
    """What stands for a tenant in indexes and files: not its name."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32] if tenant else ""
