"""Byte automata x a vocabulary -> token tables (numpy; runs once per grammar, on the host)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zllm_jax.fence.automaton import DEAD, ByteAutomaton
from zllm_jax.fence.device import TokenAutomaton

FREE = 1  # in every table: the state of a row without a fence, where all is legal


@dataclass(frozen=True, eq=False)
class Fences:
    """Several automata in one table, so that rows of one batch may each follow their own.

    tables: what the device step reads, in numpy until `jax.device_put`.
    starts: the first state of each automaton; a row without one starts in `FREE`.
    """

    tables: TokenAutomaton
    starts: tuple[int, ...]


def compile_fences(automata: Sequence[ByteAutomaton], vocabulary: Sequence[bytes], eos_ids: Iterable[int]) -> Fences:
    """Build the tables of `automata` over `vocabulary`.

    vocabulary: the bytes of every token, b"" for a special, which no text ever matches.
    eos_ids: legal exactly in accepting states.

    A token is legal where each of its bytes has a transition and the text can still be completed with this
    vocabulary, so that no legal choice leads to a state without one. Raises `ValueError` where even the first
    state of an automaton cannot be completed.
    """
    transitions, accepting, starts = _join(automata)
    eos_ids = list(eos_ids)
    eos = np.zeros(len(vocabulary), np.bool_)
    eos[eos_ids] = True
    if any(vocabulary[token] for token in eos_ids):
        raise ValueError("an EOS token has bytes: give it as b'', it stands for no text")
    token_bytes, token_start = _flatten(vocabulary)
    targets = _walk(transitions, token_bytes, token_start)  # i32[Q, V]
    legal = _completable(targets, accepting)[targets] | (accepting[:, None] & eos)
    legal[FREE] = True
    for i, start in enumerate(starts):
        if not legal[start].any():
            raise ValueError(f"automaton {i} cannot be completed with this vocabulary: no token may come first")
    tables = TokenAutomaton(
        masks=pack_bits(legal),
        transitions=transitions,
        accepting=accepting,
        token_bytes=token_bytes,
        token_start=token_start,
    )
    return Fences(tables, starts)


def pack_bits(bits: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """bool[..., V] -> u32[..., W], W = ceil(V/32): bit i of word w is token 32w + i, bits beyond V are 0.

    >>> pack_bits(np.array([True, False, True])).tolist()
    [5]
    """
    *rows, num_tokens = bits.shape
    num_words = -(-num_tokens // 32)
    padded = np.zeros((*rows, num_words * 32), np.bool_)
    padded[..., :num_tokens] = bits
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def unpack_bits(words: npt.NDArray[np.uint32], num_tokens: int) -> npt.NDArray[np.bool_]:
    """u32[..., W] -> bool[..., V]: the inverse of `pack_bits`."""
    octets = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=num_tokens, bitorder="little").astype(np.bool_)


def _join(
    automata: Sequence[ByteAutomaton],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_], tuple[int, ...]]:
    """One numbering for all: `DEAD`, `FREE`, then the states of each automaton but its `DEAD`."""
    transitions = [np.array([[DEAD] * 256, [FREE] * 256], np.int32)]
    accepting = [np.array([False, True])]
    starts = []
    offset = 1  # what is added to a state; its own 0 stays the common DEAD
    for automaton in automata:
        moved = np.where(automaton.transitions == DEAD, DEAD, automaton.transitions + offset)
        transitions.append(moved[1:].astype(np.int32))
        accepting.append(automaton.accepting[1:])
        starts.append(automaton.start + offset)
        offset += automaton.num_states - 1
    return np.concatenate(transitions), np.concatenate(accepting), tuple(starts)


def _flatten(vocabulary: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """All tokens' bytes one after the other, u8, and where each token's begin, i32[V + 1]."""
    lengths = np.fromiter(map(len, vocabulary), np.int32, len(vocabulary))
    token_start = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    # One byte at the end keeps reads in range for specials, whose bytes are never used.
    return np.frombuffer(b"".join(vocabulary) + b"\0", np.uint8), token_start


def _walk(
    transitions: npt.NDArray[np.int32], token_bytes: npt.NDArray[np.uint8], token_start: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """The state after each token from each state, i32[Q, V]; `DEAD` for specials."""
    lengths = np.diff(token_start)
    states = np.arange(len(transitions), dtype=np.int32)[:, None]
    targets = np.where(lengths > 0, states, DEAD).astype(np.int32)
    for position in range(int(lengths.max(initial=0))):
        tokens = np.flatnonzero(lengths > position)
        targets[:, tokens] = transitions[targets[:, tokens], token_bytes[token_start[tokens] + position]]
    return targets


def _completable(targets: npt.NDArray[np.int32], accepting: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The states from which some tokens lead to an accepting one: the least fixed point, bool[Q]."""
    completable = accepting
    while True:
        grown = completable | completable[targets].any(axis=1)
        if (grown == completable).all():
            return completable
        completable = grown
