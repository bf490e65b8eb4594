"""The TPU kernel: each of 128 lanes keeps its own winner and its own softmax total; lanes meet once, at the end."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._common.bits import WORD_BITS
from pallas_kernels.masked_sampler.config import LANES
from pallas_kernels.masked_sampler.noise import gumbel

WORDS_PER_CHUNK = LANES // WORD_BITS
LOWEST = float(jnp.finfo(jnp.float32).min)
NO_ID = jnp.iinfo(jnp.int32).max


def masked_sampler_kernel(
    logits_ref: Any,  # [R, tokens of a tile], R rows
    mask_ref: Any,  # u32[R, words of a tile]
    temperature_ref: Any,  # f32[R, 1]
    seeds_ref: Any,  # u32[R, 2]
    ids_ref: Any,  # i32[R, 1]
    logprob_ref: Any,  # f32[R, 1]
    score_ref: Any,  # f32[R, 128], the best noisy logit so far
    winner_ref: Any,  # i32[R, 128], its token
    logit_ref: Any,  # f32[R, 128], its logit
    top_ref: Any,  # f32[R, 128], the largest logit so far
    total_ref: Any,  # f32[R, 128], the sum of exp(logit - top)
    *,
    vocab_size: int,
) -> None:
    """Fold one tile of the vocabulary, in chunks of one register tile."""
    tile = pl.program_id(1)
    shape = score_ref.shape
    tokens_per_tile = logits_ref.shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)

    @pl.when(tile == 0)
    def _() -> None:
        score_ref[...] = jnp.full(shape, -jnp.inf)
        winner_ref[...] = jnp.full(shape, NO_ID)
        logit_ref[...] = jnp.full(shape, -jnp.inf)
        top_ref[...] = jnp.full(shape, LOWEST)  # finite: -inf - -inf is NaN
        total_ref[...] = jnp.zeros(shape)

    random = jnp.broadcast_to(temperature_ref[...] > 0, shape)
    divisor = jnp.where(random, jnp.broadcast_to(temperature_ref[...], shape), 1.0)
    key = (jnp.broadcast_to(seeds_ref[:, 0:1], shape), jnp.broadcast_to(seeds_ref[:, 1:2], shape))
    bit = jax.lax.rem(lane, WORD_BITS).astype(jnp.uint32)

    def fold(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        best, winner, winner_logit, top, total = carry
        # 128 tokens have the bits of 4 words: lane 70 needs bit 6 of word 2, 70 = 2 * 32 + 6. Each lane gathers its
        # word out of the 128 around it, which is one register permutation.
        group = jax.lax.div(chunk, WORD_BITS)
        words = mask_ref[:, pl.ds(pl.multiple_of(group * LANES, LANES), LANES)]
        source = jax.lax.rem(chunk, WORD_BITS) * WORDS_PER_CHUNK + jax.lax.div(lane, WORD_BITS)
        words = jnp.take_along_axis(words, source, axis=1, mode="promise_in_bounds")
        token = tile * tokens_per_tile + chunk * LANES + lane
        legal = (((words >> bit) & jnp.uint32(1)) != 0) & (token < vocab_size)

        logits = logits_ref[:, pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)].astype(jnp.float32)
        tempered = jnp.where(legal, logits / divisor, -jnp.inf)
        score = tempered + jnp.where(random, gumbel(key, token), 0.0)

        better = score > best  # strictly, so that the lower id keeps a tie
        new_top = jnp.maximum(top, tempered)
        return (
            jnp.where(better, score, best),
            jnp.where(better, token, winner),
            jnp.where(better, tempered, winner_logit),
            new_top,
            total * jnp.exp(top - new_top) + jnp.exp(tempered - new_top),
        )

    num_chunks = jnp.minimum(pl.cdiv(vocab_size - tile * tokens_per_tile, LANES), tokens_per_tile // LANES)
    state_refs = (score_ref, winner_ref, logit_ref, top_ref, total_ref)
    state = jax.lax.fori_loop(0, num_chunks, fold, tuple(ref[...] for ref in state_refs))
    for ref, value in zip(state_refs, state, strict=True):
        ref[...] = value

    @pl.when(tile == pl.num_programs(1) - 1)
    def _() -> None:
        lane_best, lane_winner, lane_logit, lane_top, lane_total = state
        best = jnp.max(lane_best, axis=1, keepdims=True)
        winner = jnp.min(jnp.where(lane_best == best, lane_winner, NO_ID), axis=1, keepdims=True)
        logit = jnp.max(jnp.where(lane_winner == winner, lane_logit, -jnp.inf), axis=1, keepdims=True)
        top = jnp.max(lane_top, axis=1, keepdims=True)
        total = jnp.sum(lane_total * jnp.exp(lane_top - top), axis=1, keepdims=True)
        ok = (total > 0) & (total < jnp.inf)  # false for NaN too: a legal logit was NaN or +inf
        ids_ref[...] = jnp.where(ok, winner, -1)
        logprob_ref[...] = jnp.where(ok, logit - top - jnp.log(total), -jnp.inf)
