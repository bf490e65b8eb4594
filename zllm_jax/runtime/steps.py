"""The functional core: `prefill` and `decode`, pure functions `(params, state, inputs) -> (state, outputs)`.

Both are jit-able by anyone: `cfg` is static, `state` is meant to be donated. Nothing here knows where pages come
from or who asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zllm_jax.config import ModelConfig
from zllm_jax.fence import FREE, FenceState, FenceTables, fence_advance, fence_mask, rows_begin
from zllm_jax.runtime import loops
from zllm_jax.runtime.batch import Batch, chunk_batch
from zllm_jax.runtime.layers import logits_of
from zllm_jax.runtime.models import architecture
from zllm_jax.runtime.sampling import Sampled, SamplingParams, no_sample, sample
from zllm_jax.runtime.specs import LayerSpec
from zllm_jax.runtime.stages import cut
from zllm_jax.runtime.state import History, LayerState, State

Params = Mapping[str, Any]
_ALL = np.uint32(0xFFFFFFFF)  # a mask's word that forbids nothing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillInputs:
    """One chunk of one sequence: `count` of `tokens` i32[T] are real and stand at `start`.

    table i32[M], ring i32, slot i32; sampling: one row; last: sample a token after this chunk. fence: one row, where
    the output stands after this chunk; None where nothing is fenced. watch: likewise, for loops.
    """

    tokens: jax.Array
    start: jax.Array
    count: jax.Array
    table: jax.Array
    ring: jax.Array
    slot: jax.Array
    sampling: SamplingParams
    last: jax.Array
    fence: FenceState | None = None
    watch: loops.Watch | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Passing:
    """What goes from one stage to the next: hidden states x, [1, T, D] of a chunk or [B, 1, D] of a decode step, and
    where the tokens stand.
    """

    x: jax.Array
    batch: Batch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeInputs:
    """B rows, each with the token to feed and its position. A row with budget 0 is idle.

    tokens, positions, rings, slots, budget: i32[B]; table: i32[B, M]; stop_ids: i32[B, E], -1 where unused;
    steps: i32, at most the compiled number of steps; fence: where each row's output stands; watch: for loops; pauses:
    bool[B], rows that stop where their fence may force a run.
    """

    tokens: jax.Array
    positions: jax.Array
    table: jax.Array
    rings: jax.Array
    slots: jax.Array
    budget: jax.Array
    stop_ids: jax.Array
    sampling: SamplingParams
    steps: jax.Array
    fence: FenceState | None = None
    watch: loops.Watch | None = None
    pauses: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoded:
    """What n steps drew: `sampled` arrays with a leading step axis, and how many tokens each row emitted, i32[B]."""

    sampled: Sampled
    emitted: jax.Array


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Hidden [B, D] -> f32[B, V]."""
    return logits_of(hidden, params["head"] if "head" in params else params["embed"])


def forward(
    params: Params, layers: tuple[LayerState, ...], batch: Batch, cfg: ModelConfig
) -> tuple[jax.Array, tuple[LayerState, ...]]:
    """Hidden states ready for the head [B, T, D], and all layers' states with the batch's rows written."""
    model = architecture(cfg)
    x = model.embed(params, batch, cfg)
    x, layers = model.blocks(params["layers"], layers, x, batch, cfg, model.state_spec(cfg).layers)
    return model.finish(params, x, cfg), layers


def begin_chunk(params: Params, inputs: PrefillInputs, *, cfg: ModelConfig) -> Passing:
    """What enters the first stage. Of `params` only the embedding is used."""
    batch = chunk_batch(inputs.tokens, inputs.start, inputs.count, inputs.table, inputs.ring)
    return Passing(architecture(cfg).embed(params, batch, cfg), batch)


def run_stage(
    weights: Any, layers: tuple[LayerState, ...], passing: Passing, *, cfg: ModelConfig, kinds: tuple[LayerSpec, ...]
) -> tuple[tuple[LayerState, ...], Passing]:
    """Consecutive layers of `kinds`: their weights and states, and what passes from one to the next."""
    x, layers = architecture(cfg).blocks(weights, layers, passing.x, passing.batch, cfg, kinds)
    return layers, Passing(x, passing.batch)


def draw_first(
    params: Params,
    history: History,
    x: jax.Array,
    inputs: PrefillInputs,
    *,
    cfg: ModelConfig,
    fences: FenceTables | None = None,
    words: jax.Array | None = None,
    allowed: jax.Array | None = None,
) -> tuple[History, Sampled]:
    """The token after a chunk's last one. Of `params` only what comes after the layers is used.

    allowed: u32[1, W], what a host allows besides; all ones where it says nothing.
    """
    row = jax.lax.dynamic_slice_in_dim(x, inputs.count - 1, 1, axis=1)  # [1, 1, D]
    hidden = architecture(cfg).finish(params, row, cfg)[:, 0]
    slots, position = inputs.slot[None], (inputs.start + inputs.count)[None]
    live = jnp.asarray(inputs.last)[None]
    mask, masked = _allowed(fences, inputs.fence, allowed)
    seen, mask, masked = _unlooped(history, slots, live, inputs.watch, mask, masked, cfg.vocab_size)
    sampled = sample(logits(params, hidden), inputs.sampling, history, slots, position, mask, masked)
    return _count(history, slots, sampled.ids, live, seen, words), sampled


def begin_rows(params: Params, inputs: DecodeInputs, *, cfg: ModelConfig) -> Passing:
    """What enters the first stage of one decode step that is computed in parts. Only the embedding is used."""
    batch = _rows_batch(inputs.tokens, inputs.positions, inputs.budget > 0, inputs)
    return Passing(architecture(cfg).embed(params, batch, cfg), batch)


def draw_rows(
    params: Params,
    history: History,
    x: jax.Array,
    inputs: DecodeInputs,
    allowed: jax.Array,
    *,
    cfg: ModelConfig,
    fences: FenceTables | None = None,
    words: jax.Array | None = None,
) -> tuple[History, Sampled]:
    """The end of a decode step in parts: one token a row. allowed: u32[B, W], as `draw_first` has it."""
    hidden = architecture(cfg).finish(params, x, cfg)[:, 0]
    slots, live = inputs.slots, inputs.budget > 0
    mask, masked = _allowed(fences, inputs.fence, allowed)
    seen, mask, masked = _unlooped(history, slots, live, inputs.watch, mask, masked, cfg.vocab_size)
    sampled = sample(logits(params, hidden), inputs.sampling, history, slots, inputs.positions + 1, mask, masked)
    return _count(history, slots, sampled.ids, live, seen, words), sampled


def prefill(
    params: Params,
    state: State,
    inputs: PrefillInputs,
    *,
    cfg: ModelConfig,
    fences: FenceTables | None = None,
    words: jax.Array | None = None,
) -> tuple[State, Sampled]:
    """Write one chunk's rows into the state; after the last chunk, draw the first token."""
    layers, passing = state.layers, begin_chunk(params, inputs, cfg=cfg)
    for stage in cut(architecture(cfg).state_spec(cfg)):
        mine, passing = run_stage(stage.of(params["layers"]), stage.of(layers), passing, cfg=cfg, kinds=stage.kinds)
        layers = stage.put(layers, mine)

    def draw(history: History, x: jax.Array) -> tuple[History, Sampled]:
        return draw_first(params, history, x, inputs, cfg=cfg, fences=fences, words=words)

    def wait(history: History, x: jax.Array) -> tuple[History, Sampled]:
        return history, no_sample(1, cfg.vocab_size)

    history, sampled = jax.lax.cond(inputs.last, draw, wait, state.history, passing.x)
    return State(layers, history), sampled


def prefill_logits(params: Params, state: State, inputs: PrefillInputs, *, cfg: ModelConfig) -> tuple[State, jax.Array]:
    """As `prefill`, but returns the logits of every position of the chunk, f32[T, V] (for scoring and tests)."""
    batch = chunk_batch(inputs.tokens, inputs.start, inputs.count, inputs.table, inputs.ring)
    hidden, layers = forward(params, state.layers, batch, cfg)
    return State(layers, state.history), logits(params, hidden[0])


def decode(
    params: Params,
    state: State,
    inputs: DecodeInputs,
    *,
    cfg: ModelConfig,
    max_steps: int,
    fences: FenceTables | None = None,
    words: jax.Array | None = None,
) -> tuple[State, Decoded]:
    """Up to `inputs.steps` steps without leaving the device; stops early when every row has finished.

    A row finishes after drawing one of its stop ids, when its budget is used, or where it pauses. The last token that a
    row draws is not fed: the state holds the rows of all tokens before it. Fences are followed from step to step;
    without `fences` no row has one. words: bool[V], which tokens are words to the loop guard; without a guard in the
    state, unused.
    """
    B = inputs.tokens.shape[0]
    empty = no_sample(B, cfg.vocab_size)
    room = jax.tree.map(lambda x: jnp.zeros((max_steps, *x.shape), x.dtype), empty)

    def alive(carry: tuple[Any, ...]) -> jax.Array:
        step, _, _, left, *_ = carry
        return (step < inputs.steps) & jnp.any(left > 0)

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, state, (tokens, positions), left, fence, watch, out = carry
        live = left > 0
        batch = _rows_batch(tokens, positions, live, inputs)
        hidden, layers = forward(params, state.layers, batch, cfg)
        history, slots = state.history, inputs.slots
        mask, fenced = _allowed(fences, fence)
        seen, mask, masked = _unlooped(history, slots, live, watch, mask, fenced, cfg.vocab_size)
        sampled = sample(logits(params, hidden[:, 0]), inputs.sampling, history, slots, positions + 1, mask, masked)
        if fenced is not None:
            fence = jax.lax.cond(fenced, fence_advance, lambda _, at, *__: at, fences, fence, sampled.ids)
        if seen is not None:
            watch = loops.followed(watch, sampled.ids)
        state = State(layers, _count(history, slots, sampled.ids, live, seen, words))
        out = jax.tree.map(lambda room, new: room.at[step].set(new), out, sampled)
        stopped = jnp.any(sampled.ids[:, None] == inputs.stop_ids, axis=1)
        if fences is not None and inputs.pauses is not None:
            stopped |= inputs.pauses & jnp.asarray(fences.pauses)[fence.state]
        fed = (jnp.where(live, sampled.ids, tokens), positions + live.astype(jnp.int32))
        return step + 1, state, fed, jnp.where(stopped, 0, left - live.astype(jnp.int32)), fence, watch, out

    fence, watch = jax.tree.map(jnp.asarray, (inputs.fence, inputs.watch))
    start = (jnp.int32(0), state, (inputs.tokens, inputs.positions), inputs.budget, fence, watch, room)
    _, state, (_, positions), _, _, _, out = jax.lax.while_loop(alive, body, start)
    return state, Decoded(sampled=out, emitted=positions - inputs.positions)


def _rows_batch(tokens: jax.Array, positions: jax.Array, live: jax.Array, inputs: DecodeInputs) -> Batch:
    """One token of each row."""
    return Batch(tokens[:, None], positions[:, None], live[:, None], inputs.table, inputs.rings)


def _allowed(
    fences: FenceTables | None, at: FenceState | None, allowed: jax.Array | None = None
) -> tuple[jax.Array | None, jax.Array | None]:
    """The mask of each row, and whether some row has a fence at all: without one nothing is computed.

    Where what the tables and a host allow leaves nothing, EOS, so that a row that is stuck can end.
    """
    if fences is None or at is None:
        return None, None
    masked = jnp.any(jnp.asarray(at.state) != FREE)
    shape = (jnp.asarray(at.state).shape[0], jnp.asarray(fences.masks).shape[1])
    mask = jax.lax.cond(masked, fence_mask, lambda *_: jnp.full(shape, _ALL, jnp.uint32), fences, at)
    if allowed is None:
        return mask, masked
    both = mask & allowed
    both = jnp.where(jnp.any(both != 0, axis=1)[:, None], both, jnp.asarray(fences.eos)[None])
    return both, masked | jnp.any(allowed != _ALL)


def _unlooped(
    history: History,
    slots: jax.Array,
    live: jax.Array,
    watch: loops.Watch | None,
    mask: jax.Array | None,
    masked: jax.Array | None,
    vocab_size: int,
) -> tuple[loops.Seen | None, jax.Array | None, jax.Array | None]:
    """What the loop guard says, and the mask without what it excludes."""
    if history.guard is None or watch is None:
        return None, mask, masked
    seen = loops.look(history.guard, slots, live, watch)
    return seen, *loops.narrowed(seen, watch, mask, masked, vocab_size)


def begin_slot(history: History, slot: jax.Array, tokens: jax.Array) -> History:
    """Forget what a slot's last sequence left, and note the new prompt for the penalties: tokens i32[S], -1 padded."""
    seen, guard = history.prompt_seen, history.guard
    vocab = seen.shape[1]
    row = jnp.zeros(vocab, jnp.bool_).at[jnp.where(tokens < 0, vocab, tokens)].set(True, mode="drop")
    return History(
        prompt_seen=seen.at[slot].set(row),
        output_counts=history.output_counts.at[slot].set(0),
        guard=None if guard is None else rows_begin(guard, slot),
    )


def _count(
    history: History,
    slots: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    seen: loops.Seen | None,
    words: jax.Array | None,
) -> History:
    """With what was drawn."""
    slots = jnp.where(live, slots, history.output_counts.shape[0])
    counts = history.output_counts.at[slots, ids].add(1, mode="drop")
    if history.guard is None or seen is None or words is None:
        return replace(history, output_counts=counts)
    return replace(history, output_counts=counts, guard=loops.told(history.guard, seen, words, ids))
