"""Who leaves device memory, and how: dropped where the disk has it already, else saved in the background first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zllm_jax.cache.lease import Counters
from zllm_jax.cache.policy import Policy
from zllm_jax.cache.rates import Rates
from zllm_jax.cache.residents import Resident, Residents
from zllm_jax.cache.saver import Saved, Saver
from zllm_jax.cache.snapshots import Snapshots
from zllm_jax.metrics import Metrics

log = logging.getLogger(__name__)

WRITE_AHEAD = 0.25  # below this share of free pages, conversations are saved before their pages are wanted


class Evictor:
    """Makes room among `residents`, in the order of `policy`.

    saver, snapshots: the second tier, or None both. state_bytes: bytes of a state of so many tokens.
    meta_of: what to keep with a snapshot, by its tokens.
    """

    def __init__(
        self,
        residents: Residents,
        snapshots: Snapshots | None,
        saver: Saver | None,
        policy: Policy,
        *,
        state_bytes: Callable[[int], int],
        rates: Rates,
        counters: Counters,
        metrics: Metrics,
    ) -> None:
        self._residents, self._snapshots, self._saver, self._policy = residents, snapshots, saver, policy
        self._state_bytes, self._rates, self._counters, self._metrics = state_bytes, rates, counters, metrics
        self.meta_of: Callable[[np.ndarray], Mapping[str, Any]] = lambda tokens: {}

    def make_room(self, pages: int, keep: Resident | None) -> bool:
        """Whether `pages` pages and a ring are free. If not, what is worth least begins to leave, but not `keep`."""
        residents = self._residents
        rings = 1 if residents.rings.size else 0
        if residents.has_room(pages, rings):
            return True
        if not self._can_make_room(pages, rings, keep):
            return False
        for one in self.by_worth():
            if residents.pages.free + self.coming() >= pages and residents.rings.free + self._rings_coming() >= rings:
                break
            if one is not keep and not one.leaving:
                self.evict(one)
        return residents.has_room(pages, rings)

    def _can_make_room(self, pages: int, rings: int, keep: Resident | None) -> bool:
        """Whether it would suffice that all but `keep` leave; else nobody needs to."""
        others = [one for one in self._residents if one is not keep]
        held = sum(one.ring is not None for one in others)
        residents = self._residents
        return residents.pages.free + self._freed_by(others) >= pages and residents.rings.free + held >= rings

    def coming(self) -> int:
        """How many more pages will be free when all that is leaving has left."""
        return self._freed_by([one for one in self._residents if one.leaving])

    def _freed_by(self, leaving: list[Resident]) -> int:
        """How many pages nobody else holds."""
        held: dict[int, int] = {}
        for one in leaving:
            for page in one.pages:
                held[page] = held.get(page, 0) + 1
        return sum(self._residents.pages.owners(page) == count for page, count in held.items())

    def _rings_coming(self) -> int:
        return sum(one.leaving and one.ring is not None for one in self._residents)

    def by_worth(self) -> list[Resident]:
        """What is in device memory, the best victim first."""
        found = self._policy.order(self._residents.candidates(self._saved_s), self._residents.clock)
        return [one for candidate in found if (one := self._residents.get(str(candidate.key))) is not None]

    def _saved_s(self, one: Resident, exclusive_tokens: int) -> float:
        """Seconds that a next use is faster for its being here: what would be restored, or computed, otherwise."""
        nbytes = self._state_bytes(exclusive_tokens) if self._snapshots is not None else None
        length = len(one.tokens)
        return self._rates.seconds_back(nbytes, max(0, length - exclusive_tokens), length)

    def evict(self, one: Resident) -> None:
        """Let a conversation leave: at once when it is on disk or nothing can save it, else when it is saved."""
        one.leaving = True
        self.check(one)
        if one.saved is not None:
            self._leave(one, "clean")
        elif self._saver is None or self._saver.hangs:
            self._leave(one, "dropped")
        else:
            self.save(one)

    def save(self, one: Resident) -> None:
        """Begin to write a conversation to disk, unless that is under way."""
        assert self._saver is not None
        assert self._snapshots is not None
        if one in self._saver:
            return
        one.base = self._snapshots.base(one.base)
        self._saver.begin(one, self._meta(one))

    def _meta(self, one: Resident) -> Mapping[str, Any]:
        try:
            return self.meta_of(one.tokens)
        except Exception as error:  # what belongs to it is no reason to lose it
            log.warning("conversation %s is saved without its turns: %s", one.id, error)
            return {}

    def check(self, one: Resident) -> None:
        """Forget that a conversation was saved when the disk has it no longer: not it, nor one that goes on from it."""
        if one.saved is None or self._snapshots is None:
            return
        if not self._snapshots.holds(one.tokens, one.tenant):
            one.saved = None

    def advance(self) -> bool:
        """Take the saves further and save ahead while little is free; whether one has ended. Waits for nothing."""
        if self._saver is None:
            return False
        ended = self._saver.advance()
        for saved in ended:
            self._note(saved)
        dropped = self._drop_if_hanging(self._saver)
        pages = self._residents.pages
        short = pages.free < WRITE_AHEAD * pages.size and not self._saver.pending
        if short and any(one.savable for one in self._residents):
            self.save(next(one for one in self.by_worth() if one.savable))
        return bool(ended) or dropped

    def _drop_if_hanging(self, saver: Saver) -> bool:
        """Whether conversations had to leave unsaved, because those who need their room would wait for ever."""
        leaving = [one for one in self._residents if one.leaving] if saver.hangs else []
        for one in leaving:
            log.warning("conversation %s is dropped: the store has taken nothing for a long time", one.id)
            self._leave(one, "dropped")
        return bool(leaving)

    def give_up(self) -> None:
        """Nothing that is being saved is wanted any more."""
        if self._saver is not None:
            self._saver.give_up()

    def drain(self) -> None:
        """Wait until nothing is being saved, or the store hangs."""
        while self._saver is not None:
            for saved in self._saver.advance():
                self._note(saved)
            if not self._saver.pending or self._saver.hangs:
                self._drop_if_hanging(self._saver)
                return
            self._saver.wait()

    def _note(self, saved: Saved) -> None:
        one, info = saved.one, saved.info
        assert self._snapshots is not None
        if saved.unwanted:
            if info is not None:
                self._snapshots.delete(info.id)
            return
        if info is None:
            if one.here and saved.error is not None:
                self._note_unsaved(one, saved.error)
            return
        self._counters.bytes_written += saved.bytes_written
        self._metrics.written(saved.bytes_written, saved.seconds)
        one.saved = info.id
        self._snapshots.add(info, one.tokens)
        self._snapshots.supersede(info, one.tokens, one.base)
        self._snapshots.forget_gone()  # the quota may have removed older ones
        if one.here and one.leaving:
            self._leave(one, "saved")

    def _note_unsaved(self, one: Resident, error: Exception) -> None:
        self._counters.failed_saves += 1
        if one.base is not None:  # what it shared may be gone: write all of it
            one.base = None
            self.save(one)
            return
        one.unsavable = True
        log.warning("conversation %s could not be saved: %s", one.id, error)
        if one.leaving:
            self._leave(one, "dropped")

    def _leave(self, one: Resident, outcome: str) -> None:
        self._counters.evictions += 1
        self._counters.dropped += outcome == "dropped"
        self._metrics.evicted(outcome, self._residents.exclusive_bytes(one))
        self._residents.drop(one)
