"""Whose turn it is: by priority, then to whom least was given so far, then by arrival.

Each tenant has a counter of the tokens computed for it (virtual token counter: Sheng et al., arXiv 2401.00588). One
that was away starts where the least served of the present ones stands: absence saves nothing up.
"""

from __future__ import annotations

from collections.abc import Iterable

from zllm_jax.scheduler.sequence import Sequence


class FairShare:
    """Tokens served to each tenant that has requests here."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._present: dict[str, int] = {}
        self._floor = 0.0  # where the last one stood when nobody was left

    def __len__(self) -> int:
        return len(self._present)

    def arrive(self, tenant: str) -> None:
        """A request of `tenant` was queued."""
        if tenant not in self._present:
            least = min((self._served[one] for one in self._present), default=self._floor)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
            self._present[tenant] = 0
        self._present[tenant] += 1

    def serve(self, tenant: str, num_tokens: int) -> None:
        """So many tokens were computed for `tenant`."""
        self._served[tenant] += num_tokens

    def leave(self, tenant: str) -> None:
        """A request of `tenant` has ended."""
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]
            if not self._present:
                self._floor = max(self._floor, self._served[tenant])
            if self._served[tenant] <= min((self._served[one] for one in self._present), default=float("inf")):
                del self._served[tenant]  # it owes nothing

    def order(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Whose turn it is, first to last."""
        return sorted(sequences, key=lambda one: (-one.job.priority, self._served[one.job.tenant], one.number))
