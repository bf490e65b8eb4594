"""The loop guard inside a decode step: the machine of `guard`, for every row of a batch, on arrays of fixed shapes.

The state stays where it is, a row a slot of the device; a step says which rows its batch is about. Indices beyond them
stand for nobody: what they read is not used, and nothing is written for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from zllm_jax.fence.guard import MAX_HALVINGS, MULTIPLIER, NO_TOKEN, LoopGuard


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class GuardRows:
    """`guard.GuardState` of N texts, with its meaning, and the thresholds that they are judged by.

    places: context, what followed it, and how often, side by side: one read and one write a step.
    """

    recent: jax.Array  # i32[N, max_period]
    fresh: jax.Array  # bool[N, max_period]
    matched: jax.Array  # i32[N, max_period]
    places: jax.Array  # i32[N, num_slots, 3]
    foreseen: jax.Array  # i32[N]
    broken: jax.Array  # i32[N]
    guard: LoopGuard = field(metadata={"static": True})


def guard_rows(num_rows: int, *, guard: LoopGuard) -> GuardRows:
    """`num_rows` texts of which nothing was generated yet."""
    P = (num_rows, guard.max_period)
    return GuardRows(
        recent=jnp.full(P, NO_TOKEN, jnp.int32),
        fresh=jnp.zeros(P, jnp.bool_),
        matched=jnp.zeros(P, jnp.int32),
        places=jnp.zeros((num_rows, guard.num_slots, 3), jnp.int32),
        foreseen=jnp.zeros(num_rows, jnp.int32),
        broken=jnp.zeros(num_rows, jnp.int32),
        guard=guard,
    )


def rows_begin(rows: GuardRows, at: jax.Array) -> GuardRows:
    """With the text at one place (i32) forgotten: a new one begins there."""
    fresh = guard_rows(1, guard=rows.guard)
    begun: GuardRows = jax.tree.map(lambda old, new: old.at[at].set(new[0], mode="drop"), rows, fresh)
    return begun


def rows_excluded(rows: GuardRows, at: jax.Array) -> jax.Array:
    """The tokens that would continue a loop in the texts `at` (i32[B]), i32[B, 2]: of the pattern, of the restart.

    `NO_TOKEN` where there is none; both may be the same.
    """
    guard = rows.guard
    recent, matched = rows.recent[at], rows.matched[at]
    halvings = jnp.minimum(rows.broken[at], MAX_HALVINGS)
    periods = jnp.arange(1, guard.max_period + 1, dtype=jnp.int32)
    num_words = jnp.cumsum(rows.fresh[at], axis=1, dtype=jnp.int32)
    fewer = jnp.where(num_words > 0, guard.chant_tokens, guard.symbol_tokens)
    too_long = jnp.where(num_words >= guard.prose_words, guard.prose_tokens, fewer) >> halvings[:, None]
    loops = (matched >= too_long) & (matched >= (periods * (guard.min_repeats - 1))[None])
    pattern = jnp.where(loops.any(axis=1), _pick(recent, jnp.argmax(loops, axis=1)), NO_TOKEN)

    context = _context_hash(recent, guard)
    place, foreseen = rows.places[at, _slot_of(context, guard)], rows.foreseen[at]
    known = (place[:, 0] == context) & (place[:, 2] >= guard.passage_seen)
    said = _pick(num_words, jnp.clip(foreseen, 1, guard.max_period) - 1)
    recites = (foreseen >= guard.passage_tokens >> halvings) & (said >= guard.passage_words)
    passage = jnp.where(known & recites, place[:, 1], NO_TOKEN)
    return jnp.stack([pattern, passage], axis=1)


def rows_advance(rows: GuardRows, at: jax.Array, excluded: jax.Array, words: ArrayLike, token: jax.Array) -> GuardRows:
    """After `token` (i32[B]) in the texts `at`, for which `rows_excluded` gave `excluded`.

    words: bool[V], what `word_tokens` gave for the vocabulary.
    """
    guard = rows.guard
    left = (excluded != NO_TOKEN).any(axis=1) & (excluded != token[:, None]).all(axis=1)
    recent, foreseen = rows.recent[at], rows.foreseen[at]
    context = _context_hash(recent, guard)
    slot = _slot_of(context, guard)
    place = rows.places[at, slot]
    count = jnp.where((place[:, 0] == context) & (place[:, 1] == token), place[:, 2], 0)
    same = recent == token[:, None]
    is_word = jnp.asarray(words)[token]
    foreseen = jnp.where(count >= guard.passage_seen, foreseen + 1, jnp.maximum(foreseen - guard.context, 0))

    def put(array: jax.Array, value: jax.Array) -> jax.Array:
        return array.at[at].set(value, mode="drop")

    def shifted(first: jax.Array, rest: jax.Array) -> jax.Array:
        return jnp.concatenate([first[:, None], rest[:, :-1]], axis=1)

    return replace(
        rows,
        recent=put(rows.recent, shifted(token, recent)),
        fresh=put(rows.fresh, shifted(is_word, rows.fresh[at] & ~same)),
        matched=put(rows.matched, jnp.where(same, rows.matched[at] + 1, 0)),
        places=rows.places.at[at, slot].set(jnp.stack([context, token, count + 1], axis=1), mode="drop"),
        foreseen=put(rows.foreseen, foreseen),
        broken=put(rows.broken, rows.broken[at] + left.astype(jnp.int32)),
    )


def rows_end(rows: GuardRows, at: jax.Array, excluded: jax.Array) -> jax.Array:
    """Where a region of thinking should end, bool[B]: the text broke out of loops and is in one again."""
    return (rows.broken[at] >= rows.guard.end_after) & (excluded != NO_TOKEN).any(axis=1)


def excluding_mask(excluded: jax.Array, num_words: int) -> jax.Array:
    """Every token but the excluded ones (i32[B, 2], `NO_TOKEN` for none), u32[B, W]."""
    return ~(_only(excluded[:, 0], num_words) | _only(excluded[:, 1], num_words))


def ending_mask(token: jax.Array, num_words: int) -> jax.Array:
    """Nothing but `token` (i32[B]), u32[B, W]."""
    return _only(token, num_words)


def combine(grammar_mask: jax.Array, guard_mask: jax.Array) -> jax.Array:
    """What both masks (u32[B, W]) allow; where that is nothing, what the grammar allows."""
    both = grammar_mask & guard_mask
    return jnp.where((both != 0).any(axis=1, keepdims=True), both, grammar_mask)


def _only(token: jax.Array, num_words: int) -> jax.Array:
    """The bit of `token`, none for `NO_TOKEN`."""
    word = jnp.arange(num_words, dtype=jnp.int32)
    bit = jnp.uint32(1) << (token % 32).astype(jnp.uint32)
    hit = (word[None] == (token // 32)[:, None]) & (token != NO_TOKEN)[:, None]
    return jnp.where(hit, bit[:, None], jnp.uint32(0))


def _pick(table: jax.Array, index: jax.Array) -> jax.Array:
    """One column of each row."""
    found: jax.Array = jnp.take_along_axis(table, index[:, None], axis=1)[:, 0]
    return found


def _context_hash(recent: jax.Array, guard: LoopGuard) -> jax.Array:
    value = jnp.ones(len(recent), jnp.uint32)
    for i in range(guard.context):
        value = (value ^ recent[:, i].astype(jnp.uint32)) * jnp.uint32(MULTIPLIER)
        value = value ^ (value >> jnp.uint32(15))
    context: jax.Array = jax.lax.bitcast_convert_type(value | jnp.uint32(1), jnp.int32)
    return context


def _slot_of(context: jax.Array, guard: LoopGuard) -> jax.Array:
    return (context >> 8) & (guard.num_slots - 1)
