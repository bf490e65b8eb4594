"""The first tier: finished conversations in device memory, sharing pages by reference counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from zllm_jax.cache.index import Match, PrefixIndex
from zllm_jax.cache.policy import Candidate
from zllm_jax.cache.pool import Pool
from zllm_jax.cache.snapshot import Base

if TYPE_CHECKING:
    from zllm_jax.runtime import Capacity  # importing it would bring jax to those who only list snapshots


@dataclass(eq=False)
class Resident:
    """A conversation whose rows are in device memory.

    base: the snapshot that its first rows are known to equal, bit for bit. saved: its id once all of them are on disk.
    turn_end: a turn of its conversation ended here (False: a checkpoint within a prompt).
    leaving: its pages are wanted, and it goes as soon as it is saved. unsavable: saving it has failed.
    """

    id: str
    tokens: np.ndarray
    pages: list[int]
    ring: int | None
    tenant: str
    created: int
    last_used: int
    base: Base | None = None
    saved: str | None = None
    turn_end: bool = True
    uses: int = 0
    leaving: bool = False
    unsavable: bool = False
    here: bool = field(default=True, init=False)

    @property
    def savable(self) -> bool:
        return self.saved is None and not self.unsavable

    def base_for(self, num_tokens: int) -> Base | None:
        """The snapshot that holds the first `num_tokens` rows, or the first of them."""
        if self.saved is not None:
            return Base(self.saved, num_tokens)
        return None if self.base is None else Base(self.base.id, min(self.base.num_tokens, num_tokens))


class Residents:
    """Who is in device memory, which pages and rings are whose, and who would have to go first."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self.pages, self.rings = Pool(capacity.num_pages), Pool(capacity.num_rings)
        self._index = PrefixIndex()
        self._by_id: dict[str, Resident] = {}
        self.clock = 0  # a tick whenever one comes or is used

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def __iter__(self) -> Iterator[Resident]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, id: str) -> Resident | None:
        return self._by_id.get(id)

    def add(self, one: Resident) -> None:
        self._by_id[one.id] = one
        self._index.add(one.id, one.tokens, one.tenant)

    def drop(self, one: Resident) -> None:
        """Forget a conversation; what nobody else holds of it is free."""
        del self._by_id[one.id]
        self._index.remove(one.id)
        self.release(one.pages, one.ring)
        one.here = False

    def release(self, pages: list[int], ring: int | None) -> None:
        self.pages.release(pages)
        if ring is not None:
            self.rings.release([ring])

    def has_room(self, num_pages: int, num_rings: int) -> bool:
        return self.pages.free >= num_pages and self.rings.free >= num_rings

    def longest(self, prompt: np.ndarray, tenant: str) -> Match | None:
        """The longest common prefix, whether or not it can be reused."""
        return self._index.longest(prompt, tenant)

    def usable(self, prompt: np.ndarray, tenant: str) -> Match | None:
        """The longest prefix that can be reused: any if the state can be cut anywhere, else a whole state."""
        return (self._index.longest if self._capacity.truncatable else self._index.longest_whole)(prompt, tenant)

    def prefixes_of(self, tokens: np.ndarray, tenant: str) -> list[Resident]:
        """The conversations that are, whole, prefixes of `tokens`, equal ones included."""
        return [self._by_id[str(key)] for key in self._index.prefixes_of(tokens, tenant)]

    def exclusive_pages(self, one: Resident) -> int:
        """How many pages would be free without it."""
        return sum(self.pages.owners(page) == 1 for page in one.pages)

    def exclusive_bytes(self, one: Resident) -> int:
        """How many bytes would be free without it."""
        rings = self._capacity.ring_bytes if one.ring is not None else 0
        return self.exclusive_pages(one) * self._capacity.page_bytes + rings

    def candidates(self, saved_s: Callable[[Resident, int], float]) -> list[Candidate]:
        """What a policy may know of each; saved_s: seconds that keeping it, and so many tokens only it holds, saves."""
        found = []
        for one in self._by_id.values():
            found.append(
                Candidate(
                    key=one.id,
                    num_tokens=len(one.tokens),
                    freed_bytes=self.exclusive_bytes(one),
                    saved_s=saved_s(one, self.exclusive_pages(one) * self._capacity.page_tokens),
                    uses=one.uses,
                    last_used=one.last_used,
                    created=one.created,
                    dependents=max((self.pages.owners(page) for page in one.pages[:1]), default=1) - 1,
                )
            )
        return found
