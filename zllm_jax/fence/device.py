"""The device's side: tables as a pytree, the state as a value, mask and advance as pure functions.

Nothing is rolled back: a probe walks its own copy of the state along a draft, and what was verified is the state
at that position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from zllm_jax.fence.automaton import DEAD


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Automata over bytes with their masks over a vocabulary; states of all share one numbering."""

    masks: ArrayLike  # u32[Q, W]; bit i of word w: token 32w + i is legal
    transitions: ArrayLike  # i32[Q, 256]
    accepting: ArrayLike  # bool[Q]
    token_bytes: ArrayLike  # u8[sum of the tokens' lengths + 1]
    token_start: ArrayLike  # i32[V + 1]; token t is token_bytes[token_start[t]:token_start[t + 1]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class FenceState:
    """Where each row stands. Opaque to the runtime, which only carries and selects it; registers will join here."""

    state: jax.Array  # i32[B]


def fence_start(starts: Sequence[int]) -> FenceState:
    """The state of a batch whose rows begin in `starts`."""
    return FenceState(jnp.asarray(np.asarray(starts, np.int32)))


def fence_mask(tables: TokenAutomaton, state: FenceState) -> jax.Array:
    """The tokens that may come next, u32[B, W]."""
    return jnp.asarray(tables.masks)[state.state]


def fence_advance(tables: TokenAutomaton, state: FenceState, token: jax.Array) -> FenceState:
    """The state after `token`, i32[B]: its bytes walked through the transitions.

    An illegal token leads to `DEAD`, which is no error: its mask is empty. EOS leaves the state as it is.
    """
    masks, transitions = jnp.asarray(tables.masks), jnp.asarray(tables.transitions)
    token_bytes, token_start = jnp.asarray(tables.token_bytes), jnp.asarray(tables.token_start)
    word = masks[state.state, token // 32]
    legal = (word >> (token % 32).astype(jnp.uint32)) & jnp.uint32(1)
    start, end = token_start[token], token_start[token + 1]

    def step(i: jax.Array, rows: jax.Array) -> jax.Array:
        byte = token_bytes[jnp.minimum(start + i, end)]
        return jnp.where(start + i < end, transitions[rows, byte.astype(jnp.int32)], rows)

    walked = lax.fori_loop(0, (end - start).max(), step, state.state)
    return FenceState(jnp.where(legal > 0, walked, DEAD))
