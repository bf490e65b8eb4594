r"""How JSON spells a text: raw characters and escapes, up to the closing quote.

The digits of a `\uXXXX` follow the bits of UTF-8 closely: of a character of three bytes, the first digit is what the
first byte tells; the second digit and half of the third are what the second byte tells. So a state inside an escape is
one or a few states inside the character's bytes, and nothing has to be done for each code point.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from zllm_jax.fence.automaton import DEAD, ByContent, ByteAutomaton
from zllm_jax.fence.regular.algebra import empty, intersect
from zllm_jax.fence.regular.compact import compact, minimal
from zllm_jax.fence.regular.texts import any_text

_SHORT = {0x08: b"b", 0x09: b"t", 0x0A: b"n", 0x0C: b"f", 0x0D: b"r", 0x22: b'"', 0x5C: b"\\", 0x2F: b"/"}
_NOT_UTF8 = "json_string takes texts of valid UTF-8; this automaton holds others"
_NOT_RAW = [*range(0x20), 0x22, 0x5C]
_NOT_PLAIN = [*_NOT_RAW, *range(0x7F, 0x100)]
_DIGITS = (b"0123456789abcdef", b"0123456789ABCDEF")


def json_string(text: ByteAutomaton, *, canonical: bool) -> ByteAutomaton:
    r"""JSON's spellings of the texts of `text` (UTF-8), without the opening quote, with the closing one.

    canonical: the spellings of `json.dumps` only, with or without `ensure_ascii`, chosen for each character; else every
    spelling that JSON allows. Surrogates have none: neither bytes nor a lone escape stand for them.

    >>> from zllm_jax.fence.regular import literal
    >>> [json_string(literal("é/".encode()), canonical=False).accepts(text) for text in (b'\\u00E9\\/"', b'\\u00e9/')]
    [True, False]
    >>> json_string(literal("é/".encode()), canonical=True).accepts(b'\\u00E9\\/"')
    False
    """
    return _spelled(ByContent(text), canonical)


@lru_cache(maxsize=128)
def _spelled(text: ByContent, canonical: bool) -> ByteAutomaton:
    automaton = text.automaton
    if canonical and not automaton.transitions[:, _NOT_PLAIN].any():
        return _closed(automaton)
    if _has_surrogates(automaton):
        automaton = intersect(automaton, any_text())
    if automaton.start == DEAD:
        return empty()
    return _Spelling(automaton, canonical).result()


def _closed(text: ByteAutomaton) -> ByteAutomaton:
    """Texts that have no other spelling than themselves, and the closing quote."""
    end = text.num_states
    rows = np.zeros((end + 1, 256), np.int32)
    rows[:end] = text.transitions
    rows[:end, 0x22] = np.where(text.accepting, end, DEAD)
    return minimal(compact(ByteAutomaton(rows, np.arange(end + 1) == end, text.start)))


def _has_surrogates(text: ByteAutomaton) -> bool:
    after = np.unique(text.transitions[:, 0xED])
    return bool(text.transitions[after, 0xA0:0xC0].any())


def _quad(row: Sequence[int], begin: int) -> tuple[int, ...]:
    return tuple(row[begin : begin + 4])


class _Spelling:
    """The states of `text`, and behind them those inside escapes: equal rows are one state."""

    def __init__(self, text: ByteAutomaton, canonical: bool) -> None:
        self.text = text
        self.canonical = canonical
        self.after: list[list[int]] = text.transitions.tolist()
        self.end = text.num_states
        self.num_states = self.end + 1
        self.rows: dict[tuple[bool, tuple[int, ...]], int] = {}
        self.two_more: dict[int, int] = {}
        self.four: dict[tuple[int, ...], int] = {}
        self.upper: dict[tuple[int, int], int] = {}
        self.fourth: dict[tuple[int, ...], int] = {}
        self.lower: dict[tuple[int, ...], int] = {}

    def result(self) -> ByteAutomaton:
        boundaries = self._boundaries()
        escapes = [self._escape(state) for state in boundaries]
        rows = np.zeros((self.num_states, 256), np.int32)
        rows[: self.end] = self.text.transitions
        rows[: self.end, _NOT_RAW] = 0
        rows[boundaries, 0x5C] = escapes
        rows[: self.end, 0x22] = np.where(self.text.accepting, self.end, DEAD)
        for (is_digit, row), state in self.rows.items():
            if is_digit:
                for digits in _DIGITS[:1] if self.canonical else _DIGITS:
                    rows[state, list(digits)] = row
            else:
                rows[state, list(row[::2])] = row[1::2]
        return minimal(compact(ByteAutomaton(rows, np.arange(self.num_states) == self.end, self.text.start)))

    def _boundaries(self) -> list[int]:
        """The states between two characters."""
        left = {self.text.start: 0}
        todo = [self.text.start]
        for state in todo:
            row = self.text.transitions[state]
            more = left[state]
            if row[0x80:0xC2].any() or row[0xF5:].any() if not more else row[:0x80].any() or row[0xC0:].any():
                raise ValueError(_NOT_UTF8)
            spans = (
                [(0x80, 0xC0, more - 1)] if more else [(0, 0x80, 0), (0xC2, 0xE0, 1), (0xE0, 0xF0, 2), (0xF0, 0xF5, 3)]
            )
            for first, end, then in spans:
                for target in set(row[first:end].tolist()) - {DEAD}:
                    if target not in left:
                        todo.append(target)
                    if left.setdefault(target, then) != then:
                        raise ValueError(_NOT_UTF8)
        return [state for state, more in left.items() if not more]

    def _node(self, row: tuple[int, ...], is_digit: bool = True) -> int:
        """The state with this row: targets by hexadecimal digit, or byte, target, byte, target..."""
        if not any(row if is_digit else row[1::2]):
            return DEAD
        key = (is_digit, row)
        state = self.rows.get(key)
        if state is None:
            state = self.rows[key] = self.num_states
            self.num_states += 1
        return state

    def _escape(self, state: int) -> int:
        """After a backslash."""
        after = self.after[state]
        short = {code: name for code, name in _SHORT.items() if not (self.canonical and code == 0x2F)}
        row = [part for code, name in short.items() for part in (name[0], after[code])]
        return self._node((*row, ord("u"), self._unicode(state)), False)

    def _unicode(self, state: int) -> int:
        r"""After `\u`: each digit but 0 and d is what a first byte e1 to ef tells."""
        after = self.after[state]
        row = [self._two_more(after[0xE0 | digit]) for digit in range(16)]
        row[0x0] = self._zero(state)
        row[0xD] = self._surrogate(state)
        return self._node(tuple(row))

    def _zero(self, state: int) -> int:
        r"""After `\u0`: one byte or two, and from `\u08` on three."""
        after = self.after[state]
        row = [self._four(_quad(after, 0xC0 | digit << 2)) for digit in range(8)]
        row[0] = self._zero_zero(state)
        long = self.after[after[0xE0]]
        row += [self._four(_quad(long, 0x80 | digit << 2)) for digit in range(8, 16)]
        return self._node(tuple(row))

    def _zero_zero(self, state: int) -> int:
        after = list(self.after[state])
        if self.canonical:
            for code in range(0x80):
                if code in _SHORT or 0x20 <= code < 0x7F:
                    after[code] = DEAD
        row = [self._node(tuple(after[digit << 4 : (digit + 1) << 4])) for digit in range(8)]
        row += [self._last(after[0xC0 | digit >> 2], digit & 3) for digit in range(8, 16)]
        return self._node(tuple(row))

    def _two_more(self, inside: int) -> int:
        """Three digits are left, and two bytes."""
        if inside not in self.two_more:
            after = self.after[inside]
            row = [self._four(_quad(after, 0x80 | digit << 2)) for digit in range(16)]
            self.two_more[inside] = self._node(tuple(row))
        return self.two_more[inside]

    def _four(self, inside: tuple[int, ...]) -> int:
        """Two digits are left, of which the first still picks one of four states with one byte left."""
        if inside not in self.four:
            row = [self._last(inside[digit >> 2], digit & 3) for digit in range(16)]
            self.four[inside] = self._node(tuple(row))
        return self.four[inside]

    def _last(self, inside: int, high: int) -> int:
        """One digit is left, and one byte whose upper bits are known."""
        begin = 0x80 | high << 4
        return self._node(tuple(self.after[inside][begin : begin + 16]))

    def _surrogate(self, state: int) -> int:
        r"""After `\ud`: below d800 three bytes, from d800 to dbff the upper half of a pair."""
        after = self.after[state]
        long = self.after[after[0xED]]
        row = [self._four(_quad(long, 0x80 | digit << 2)) for digit in range(8)]
        row += [self._upper(after[0xF0 + digit], after[0xF1 + digit]) for digit in range(4)]
        return self._node((*row, DEAD, DEAD, DEAD, DEAD))

    def _upper(self, here: int, next_one: int) -> int:
        """The code point is 0x10000 more than the pair's bits, so the third digit may carry into the first byte."""
        if (here, next_one) not in self.upper:
            row = [self._fourth(next_one if digit >= 12 else here, (digit + 4) % 16) for digit in range(16)]
            self.upper[here, next_one] = self._node(tuple(row))
        return self.upper[here, next_one]

    def _fourth(self, inside: int, high: int) -> int:
        """The last digit of the upper half; three bytes are left, of the first one four bits are known."""
        inner = _quad(self.after[inside], 0x80 | high << 2)
        if inner not in self.fourth:
            self.fourth[inner] = self._node(tuple(self._lower(inner[low >> 2], low & 3) for low in range(16)))
        return self.fourth[inner]

    def _lower(self, inside: int, high: int) -> int:
        r"""After the upper half: `\udc00` to `\udfff`; two bytes are left, of the first one two bits are known."""
        begin = 0x80 | high << 4
        inner = tuple(self.after[inside][begin : begin + 16])
        if inner not in self.lower:
            halves = [self._four(_quad(inner, low << 2)) for low in range(4)]
            third = self._node((*[DEAD] * 12, *halves))
            second = self._node((*[DEAD] * 0xD, third, DEAD, DEAD))
            self.lower[inner] = self._node((0x5C, self._node((ord("u"), second), False)), False)
        return self.lower[inner]
