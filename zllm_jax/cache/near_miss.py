"""When a prompt shares much with a stored state and yet cannot use it: where they part."""

from __future__ import annotations

import numpy as np

from zllm_jax.values import NearMiss

MIN_COMMON_TOKENS = 1024
MIN_COMMON_SHARE = 0.9
CONTEXT_TOKENS = 8


def near_miss(prompt: np.ndarray, stored: np.ndarray, common: int, reused: int) -> NearMiss | None:
    """What to say of a prompt that has `common` leading tokens with a stored state, of which `reused` are reused.

    A near miss is a long common prefix (at least 1,024 tokens, or nine tenths of the stored state) that is not reused
    whole; or one of nine tenths that is, after which the stored state goes on differently.
    """
    nearly_all = common >= MIN_COMMON_SHARE * len(stored)
    parts = common < min(len(prompt), len(stored))
    lost = reused < min(common, len(prompt) - 1)
    if not (lost and (nearly_all or common >= MIN_COMMON_TOKENS)) and not (parts and nearly_all):
        return None
    return NearMiss(
        common=common,
        stored_tokens=len(stored),
        reused_tokens=reused,
        before=_ids(prompt[max(0, common - CONTEXT_TOKENS) : common]),
        here=_ids(prompt[common : common + CONTEXT_TOKENS]),
        there=_ids(stored[common : common + CONTEXT_TOKENS]),
    )


def _ids(tokens: np.ndarray) -> tuple[int, ...]:
    return tuple(tokens.tolist())
