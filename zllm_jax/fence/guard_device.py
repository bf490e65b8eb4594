"""The loop guard inside a decode step: the machine of `guard`, for every row of a batch, on arrays of fixed shapes."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from zllm_jax.fence.guard import MAX_HALVINGS, MULTIPLIER, NO_TOKEN, LoopGuard


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class GuardRows:
    """`guard.GuardState` of each row, with its meaning."""

    recent: jax.Array  # i32[B, max_period]
    fresh: jax.Array  # bool[B, max_period]
    matched: jax.Array  # i32[B, max_period]
    slot_context: jax.Array  # u32[B, num_slots]
    slot_next: jax.Array  # i32[B, num_slots]
    slot_count: jax.Array  # i32[B, num_slots]
    foreseen: jax.Array  # i32[B]
    broken: jax.Array  # i32[B]


def guard_rows(num_rows: int, *, guard: LoopGuard) -> GuardRows:
    """`num_rows` texts of which nothing was generated yet."""
    P, S = (num_rows, guard.max_period), (num_rows, guard.num_slots)
    return GuardRows(
        recent=jnp.full(P, NO_TOKEN, jnp.int32),
        fresh=jnp.zeros(P, jnp.bool_),
        matched=jnp.zeros(P, jnp.int32),
        slot_context=jnp.zeros(S, jnp.uint32),
        slot_next=jnp.full(S, NO_TOKEN, jnp.int32),
        slot_count=jnp.zeros(S, jnp.int32),
        foreseen=jnp.zeros(num_rows, jnp.int32),
        broken=jnp.zeros(num_rows, jnp.int32),
    )


def rows_excluded(rows: GuardRows, *, guard: LoopGuard) -> jax.Array:
    """The tokens that would continue a loop, i32[B, 2]: of the pattern, of the restart; `NO_TOKEN` where there is none.

    Both may be the same.
    """
    halvings = jnp.minimum(rows.broken, MAX_HALVINGS)
    periods = jnp.arange(1, guard.max_period + 1, dtype=jnp.int32)
    num_words = jnp.cumsum(rows.fresh, axis=1, dtype=jnp.int32)
    fewer = jnp.where(num_words > 0, guard.chant_tokens, guard.symbol_tokens)
    too_long = jnp.where(num_words >= guard.prose_words, guard.prose_tokens, fewer) >> halvings[:, None]
    loops = (rows.matched >= too_long) & (rows.matched >= (periods * (guard.min_repeats - 1))[None])
    shortest = jnp.argmax(loops, axis=1)
    pattern = jnp.where(loops.any(axis=1), _at(rows.recent, shortest), NO_TOKEN)

    context = _context_hash(rows.recent, guard)
    slot = _slot_of(context, guard)
    known = (_at(rows.slot_context, slot) == context) & (_at(rows.slot_count, slot) >= guard.passage_seen)
    recites = rows.foreseen >= guard.passage_tokens >> halvings
    passage = jnp.where(
        known & recites & (num_words[:, -1] >= guard.passage_words), _at(rows.slot_next, slot), NO_TOKEN
    )
    return jnp.stack([pattern, passage], axis=1)


def rows_advance(rows: GuardRows, words: ArrayLike, token: jax.Array, *, guard: LoopGuard) -> GuardRows:
    """The state after `token`, i32[B]. words: bool[V], what `word_tokens` gave for the vocabulary."""
    excluded = rows_excluded(rows, guard=guard)
    left = (excluded != NO_TOKEN).any(axis=1) & (excluded != token[:, None]).all(axis=1)
    context = _context_hash(rows.recent, guard)
    slot = _slot_of(context, guard)
    again = (_at(rows.slot_context, slot) == context) & (_at(rows.slot_next, slot) == token)
    count = jnp.where(again, _at(rows.slot_count, slot), 0)
    each = jnp.arange(len(token))
    same = rows.recent == token[:, None]
    fresh = jnp.asarray(words)[token]
    return GuardRows(
        recent=jnp.concatenate([token[:, None], rows.recent[:, :-1]], axis=1),
        fresh=jnp.concatenate([fresh[:, None], (rows.fresh & ~same)[:, :-1]], axis=1),
        matched=jnp.where(same, rows.matched + 1, 0),
        slot_context=rows.slot_context.at[each, slot].set(context),
        slot_next=rows.slot_next.at[each, slot].set(token),
        slot_count=rows.slot_count.at[each, slot].set(count + 1),
        foreseen=jnp.where(
            count >= guard.passage_seen, rows.foreseen + 1, jnp.maximum(rows.foreseen - guard.context, 0)
        ),
        broken=rows.broken + left.astype(jnp.int32),
    )


def rows_end(rows: GuardRows, *, guard: LoopGuard) -> jax.Array:
    """Where a region of thinking should end, bool[B]: the row broke out of loops and is in one again."""
    return (rows.broken >= guard.end_after) & (rows_excluded(rows, guard=guard) != NO_TOKEN).any(axis=1)


def excluding_mask(excluded: jax.Array, num_words: int) -> jax.Array:
    """Every token but the excluded ones (i32[B, 2], `NO_TOKEN` for none), u32[B, W]."""
    word = jnp.arange(num_words, dtype=jnp.int32)
    bit = jnp.uint32(1) << (excluded % 32).astype(jnp.uint32)
    hit = (word[None, None] == (excluded // 32)[..., None]) & (excluded != NO_TOKEN)[..., None]
    bits = jnp.where(hit, bit[..., None], jnp.uint32(0))
    return ~(bits[:, 0] | bits[:, 1])


def combine(grammar_mask: jax.Array, guard_mask: jax.Array) -> jax.Array:
    """What both masks (u32[B, W]) allow; where that is nothing, what the grammar allows."""
    both = grammar_mask & guard_mask
    return jnp.where((both != 0).any(axis=1, keepdims=True), both, grammar_mask)


def _at(table: jax.Array, index: jax.Array) -> jax.Array:
    found: jax.Array = jnp.take_along_axis(table, index[:, None], axis=1)[:, 0]
    return found


def _context_hash(recent: jax.Array, guard: LoopGuard) -> jax.Array:
    value = jnp.ones(len(recent), jnp.uint32)
    for i in range(guard.context):
        value = (value ^ recent[:, i].astype(jnp.uint32)) * jnp.uint32(MULTIPLIER)
        value = value ^ (value >> jnp.uint32(15))
    context: jax.Array = value | jnp.uint32(1)
    return context


def _slot_of(context: jax.Array, guard: LoopGuard) -> jax.Array:
    slot: jax.Array = ((context >> jnp.uint32(8)) & jnp.uint32(guard.num_slots - 1)).astype(jnp.int32)
    return slot
