"""What one forward pass is told: tokens and where they stand. Built on the host, small, and a pytree."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """B rows of T tokens.

    tokens, positions: i32[B, T], positions consecutive along T; valid: bool[B, T], False for padding at a row's end;
    table: i32[B, M] page ids; rings: i32[B] ring ids (unused by a purely paged model).
    """

    tokens: jax.Array
    positions: jax.Array
    valid: jax.Array
    table: jax.Array
    rings: jax.Array


def chunk_batch(tokens: jax.Array, start: jax.Array, count: jax.Array, table: jax.Array, ring: jax.Array) -> Batch:
    """One row: `count` of the T `tokens` i32[T] are real and stand at start, start+1, ...

    Padding repeats the last real position, so that it never reaches further than the real tokens.
    """
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    positions = start + jnp.minimum(index, count - 1)
    return Batch(tokens[None], positions[None], (index < count)[None], table[None], ring[None])
