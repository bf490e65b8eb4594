"""What of a prompt is known, in which tier, and whether it is worth restoring."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zllm_jax.cache.index import Match
from zllm_jax.cache.near_miss import near_miss
from zllm_jax.cache.rates import Prediction, Rates
from zllm_jax.cache.residents import Residents
from zllm_jax.cache.snapshots import Snapshots
from zllm_jax.values import NearMiss, Tier

if TYPE_CHECKING:
    from zllm_jax.runtime import Capacity  # importing it would bring jax to those who only list snapshots


class LookUp:
    """Compares prompts with both tiers; changes nothing."""

    def __init__(self, residents: Residents, snapshots: Snapshots | None, capacity: Capacity, rates: Rates) -> None:
        self._residents, self._snapshots, self._capacity, self._rates = residents, snapshots, capacity, rates

    def longest(
        self, prompt: np.ndarray, tenant: str, conversation: str | None
    ) -> tuple[Match | None, Tier, Prediction | None]:
        """The longest verified prefix; a longer one on disk wins when reading it beats computing the difference.

        The last token of a prompt must be computed to predict the next. The prediction is there when one was made.
        """
        usable = prompt[:-1]
        near = self._here(usable, tenant, conversation)
        far = self._snapshots.usable(usable, tenant) if self._snapshots is not None else None
        predicted = None
        here = near.common if near is not None else 0
        if far is not None and far.common > here:
            predicted = self._rates.predict(self._capacity.state_bytes(far.common), here, far.common)
            if predicted.restoring_wins:
                return far, Tier.DISK, predicted
        return near, Tier.RESIDENT, predicted

    def knows(self, match: Match, tier: Tier) -> bool:
        """Whether what was found is still there."""
        if tier is Tier.RESIDENT:
            return self._residents.get(str(match.key)) is not None
        return self._snapshots is not None and str(match.key) in self._snapshots

    def near_miss(self, prompt: np.ndarray, tenant: str, reused: int) -> NearMiss | None:
        """Why not more than `reused` tokens of a prompt that has more in common with something stored."""
        found = [(self._residents.longest(prompt, tenant), self._tokens_here)]
        if self._snapshots is not None:
            found.append((self._snapshots.longest(prompt, tenant), self._snapshots.tokens))
        stored = [(match.common, tokens(str(match.key))) for match, tokens in found if match is not None]
        if not stored:
            return None
        common, tokens = max(stored, key=lambda one: one[0])
        return near_miss(prompt, tokens, common, reused)

    def _here(self, prompt: np.ndarray, tenant: str, conversation: str | None) -> Match | None:
        """The longest prefix in memory; of equals the conversation that was named."""
        match = self._residents.usable(prompt, tenant)
        named = self._residents.get(conversation) if conversation is not None else None
        if match is None or named is None or named.tenant != tenant or len(named.tokens) < match.common:
            return match
        if not self._capacity.truncatable and len(named.tokens) != match.common:
            return match
        same = np.array_equal(named.tokens[: match.common], prompt[: match.common])
        return Match(named.id, match.common) if same else match

    def _tokens_here(self, id: str) -> np.ndarray:
        one = self._residents.get(id)
        assert one is not None
        return one.tokens
