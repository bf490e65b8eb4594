"""The loop guard: sees a generation that only repeats itself, and excludes the token that would go on repeating.

It never looks at a grammar, and a grammar never looks at it; `combine` in `guard_device` joins their masks. Here stand
the thresholds and the host's form, which defines the machine; `guard_device` does the same on arrays.

Two things are loops.

*A pattern*: the last tokens have a period p, and the repeated stretch is long. How long depends on the words in one
period, because that is what tells a loop from a ruler: `----`, zeros, table separators and empty cells repeat without
saying anything, and do so legally for hundreds of tokens; a sentence that repeats exactly has no such excuse. Records
with the same keys differ in their values, so they have no period at all.

*A restart*: a passage that came several times before comes again, at whatever distance. Each context of a few tokens
remembers what followed it and how often; where a long stretch of prose was foreseen that way, token by token, it is a
recital. Boilerplate between values is too short to count, and patterns are too poor in words.

Each loop that was broken makes the next one be seen sooner (half, then a quarter of the length).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

NO_TOKEN = -1
MULTIPLIER = 0x9E3779B1  # of the hash of a context, modulo 2**32: odd, near 2**32 / golden ratio
MAX_HALVINGS = 2


@dataclass(frozen=True)
class LoopGuard:
    """The thresholds; lengths in tokens.

    max_period: the longest pattern that is looked for.
    min_repeats: a pattern stands at least so many times.
    prose_words: with so many distinct words, a pattern is prose.
    prose_tokens, chant_tokens, symbol_tokens: the repeated stretch, its first time not included, that is too long for
        prose, for fewer words ("ha ha ha", empty cells), and for none at all (rulers, zeros).
    context: by so many tokens a place in a passage is known again; num_slots places are remembered, the latest ones.
    passage_tokens: a stretch so long, of which each token followed its context `passage_seen` times before, with at
        least `passage_words` distinct words in it (in its last `max_period` tokens), is a restart.
    end_after: so many broken loops end a region of thinking.

    Raises `ValueError` where a threshold makes no sense.
    """

    max_period: int = 256
    min_repeats: int = 4
    prose_words: int = 4
    prose_tokens: int = 192
    chant_tokens: int = 384
    symbol_tokens: int = 1536
    context: int = 8
    num_slots: int = 8192
    passage_tokens: int = 64
    passage_seen: int = 3
    passage_words: int = 16
    end_after: int = 2

    def __post_init__(self) -> None:
        if small := [name for name in self.__dataclass_fields__ if getattr(self, name) < 1]:
            raise ValueError(f"{small[0]} is {getattr(self, small[0])}: a threshold of the loop guard is at least 1")
        if not self.prose_tokens <= self.chant_tokens <= self.symbol_tokens:
            raise ValueError(
                f"prose_tokens {self.prose_tokens}, chant_tokens {self.chant_tokens}, symbol_tokens "
                f"{self.symbol_tokens}: the more words a pattern has, the sooner it is a loop"
            )
        if self.min_repeats < 2 or self.context > self.max_period:
            raise ValueError(
                f"min_repeats {self.min_repeats} is at least 2, context {self.context} at most max_period "
                f"{self.max_period}"
            )
        if self.num_slots & (self.num_slots - 1):
            raise ValueError(f"num_slots is {self.num_slots}: a power of two")


def word_tokens(vocabulary: Sequence[bytes]) -> npt.NDArray[np.bool_]:
    """Which tokens count as words, bool[V]: they hold letters, two of them in a row and not all capitals if ASCII.

    Capitals and single letters are what base64, hex digits and plots are made of. A token that is a part of a
    character counts where it begins a letter.
    """
    return np.fromiter(map(_is_word, vocabulary), np.bool_, len(vocabulary))


def _is_word(token: bytes) -> bool:
    try:
        text = token.decode("utf-8").strip()
    except UnicodeDecodeError:
        return begins_letter(token)
    letters = "".join(char for char in text if char.isalpha())
    if not letters.isascii():
        return True
    return len(letters) >= 2 and letters in text and not letters.isupper()


def begins_letter(token: bytes) -> bool:
    """Whether the first non-ASCII byte begins a character of a script rather than a symbol or an emoji."""
    first = next(byte for byte in token if byte >= 0x80)
    return 0xC3 <= first <= 0xE1 or 0xE3 <= first <= 0xED


@dataclass(frozen=True, eq=False)
class GuardState:
    """What the guard remembers of a text: a value. The latest token is first.

    Places: `slot_context`, `slot_next` and `slot_count` of each remembered place hold the hash of its context, what
    followed it, and how often.
    """

    recent: npt.NDArray[np.int32]  # [max_period]; NO_TOKEN before the beginning
    fresh: npt.NDArray[np.bool_]  # [max_period], a word that came no later again
    matched: npt.NDArray[np.int32]  # [max_period], how many of the last tokens equal the one p + 1 before them
    slot_context: npt.NDArray[np.uint32]  # [num_slots]
    slot_next: npt.NDArray[np.int32]  # [num_slots]
    slot_count: npt.NDArray[np.int32]  # [num_slots]
    # Tokens that followed their context before, `context` less for each that did not: a place lost to another one that
    # shares its slot costs little, a new token, which changes as many contexts, nearly all.
    foreseen: int
    broken: int  # loops that were left


def guard_start(guard: LoopGuard) -> GuardState:
    """Nothing was generated yet."""
    P, S = guard.max_period, guard.num_slots
    return GuardState(
        recent=np.full(P, NO_TOKEN, np.int32),
        fresh=np.zeros(P, np.bool_),
        matched=np.zeros(P, np.int32),
        slot_context=np.zeros(S, np.uint32),
        slot_next=np.full(S, NO_TOKEN, np.int32),
        slot_count=np.zeros(S, np.int32),
        foreseen=0,
        broken=0,
    )


def guard_advance(guard: LoopGuard, words: npt.NDArray[np.bool_], state: GuardState, token: int) -> GuardState:
    """The state after `token`. `words`: what `word_tokens` gave for the vocabulary."""
    excluded = guard_excluded(guard, state)
    state = _remember(guard, state, token)
    same = state.recent == token
    return replace(
        state,
        recent=np.concatenate([[np.int32(token)], state.recent[:-1]]),
        fresh=np.concatenate([[words[token]], (state.fresh & ~same)[:-1]]),
        matched=np.where(same, state.matched + 1, 0).astype(np.int32),
        broken=state.broken + (bool(excluded) and token not in excluded),
    )


def guard_excluded(guard: LoopGuard, state: GuardState) -> frozenset[int]:
    """The tokens that would continue a loop: at most one for the pattern, and one for the restart."""
    return frozenset(_next_of_pattern(guard, state) | _next_of_passage(guard, state))


def guard_ends(guard: LoopGuard, state: GuardState) -> bool:
    """Whether a region of thinking should end here: it broke out of loops and is in one again."""
    return state.broken >= guard.end_after and bool(guard_excluded(guard, state))


def context_hash(guard: LoopGuard, recent: npt.NDArray[np.int32]) -> int:
    """Of the last `context` tokens, modulo 2**32; never 0, which no place has."""
    value = 1
    for token in recent[: guard.context].tolist():
        value = ((value ^ (token & 0xFFFFFFFF)) * MULTIPLIER) & 0xFFFFFFFF
        value ^= value >> 15
    return value | 1


def slot_of(guard: LoopGuard, context: int) -> int:
    return (context >> 8) & (guard.num_slots - 1)


def _halvings(state: GuardState) -> int:
    return min(state.broken, MAX_HALVINGS)


def _next_of_pattern(guard: LoopGuard, state: GuardState) -> set[int]:
    periods = np.arange(1, guard.max_period + 1)
    num_words = np.cumsum(state.fresh)  # distinct words in the last p tokens
    too_long = np.where(
        num_words >= guard.prose_words,
        guard.prose_tokens,
        np.where(num_words > 0, guard.chant_tokens, guard.symbol_tokens),
    )
    loops = (state.matched >= too_long >> _halvings(state)) & (state.matched >= periods * (guard.min_repeats - 1))
    # Two periods of one long stretch have a common divisor that is one too, so they foresee the same token.
    return {int(state.recent[np.argmax(loops)])} if loops.any() else set()


def _next_of_passage(guard: LoopGuard, state: GuardState) -> set[int]:
    context = context_hash(guard, state.recent)
    slot = slot_of(guard, context)
    known = int(state.slot_context[slot]) == context and state.slot_count[slot] >= guard.passage_seen
    recites = state.foreseen >= guard.passage_tokens >> _halvings(state)
    num_words = state.fresh[: max(1, state.foreseen)].sum()
    if known and recites and num_words >= guard.passage_words:
        return {int(state.slot_next[slot])}
    return set()


def _remember(guard: LoopGuard, state: GuardState, token: int) -> GuardState:
    """With `token` as what follows the present context."""
    context = context_hash(guard, state.recent)
    slot = slot_of(guard, context)
    again = int(state.slot_context[slot]) == context and int(state.slot_next[slot]) == token
    count = int(state.slot_count[slot]) if again else 0
    return replace(
        state,
        slot_context=_with(state.slot_context, slot, context),
        slot_next=_with(state.slot_next, slot, token),
        slot_count=_with(state.slot_count, slot, count + 1),
        foreseen=state.foreseen + 1 if count >= guard.passage_seen else max(0, state.foreseen - guard.context),
    )


_Array = TypeVar("_Array", npt.NDArray[np.uint32], npt.NDArray[np.int32])


def _with(array: _Array, index: int, value: int) -> _Array:
    changed = array.copy()
    changed[index] = value
    return changed
