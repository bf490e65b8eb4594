"""The loop guard in a step: which rows it watches, what it takes from their masks, what it is told afterwards."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from zllm_jax.fence import (
    NO_TOKEN,
    GuardRows,
    combine,
    ending_mask,
    excluding_mask,
    rows_advance,
    rows_end,
    rows_excluded,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watch:
    """B rows: whether the guard watches them, and their regions of thinking.

    on, inside (whether the output stands in such a region): bool[B]; opens, closes: i32[B], the tokens that begin and
    end one, -1 for none.
    """

    on: ArrayLike
    inside: ArrayLike
    opens: ArrayLike
    closes: ArrayLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seen:
    """What the guard says before a draw.

    at: i32[B], the slots of the rows that it watches, one beyond the last for the others; excluded: i32[B, 2];
    ends: bool[B], whether the region of thinking is to be closed.
    """

    at: jax.Array
    excluded: jax.Array
    ends: jax.Array


def look(guard: GuardRows, slots: jax.Array, live: jax.Array, watch: Watch) -> Seen:
    """What the guard says of the rows that are live; without one that it watches, nothing is computed."""
    watched = jnp.asarray(watch.on) & live
    at = jnp.where(watched, slots, guard.broken.shape[0])

    def some(guard: GuardRows) -> tuple[jax.Array, jax.Array]:
        excluded = jnp.where(watched[:, None], rows_excluded(guard, at), NO_TOKEN)
        inside = jnp.asarray(watch.inside) & (jnp.asarray(watch.closes) >= 0)
        return excluded, rows_end(guard, at, excluded) & inside

    def none(guard: GuardRows) -> tuple[jax.Array, jax.Array]:
        return jnp.full((len(at), 2), NO_TOKEN, jnp.int32), jnp.zeros(len(at), jnp.bool_)

    return Seen(at, *jax.lax.cond(jnp.any(watched), some, none, guard))


def narrowed(
    seen: Seen, watch: Watch, mask: jax.Array | None, masked: jax.Array | None, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """A mask (u32[B, W], None: all is allowed) without what would go on with a loop, and whether it forbids anything.

    Where that leaves nothing, the mask stays as it was: a grammar comes first.
    """
    num_words = -(-vocab_size // 32)
    if mask is None:
        mask = jnp.full((len(seen.at), num_words), 0xFFFFFFFF, jnp.uint32)

    def narrow(mask: jax.Array) -> jax.Array:
        closing = ending_mask(jnp.asarray(watch.closes), num_words)
        return combine(mask, jnp.where(seen.ends[:, None], closing, excluding_mask(seen.excluded, num_words)))

    loops = jnp.any(seen.excluded != NO_TOKEN)
    mask = jax.lax.cond(loops, narrow, lambda mask: mask, mask)
    return mask, loops if masked is None else loops | masked


def told(guard: GuardRows, seen: Seen, words: ArrayLike, ids: jax.Array) -> GuardRows:
    """The guard after the rows drew `ids`, i32[B]. words: bool[V], which tokens are words."""
    return rows_advance(guard, seen.at, seen.excluded, words, ids)


def followed(watch: Watch, ids: jax.Array) -> Watch:
    """Where the rows stand after they drew `ids`."""
    opened = (ids == jnp.asarray(watch.opens)) | jnp.asarray(watch.inside)
    return replace(watch, inside=opened & (ids != jnp.asarray(watch.closes)))
