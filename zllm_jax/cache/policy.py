"""Which state to move out when memory is short. Pure: facts about the kept states in, an order of victims out."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Candidate:
    """What a policy may know of one kept state.

    num_tokens: its length. freed_bytes: what evicting it frees now; pages that others share are not freed. saved_s:
    seconds that keeping what it alone holds saves at its next use. uses: how often it was hit. last_used, created: on
    a clock that ticks once a request. dependents: kept states that begin with its first page.
    """

    key: Hashable
    num_tokens: int
    freed_bytes: int
    saved_s: float
    uses: int
    last_used: int
    created: int
    dependents: int = 0


class Policy(Protocol):
    """A way to rank victims."""

    @property
    def name(self) -> str: ...

    def order(self, candidates: Iterable[Candidate], now: int) -> list[Candidate]:
        """All candidates, the best victim first. now: the clock that `last_used` was read from."""
        ...


class Lru:
    """The longest unused goes first, whatever it costs to have it back."""

    name = "lru"

    def order(self, candidates: Iterable[Candidate], now: int) -> list[Candidate]:
        return sorted(candidates, key=lambda one: (one.last_used, one.created))


class CostAware:
    """What saves the fewest expected seconds a byte goes first; what frees nothing goes last.

        value = heat * saved_s / freed_bytes,    heat = sqrt(num_tokens * (1 + dependents)) / (1 + age)

    `age` is the ticks since the last use. A long state counts as hotter because a single question is short and a
    conversation in use grows; the root keeps the short ones, which come often, from paying for it. The number of uses
    is left out: on the traces of the experiment `cache_trace` weighing it saved less.
    """

    name = "cost"

    def order(self, candidates: Iterable[Candidate], now: int) -> list[Candidate]:
        return sorted(candidates, key=lambda one: (_value(one, now), one.last_used, one.created))


def _value(one: Candidate, now: int) -> float:
    if one.freed_bytes <= 0:
        return math.inf
    heat = math.sqrt(one.num_tokens * (1 + one.dependents)) / (1 + now - one.last_used)
    return heat * one.saved_s / one.freed_bytes


POLICIES: Mapping[str, Callable[[], Policy]] = {Lru.name: Lru, CostAware.name: CostAware}
"""The policies by the names that settings give them."""
