"""Which state to move out when memory is short. Pure: facts about the kept states in, an order of victims out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Candidate:
    """What a policy may know of one kept state.

    num_tokens: its length. freed_bytes: what evicting it frees now; pages that others share are not freed. saved_s:
    seconds that keeping what it alone holds saves at its next use. uses: how often it, or what it continues, was hit.
    last_used, created: when it was last used and when its conversation began, on a clock that ticks once a request.
    dependents: kept states that continue this one.
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

    name: str

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

    A state is used every `gap` ticks on average, until it is abandoned; how long it has not been used, against its own
    gap, says how likely that has happened (the model of Schmittlein, Morrison and Colombo, Management Science 1987,
    for customers who come again or don't). Its value is

        P(in use) / gap * saved_s * (1 + dependents) / freed_bytes

    Gaps, and how often states are abandoned, are learnt from all candidates, so that nothing depends on how busy the
    engine is. prior_uses: how many uses the average state counts for in the gap of one; abandoned: the chance that a
    state is never used again when nothing is known of it.
    """

    name = "cost"

    def __init__(self, prior_uses: float = 1.0, abandoned: float = 0.5, tail: float = 1.0) -> None:
        self._prior_uses, self._abandoned, self._tail = prior_uses, abandoned, tail

    def order(self, candidates: Iterable[Candidate], now: int) -> list[Candidate]:
        found = list(candidates)
        typical = _typical_gap(found)
        return sorted(found, key=lambda one: (self._value(one, now, typical), one.last_used))

    def _value(self, one: Candidate, now: int, typical_gap: float) -> float:
        if one.freed_bytes <= 0:
            return float("inf")
        gap = (self._prior_uses * typical_gap + one.last_used - one.created) / (self._prior_uses + one.uses)
        lost = self._abandoned / (1.0 + one.uses)
        waits = (1.0 - lost) * (1.0 + (now - one.last_used) / (gap * self._tail)) ** -self._tail
        alive = waits / (waits + lost)
        return alive / gap * one.saved_s * (1 + one.dependents) / one.freed_bytes


def _typical_gap(candidates: Sequence[Candidate]) -> float:
    """Mean ticks between two uses, over the states that have been used again."""
    uses = sum(one.uses for one in candidates)
    return max(1.0, sum(one.last_used - one.created for one in candidates if one.uses) / uses) if uses else 1.0


POLICIES: Mapping[str, type[Policy]] = {Lru.name: Lru, CostAware.name: CostAware}
"""The policies by the names that settings give them."""
