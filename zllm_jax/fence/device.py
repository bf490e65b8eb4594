"""The device's side: tables as a pytree, the state as a value, mask and advance as pure functions.

Nothing is rolled back: a probe walks its own copy of the state along a draft, and what was verified is the state
at that position. What an edge does is what `Machine.step` says; here it is done for many walkers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.machine import MAX_DEPTH, Position

FREE = 1  # in every table: the state of a row without a fence, where all is legal
DEPENDENT_CHUNK = 64  # tokens that are decided at a time

RETURNS, USED_LOW, USED_HIGH, COUNT = range(4)  # the columns of a frame


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class FenceTables:
    """The machines of several grammars over one vocabulary; their states, edges and rows have one numbering."""

    edges: ArrayLike  # i32[Q, 256]: the next state, or ~i for the i-th special edge
    accepting: ArrayLike  # bool[Q]
    pauses: ArrayLike  # bool[Q]: a run may be forced here
    kind: ArrayLike  # i32[Q], what states have in common
    kinds: ArrayLike  # i32[U, 5]: where the tokens that the stack decides begin in `dependent`, how many they are;
    # of those that the frame's count decides the row in `counts` (-1: none), and what it may come to; the row of masks
    masks: ArrayLike  # u32[M, W]; bit i of word w: token 32w + i is legal
    dependent: ArrayLike  # i32[A]
    counts: ArrayLike  # u8[C, V]: what tokens add to the count, 0 for those that it does not decide
    special: ArrayLike  # i32[E, 9]: target, use low and high, add, push, pop, otherwise, first condition, how many
    conditions: ArrayLike  # i32[G, 9]: need low and high, clear low and high, low, high, owed low and high, room
    returns: ArrayLike  # i32[R, O]
    token_bytes: ArrayLike  # u8[sum of the tokens' lengths + 1]
    token_start: ArrayLike  # i32[V + 1]; token t is token_bytes[token_start[t]:token_start[t + 1]]
    eos: ArrayLike  # u32[W]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class FenceState:
    """Where each row stands. Opaque to the runtime, which only carries and selects it."""

    state: ArrayLike  # i32[B]
    depth: ArrayLike  # i32[B], frames above the outermost one
    stack: ArrayLike  # i32[B, MAX_DEPTH + 1, 4]


def pack_positions(positions: Sequence[tuple[int, int, Position] | None]) -> FenceState:
    """Host positions -> arrays. Each is (what is added to its states, to its rows of returns, position); None: free."""
    state = np.full(len(positions), FREE, np.int32)
    depth = np.zeros(len(positions), np.int32)
    stack = np.zeros((len(positions), MAX_DEPTH + 1, 4), np.int32)
    for i, one in enumerate(positions):
        if one is None:
            continue
        first_state, first_returns, at = one
        state[i] = at.state + first_state if at.state else DEAD
        depth[i] = len(at.stack) - 1
        for level, frame in enumerate(at.stack):
            stack[i, level] = (frame.returns + first_returns, *words(frame.used), frame.count)
    return FenceState(state, depth, stack)


def words(bits: int) -> tuple[int, int]:
    """64 bits -> low and high word, as i32."""
    low, high = np.array([bits & 0xFFFFFFFF, bits >> 32], np.uint32).view(np.int32).tolist()
    return low, high


def fence_mask(tables: FenceTables, at: FenceState) -> jax.Array:
    """The tokens that may come next, u32[B, W]. Where nothing may, EOS, so that a row that is stuck can end."""
    state, depth = jnp.asarray(at.state), jnp.asarray(at.depth)
    spans = jnp.asarray(tables.kinds)[jnp.asarray(tables.kind)[state]]  # i32[B, 5]
    mask = jnp.asarray(tables.masks)[spans[:, 4]]
    ends = jnp.asarray(tables.accepting)[state] & (depth == 0)
    mask = jnp.where(ends[:, None], mask | jnp.asarray(tables.eos)[None], mask)
    mask = lax.cond(jnp.any(spans[:, 2] >= 0), _count, lambda mask, *_: mask, mask, tables, at, spans)
    mask = lax.cond(jnp.any(spans[:, 1] > 0), _decide, lambda mask, *_: mask, mask, tables, at, spans)
    stuck = jnp.all(mask == 0, axis=1)
    return jnp.where(stuck[:, None], jnp.asarray(tables.eos)[None], mask)


def fence_advance(tables: FenceTables, at: FenceState, token: jax.Array) -> FenceState:
    """The state after `token`, i32[B]: its bytes walked. EOS leaves the state as it is; an illegal token kills it."""
    start = jnp.asarray(tables.token_start)
    after = _walk(tables, at, start[token], start[token + 1])
    eos = (jnp.asarray(tables.eos)[token // 32] >> (token % 32).astype(jnp.uint32)) & jnp.uint32(1)
    silent = (start[token] == start[token + 1]) & (eos == 0) & (jnp.asarray(at.state) != FREE)
    return replace(after, state=jnp.where(silent, DEAD, after.state))


def _count(mask: jax.Array, tables: FenceTables, at: FenceState, spans: jax.Array) -> jax.Array:
    """Add the tokens that the frames' counts allow."""
    B, W = mask.shape
    n = jnp.arange(B, dtype=jnp.int32)
    counts = jnp.asarray(tables.counts)[jnp.maximum(spans[:, 2], 0)].astype(jnp.int32)  # i32[B, V]
    left = spans[:, 3] - jnp.asarray(at.stack)[n, jnp.asarray(at.depth), COUNT]
    legal = (counts > 0) & (counts <= left[:, None]) & (spans[:, 2:3] >= 0)
    padded = jnp.pad(legal, ((0, 0), (0, 32 * W - legal.shape[1]))).reshape(B, W, 32)
    bits = jnp.sum(jnp.where(padded, jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32), jnp.uint32(0)), axis=2)
    return mask | bits.astype(jnp.uint32)


def _decide(mask: jax.Array, tables: FenceTables, at: FenceState, spans: jax.Array) -> jax.Array:
    """Add the dependent tokens that the rows' own stacks allow, a chunk at a time."""
    B, K = mask.shape[0], DEPENDENT_CHUNK
    dependent, start = jnp.asarray(tables.dependent), jnp.asarray(tables.token_start)
    several = jax.tree.map(lambda part: jnp.repeat(jnp.asarray(part), K, axis=0), at)  # B * K walkers
    rows = jnp.arange(B, dtype=jnp.int32)[:, None]

    def chunk(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, mask = carry
        place = done + jnp.arange(K, dtype=jnp.int32)[None]  # [1, K]
        real = place < spans[:, 1:2]  # [B, K]
        token = dependent[jnp.minimum(spans[:, :1] + place, dependent.shape[0] - 1)]
        begin = jnp.where(real, start[token], 0).reshape(-1)
        end = jnp.where(real, start[token + 1], 0).reshape(-1)
        alive = (jnp.asarray(_walk(tables, several, begin, end).state) != DEAD).reshape(B, K) & real
        bit = jnp.where(alive, jnp.uint32(1) << (token % 32).astype(jnp.uint32), jnp.uint32(0))
        return done + K, mask.at[rows, token // 32].add(bit)  # each bit at most once: an addition sets it

    most = jnp.max(spans[:, 1])
    return lax.while_loop(lambda carry: carry[0] < most, chunk, (jnp.int32(0), mask))[1]


def _walk(tables: FenceTables, at: FenceState, begin: jax.Array, end: jax.Array) -> FenceState:
    """N walkers, each along its own bytes begin[n] .. end[n] of the vocabulary."""
    token_bytes, edges = jnp.asarray(tables.token_bytes), jnp.asarray(tables.edges)

    def step(i: jax.Array, at: FenceState) -> FenceState:
        live = begin + i < end
        byte = token_bytes[jnp.where(live, begin + i, 0)].astype(jnp.int32)
        edge = edges[jnp.asarray(at.state), byte]
        special = live & (edge < 0)
        moved = replace(at, state=jnp.where(live & (edge >= 0), edge, at.state))
        return lax.cond(jnp.any(special), _take, lambda at, *_: at, moved, tables, jnp.where(special, ~edge, -1))

    at = jax.tree.map(jnp.asarray, at)
    return lax.fori_loop(0, jnp.max(end - begin), step, at)


def _take(at: FenceState, tables: FenceTables, edge: jax.Array) -> FenceState:
    """Walkers with an edge (i32[N], -1 for none) take it, or the first of its alternatives whose guard holds."""
    special = jnp.asarray(tables.special)
    stack, depth = jnp.asarray(at.stack), jnp.asarray(at.depth)
    n = jnp.arange(depth.shape[0], dtype=jnp.int32)
    top = stack[n, depth]

    def undecided(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(carry[1])

    def try_next(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        edge, open_ones = carry
        held = _holds(tables, special[edge], top, depth)
        edge = jnp.where(open_ones & ~held, special[edge, 6], edge)
        return edge, open_ones & ~held & (edge >= 0)

    taken, _ = lax.while_loop(undecided, try_next, (edge, edge >= 0))
    row = special[jnp.maximum(taken, 0)]
    target, push, pop = row[:, 0], row[:, 4], row[:, 5]
    walking = edge >= 0
    goes = walking & (taken >= 0) & jnp.where(pop >= 0, depth > 0, True) & ((push < 0) | (depth < MAX_DEPTH))
    changed = jnp.stack([top[:, 0], top[:, 1] | row[:, 1], top[:, 2] | row[:, 2], top[:, 3] + row[:, 3]], axis=1)
    stack = stack.at[n, depth].set(jnp.where((goes & (pop < 0))[:, None], changed, top))
    below = jnp.minimum(depth + 1, MAX_DEPTH)
    fresh = jnp.stack([push, *([jnp.zeros_like(push)] * 3)], axis=1)
    pushes = goes & (push >= 0)
    stack = stack.at[n, below].set(jnp.where(pushes[:, None], fresh, stack[n, below]))
    returned = jnp.asarray(tables.returns)[top[:, RETURNS], jnp.maximum(pop, 0)]
    state = jnp.where(pop >= 0, returned, target)
    return FenceState(
        state=jnp.where(walking, jnp.where(goes, state, DEAD), at.state),
        depth=depth + pushes.astype(jnp.int32) - (goes & (pop >= 0)).astype(jnp.int32),
        stack=stack,
    )


def _holds(tables: FenceTables, row: jax.Array, top: jax.Array, depth: jax.Array) -> jax.Array:
    """Whether one of an edge's conditions holds, bool[N]; without any, True. row: i32[N, 9] of `special`."""
    conditions = jnp.asarray(tables.conditions)
    first, count = row[:, 7], row[:, 8]
    low, high = top[:, USED_LOW], top[:, USED_HIGH]

    def one(i: jax.Array, held: jax.Array) -> jax.Array:
        c = conditions[jnp.minimum(first + i, conditions.shape[0] - 1)]
        missing = _ones(c[:, 6] & ~low) + _ones(c[:, 7] & ~high)
        clear = ((c[:, 2] | c[:, 3]) == 0) | (((c[:, 2] & ~low) | (c[:, 3] & ~high)) != 0)
        good = (((c[:, 0] & ~low) | (c[:, 1] & ~high)) == 0) & clear
        good &= (top[:, COUNT] >= c[:, 4]) & ((c[:, 5] < 0) | (top[:, COUNT] + missing <= c[:, 5]))
        return held | (good & (depth + c[:, 8] <= MAX_DEPTH) & (i < count))

    return lax.fori_loop(0, jnp.max(count), one, count == 0)


def _ones(bits: jax.Array) -> jax.Array:
    return lax.population_count(bits)
