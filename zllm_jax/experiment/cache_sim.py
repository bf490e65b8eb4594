"""The two-tier cache without arrays: who keeps which pages, what a request finds, what goes to disk.

Tokens, look-ups, page counts and policies are those of the cache room; only time and bytes come from rates.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zllm_jax.cache.index import Match, PrefixIndex
from zllm_jax.cache.policy import Candidate, Policy
from zllm_jax.cache.pool import Pool
from zllm_jax.errors import ConfigError
from zllm_jax.experiment.traces import Ask, Trace
from zllm_jax.values import Tier


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured rates. Computing the token at position p takes `prefill_token_s + p * prefill_position_s`."""

    prefill_token_s: float
    prefill_position_s: float
    restore_bytes_s: float
    write_bytes_s: float
    token_bytes: int

    def __post_init__(self) -> None:
        for name in ("prefill_token_s", "restore_bytes_s", "write_bytes_s", "token_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"costs.{name} is {getattr(self, name)}, must be positive")

    def prefill_s(self, start: int, stop: int) -> float:
        """Seconds for the tokens [start, stop) of a prompt."""
        return self.prefill_token_s * (stop - start) + self.prefill_position_s * (stop**2 - start**2) / 2

    def restore_s(self, num_tokens: int) -> float:
        return num_tokens * self.token_bytes / self.restore_bytes_s


@dataclass(frozen=True)
class Served:
    """What one request got. gained_tokens: those of `cached_tokens` that the disk had and memory had not."""

    tier: Tier
    prompt_tokens: int
    cached_tokens: int
    gained_tokens: int
    restore_s: float
    prefill_s: float
    written_bytes: int
    source: int | None

    @property
    def ttft_s(self) -> float:
        """Without a queue: what the request itself needs."""
        return self.restore_s + self.prefill_s


@dataclass(eq=False)
class State:
    """A kept conversation. id: the number of the request that made it. base: the snapshot that has its first units."""

    id: int
    units: np.ndarray
    pages: list[int]
    created: int
    last_used: int
    uses: int = 0
    base: tuple[int, int] | None = None
    saved: int | None = None


class Pages:
    """A pool, and for each holder how many pages only it holds, without walking them.

    For each page the exclusive or of its holders' ids is kept: with one holder left, that is its id.
    """

    def __init__(self, size: int) -> None:
        self._pool = Pool(size)
        self._holders = [0] * size
        self._born = [0] * size
        self.exclusive: dict[int, int] = {}
        self.last_used: dict[tuple[int, int], int] = {}

    @property
    def size(self) -> int:
        return self._pool.size

    @property
    def free(self) -> int:
        return self._pool.free

    def owners(self, page: int) -> int:
        return self._pool.owners(page)

    def take(self, count: int, holder: int) -> list[int]:
        taken = self._pool.take(count)
        for page in taken:
            self._holders[page] = self._born[page] = holder
        self.exclusive[holder] = self.exclusive.get(holder, 0) + count
        return taken

    def use(self, pages: Sequence[int], now: int) -> None:
        """Note that a later request needed them; a page that was given back and taken again is another page."""
        for page in pages:
            self.last_used[page, self._born[page]] = now

    def share(self, pages: Sequence[int], holder: int) -> None:
        for page in pages:
            if self._pool.owners(page) == 1:
                self.exclusive[self._holders[page]] -= 1
            self._holders[page] ^= holder
        self._pool.share(pages)

    def release(self, pages: Sequence[int], holder: int) -> None:
        """Give back all that `holder` holds."""
        self._pool.release(pages)
        for page in pages:
            self._holders[page] ^= holder
            if self._pool.owners(page) == 1:
                self.exclusive[self._holders[page]] += 1
        del self.exclusive[holder]


class Simulation:
    """One engine that serves one request after the other.

    num_pages, page_units: memory, in pages of so many ids. disk: whether what is evicted is written and can be
    restored; the disk is never full. match_units: prefixes are found in whole blocks of so many ids.
    """

    def __init__(
        self,
        trace: Trace,
        costs: Costs,
        policy: Policy,
        *,
        num_pages: int,
        page_units: int,
        disk: bool,
        match_units: int = 1,
    ) -> None:
        self._costs, self._policy, self._disk = costs, policy, disk
        self._unit_tokens, self._page_units, self._match_units = trace.unit_tokens, page_units, match_units
        self._pages = Pages(num_pages)
        self._states: dict[int, State] = {}
        self._here, self._there = PrefixIndex(), PrefixIndex()
        self._heirs: dict[int, int] = {}
        self._now = 0
        self._written_bytes = 0

    def peak_needed_pages(self) -> int:
        """The most pages, over time, that a later request used. Only where nothing was ever evicted."""
        change = np.zeros(self._now + 2, np.int64)
        for (_, born), last in self._pages.last_used.items():
            change[born] += 1
            change[last] -= 1
        return int(np.max(np.cumsum(change)))

    def serve(self, ask: Ask) -> Served:
        """Look up, make room, compute the rest, keep the state."""
        self._now += 1
        self._written_bytes = 0
        units = np.concatenate([ask.prompt, ask.reply])[:-1]  # the last token's row is computed when it is needed
        wanted = -(-len(units) // self._page_units)
        if wanted > self._pages.size:
            raise ConfigError(f"a request needs {wanted} pages, memory has {self._pages.size}: give it more")
        while True:
            tier, match, near = self._look_up(ask.prompt[:-1])
            state = self._lease(tier, match, wanted, units)
            if state is not None:
                break
        for key in self._here.prefixes_of(units):
            self._drop(self._state(key))
        self._here.add(state.id, units)
        self._states[state.id] = state
        return self._served(ask, tier, match, near)

    def _look_up(self, usable: np.ndarray) -> tuple[Tier, Match | None, int]:
        """Where the longest prefix is that is worth taking, and how many ids memory has of it."""
        near, far = self._whole_blocks(self._here.longest(usable)), self._whole_blocks(self._there.longest(usable))
        here = near.common if near is not None else 0
        if far is not None and far.common > here:
            tokens, start = far.common * self._unit_tokens, here * self._unit_tokens
            if self._costs.restore_s(tokens) < self._costs.prefill_s(start, tokens):
                return Tier.DISK, far, here
        return (Tier.COLD if near is None else Tier.RESIDENT), near, here

    def _whole_blocks(self, match: Match | None) -> Match | None:
        if match is None or match.common < self._match_units:
            return None
        return Match(match.key, match.common // self._match_units * self._match_units)

    def _lease(self, tier: Tier, match: Match | None, wanted: int, units: np.ndarray) -> State | None:
        """The pages of this request; None when what it matched had to go to make room for it."""
        if match is None or tier is Tier.DISK:
            self._make_room(wanted, keep=None)
            state = State(self._now, units, self._pages.take(wanted, self._now), self._now, self._now)
            if match is not None:
                state.base, state.uses = (_number(match.key), match.common), 1
            return state
        one = self._state(match.key)
        whole = match.common // self._page_units
        if not self._make_room(wanted - whole, keep=one):
            self._evict(one)
            return None
        one.last_used, one.uses = self._now, one.uses + 1
        self._pages.use(one.pages[: -(-match.common // self._page_units)], self._now)
        self._pages.share(one.pages[:whole], self._now)
        pages = one.pages[:whole] + self._pages.take(wanted - whole, self._now)
        state = State(self._now, units, pages, self._now, self._now)
        if one.saved is not None:
            state.base = one.saved, match.common
        elif one.base is not None:
            state.base = one.base[0], min(one.base[1], match.common)
        if match.common == len(one.units):
            state.created, state.uses = one.created, one.uses
        return state

    def _make_room(self, pages: int, keep: State | None) -> bool:
        if self._pages.free >= pages:
            return True
        for candidate in self._policy.order(self._candidates(), self._now):
            if candidate.key != (keep.id if keep is not None else None):
                self._evict(self._state(candidate.key))
            if self._pages.free >= pages:
                return True
        return False

    def _candidates(self) -> Iterable[Candidate]:
        for one in self._states.values():
            exclusive = self._pages.exclusive[one.id]
            stop = len(one.units) * self._unit_tokens
            start = max(0, stop - exclusive * self._page_units * self._unit_tokens)
            compute_s = self._costs.prefill_s(start, stop)
            yield Candidate(
                key=one.id,
                num_tokens=stop,
                freed_bytes=exclusive * self._page_units * self._unit_tokens * self._costs.token_bytes,
                saved_s=min(compute_s, self._costs.restore_s(stop - start)) if self._disk else compute_s,
                uses=one.uses,
                last_used=one.last_used,
                created=one.created,
                dependents=self._pages.owners(one.pages[0]) - 1,
            )

    def _evict(self, one: State) -> None:
        if self._disk and one.saved is None:
            self._save(one)
        self._drop(one)

    def _save(self, one: State) -> None:
        """Write what its base, or the heir of its base, does not have."""
        base, shared = one.base if one.base is not None else (None, 0)
        while base is not None and base not in self._there:
            base = self._heirs.get(base)
        new = len(one.units) - (shared if base is not None else 0)
        self._written_bytes += new * self._unit_tokens * self._costs.token_bytes
        for key in self._there.prefixes_of(one.units):
            self._there.remove(key)
            self._heirs[_number(key)] = one.id
        self._there.add(one.id, one.units)
        one.saved = one.id

    def _drop(self, one: State) -> None:
        del self._states[one.id]
        self._here.remove(one.id)
        self._pages.release(one.pages, one.id)

    def _served(self, ask: Ask, tier: Tier, match: Match | None, near: int) -> Served:
        cached = match.common * self._unit_tokens if match is not None else 0
        return Served(
            tier=tier,
            prompt_tokens=ask.prompt_tokens,
            cached_tokens=cached,
            gained_tokens=cached - near * self._unit_tokens if tier is Tier.DISK else 0,
            restore_s=self._costs.restore_s(cached) if tier is Tier.DISK else 0.0,
            prefill_s=self._costs.prefill_s(cached, ask.prompt_tokens),
            written_bytes=self._written_bytes,
            source=_number(match.key) if match is not None else None,
        )

    def _state(self, key: Hashable) -> State:
        return self._states[_number(key)]


def _number(key: Hashable) -> int:
    """Keys are the numbers of the requests that made the states."""
    assert isinstance(key, int)
    return key


@dataclass(frozen=True)
class Unlimited:
    """The same trace with room for everything, and what that teaches.

    working_set_pages: the most pages, over time, that a later request still needs: with so many, and knowing the
    future, nothing is computed twice. later: state -> (request, tokens in common) of each request that it serves best,
    in order.
    """

    working_set_pages: int
    later: Mapping[int, Sequence[tuple[int, int]]]
    served: tuple[Served, ...]


def run_unlimited(trace: Trace, costs: Costs, page_units: int) -> Unlimited:
    """Serve a trace with memory for all of it."""
    size = sum(-(-(len(ask.prompt) + len(ask.reply)) // page_units) for ask in trace.asks)
    simulation = Simulation(trace, costs, Clairvoyant({}, 1), num_pages=size, page_units=page_units, disk=False)
    later, served = dict[int, list[tuple[int, int]]](), []
    for number, ask in enumerate(trace.asks, 1):
        served.append(simulation.serve(ask))
        if served[-1].source is not None:
            later.setdefault(served[-1].source, []).append((number, served[-1].cached_tokens))
    return Unlimited(simulation.peak_needed_pages(), later, tuple(served))


class Clairvoyant:
    """Knows the future: what saves the fewest seconds a byte and tick until its next use goes first.

    Belady's rule (1966), the farthest next use first, with what a use is worth. A use of what others hold too does not
    count, because that stays. On the same units as the other policies no ranking that has to guess the next use can
    know more; that no other choice of victims would save more is not proven, because states differ in size and share
    pages. later: see `Unlimited`.
    """

    name = "clairvoyant"

    def __init__(self, later: Mapping[int, Sequence[tuple[int, int]]], token_bytes: int) -> None:
        self._later, self._token_bytes = later, token_bytes

    def order(self, candidates: Iterable[Candidate], now: int) -> list[Candidate]:
        return sorted(candidates, key=lambda one: self._value(one, now))

    def _value(self, one: Candidate, now: int) -> float:
        if one.freed_bytes <= 0:
            return math.inf
        alone = one.num_tokens - one.freed_bytes // self._token_bytes
        uses = self._later.get(_number(one.key), ())
        after = next((number - now for number, common in uses if number >= now and common > alone), math.inf)
        return one.saved_s / one.freed_bytes / (1 + after)
