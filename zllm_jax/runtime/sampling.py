"""The sampler: logits in, one token id a row out, all on the device, each row with its own parameters.

Order: bias, penalties, grammar mask, temperature, top-k, top-p, min-p, Gumbel noise, argmax. The expensive parts run
only when some row asks for them. Thresholds are found by bisection over the float's bits, which is exact and
needs no sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from zllm_jax.runtime.state import History
from zllm_jax.values import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, Sampling

_OFF = -jnp.inf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingParams:
    """One row a sequence: f32[B] and i32[B] arrays of `Sampling`, u32[B, 2] seeds, and up to X logit biases."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    seed: jax.Array  # u32[B, 2]
    bias_ids: jax.Array  # i32[B, X], -1 where unused
    bias_values: jax.Array  # f32[B, X]
    want_logprobs: jax.Array  # bool[B]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """ids i32[B]; its log p under the model's own distribution f32[B], and the most likely ones' (where asked)."""

    ids: jax.Array
    logprob: jax.Array
    top_ids: jax.Array  # i32[B, 20]
    top_logprobs: jax.Array  # f32[B, 20]


def pack_sampling(rows: Sequence[tuple[Sampling, int]]) -> SamplingParams:
    """Host values -> arrays (numpy: they cross with the step's call). Each row is (sampling, seed)."""
    bias_ids = np.full((len(rows), MAX_LOGIT_BIAS), -1, np.int32)
    bias_values = np.zeros((len(rows), MAX_LOGIT_BIAS), np.float32)
    for i, (one, _) in enumerate(rows):
        for j, (token, bias) in enumerate(one.logit_bias):
            bias_ids[i, j], bias_values[i, j] = token, bias

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(one, name) for one, _ in rows], dtype)

    return SamplingParams(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition=column("repetition_penalty", np.float32),
        presence=column("presence_penalty", np.float32),
        frequency=column("frequency_penalty", np.float32),
        seed=np.array([[seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF] for _, seed in rows], np.uint32).reshape(-1, 2),
        bias_ids=bias_ids,
        bias_values=bias_values,
        want_logprobs=np.array([one.logprobs is not None for one, _ in rows], np.bool_),
    )


def sample(
    logits: jax.Array,
    params: SamplingParams,
    history: History,
    slots: jax.Array,
    positions: jax.Array,
    mask: jax.Array | None = None,
    masked: jax.Array | None = None,
) -> Sampled:
    """Draw one token a row.

    logits f32[B, V]; history and `slots` i32[B]: the row of each sequence; positions i32[B]: of the drawn token,
    which with the seed fixes the noise; mask u32[B, W]: bit i of word w allows token 32 w + i; masked: bool, whether
    the mask forbids anything.
    """
    raw = logits
    logits = jax.lax.cond(jnp.any(params.bias_ids >= 0), _add_bias, lambda x, *_: x, logits, params)
    penal = (params.repetition != 1) | (params.presence != 0) | (params.frequency != 0)
    logits = jax.lax.cond(jnp.any(penal), _penalise, lambda x, *_: x, logits, params, history, slots)
    if mask is not None:
        apply = jnp.bool_(True) if masked is None else masked
        logits = jax.lax.cond(apply, _forbid, lambda x, *_: x, logits, mask)
    ids = jax.lax.cond(jnp.any(params.temperature > 0), _draw, _greedy, logits, params, positions)
    logprobs = jax.lax.cond(jnp.any(params.want_logprobs), _logprobs, _no_logprobs, raw, ids)
    return Sampled(ids, *logprobs)


def no_sample(num_rows: int, vocab_size: int) -> Sampled:
    """The shape of `sample`'s result, all zeros."""
    width = min(MAX_TOP_LOGPROBS, vocab_size)
    zeros = jnp.zeros((num_rows, width), jnp.float32)
    ids = jnp.zeros(num_rows, jnp.int32)
    return Sampled(ids, zeros[:, 0], jnp.zeros((num_rows, width), jnp.int32), zeros)


def unpack_mask(mask: jax.Array, vocab_size: int) -> jax.Array:
    """u32[B, W] -> bool[B, V]."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab_size].astype(jnp.bool_)


def _forbid(logits: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(unpack_mask(mask, logits.shape[1]), logits, _OFF)


def _add_bias(logits: jax.Array, params: SamplingParams) -> jax.Array:
    vocab = logits.shape[1]
    ids = jnp.where(params.bias_ids < 0, vocab, params.bias_ids)
    return jax.vmap(lambda row, at, value: row.at[at].add(value, mode="drop"))(logits, ids, params.bias_values)


def _penalise(logits: jax.Array, params: SamplingParams, history: History, slots: jax.Array) -> jax.Array:
    counts = history.output_counts[slots]
    seen = history.prompt_seen[slots] | (counts > 0)
    factor = params.repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - params.frequency[:, None] * counts.astype(jnp.float32)
    return logits - params.presence[:, None] * (counts > 0).astype(jnp.float32)


def _greedy(logits: jax.Array, params: SamplingParams, positions: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _draw(logits: jax.Array, params: SamplingParams, positions: jax.Array) -> jax.Array:
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    cold = params.temperature <= 0
    below = logits - jnp.max(logits, axis=-1, keepdims=True)  # at most 0: no temperature makes two of them +inf
    scaled = below / jnp.where(cold, 1.0, params.temperature)[:, None]
    truncating = ~cold & ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
    scaled = jax.lax.cond(jnp.any(truncating), truncate, lambda x, *_: x, scaled, params)
    drawn = jnp.argmax(scaled + _gumbel(params.seed, positions, logits.shape[1]), axis=-1).astype(jnp.int32)
    return jnp.where(cold, greedy, drawn)


def _gumbel(seed: jax.Array, positions: jax.Array, vocab: int) -> jax.Array:
    """f32[B, V]: a function of (seed, position) alone, so that a row draws the same alone or in any batch."""

    def row(one: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(one, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab,), jnp.float32)

    return jax.vmap(row)(seed, positions)


def truncate(logits: jax.Array, params: SamplingParams) -> jax.Array:
    """Logits f32[B, V] with everything outside top-k, then top-p, then min-p at -inf. Ties at a border are kept."""
    vocab = logits.shape[1]
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocab), vocab)
    ones = jnp.ones_like(logits)
    logits = _keep_heaviest(logits, ones, k.astype(jnp.float32))
    probs = jax.nn.softmax(logits, axis=-1)
    need = jnp.where(params.top_p < 1, params.top_p, jnp.inf)
    logits = _keep_heaviest(logits, probs, need)
    floor = jnp.max(probs, axis=-1) * params.min_p
    return jnp.where(probs >= floor[:, None], logits, _OFF)


def _keep_heaviest(logits: jax.Array, weight: jax.Array, need: jax.Array) -> jax.Array:
    """Keep the largest logits until their weight f32[B, V] reaches `need` f32[B] (all of them, if it never does).

    Bisects the largest threshold t with sum(weight where logit >= t) >= need over the 32 bits of an order-preserving
    integer image of f32.
    """
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    image = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def bit(i: jax.Array, found: jax.Array) -> jax.Array:
        trial = found | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        mass = jnp.sum(jnp.where(image >= trial[:, None], weight, 0.0), axis=-1)
        return jnp.where(mass >= need, trial, found)

    found = jax.lax.fori_loop(0, 32, bit, jnp.zeros(logits.shape[0], jnp.uint32))
    return jnp.where(image >= found[:, None], logits, _OFF)


def _logprobs(logits: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    logp = jax.nn.log_softmax(logits, axis=-1)
    width = min(MAX_TOP_LOGPROBS, logits.shape[1])
    top, top_ids = jax.lax.top_k(logp, width)
    chosen = jnp.take_along_axis(logp, ids[:, None], axis=1)[:, 0]
    return chosen, top_ids.astype(jnp.int32), top


def _no_logprobs(logits: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    none = no_sample(*logits.shape)
    return none.logprob, none.top_ids, none.top_logprobs
