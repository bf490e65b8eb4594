"""From automata over groups of code points to automata over their UTF-8 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.automaton import DEAD, ByteAutomaton
from zllm_jax.fence.regular.compact import MAX_STATES, Compact, Ints, compact, minimal

_LAST_BYTES = 64  # continuation bytes 80 to bf


class _Rows:
    """Numbers for rows of 64: what follows a byte, the same for the same row."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.rows: list[Ints] = []

    def number(self, row: Ints) -> int:
        key = row.tobytes()
        if key not in self.numbers:
            self.numbers[key] = len(self.rows)
            self.rows.append(row.copy())
        return self.numbers[key]


def groups_of(ranges: Sequence[tuple[int, int]], kinds: Ints) -> npt.NDArray[np.int64]:
    """The group of every code point, surrogates being group -1."""
    lengths = [last - first + 1 for first, last in ranges]
    groups = np.repeat(kinds, lengths)
    groups[0xD800:0xE000] = -1
    return groups


def in_utf8(table: Sequence[Sequence[int]], accepting: Sequence[bool], start: int, groups: Ints) -> ByteAutomaton:
    """The bytes of an automaton over groups of code points.

    table: for each state (0 is dead) its target by group. groups: i64[0x110000], the group of each code point, -1 for
    none.
    """
    targets = np.array(table, np.int64)
    targets = np.concatenate([targets, np.zeros((len(targets), 1), np.int64)], axis=1)  # group -1 leads nowhere
    shapes = _shapes(groups)
    grown = _Grown(targets)
    lasts = grown.level(shapes.last, targets)
    middles = grown.level(shapes.middle, lasts)
    firsts = grown.level(shapes.first, middles)
    rows = np.zeros((grown.num_states, 256), np.int64)
    for state, row in enumerate(grown.rows, len(targets)):
        rows[state, 0x80:0xC0] = row
    num = len(targets)
    rows[:num, :0x80] = targets[:, groups[:0x80]]
    rows[:num, 0xC2:0xE0] = lasts[:, shapes.two]
    rows[:num, 0xE0:0xF0] = middles[:, shapes.three]
    rows[:num, 0xF0:0xF5] = firsts[:, shapes.four]
    rows[DEAD] = 0
    accepts = np.zeros(grown.num_states, np.bool_)
    accepts[:num] = accepting
    return minimal(compact(ByteAutomaton(rows.astype(np.int32), accepts, start)))


class _Shapes:
    """Distinct rows of continuation bytes at each depth, and which of them each first byte begins."""

    def __init__(self, last: _Rows, middle: _Rows, first: _Rows, two: Ints, three: Ints, four: Ints) -> None:
        self.last, self.middle, self.first = last.rows, middle.rows, first.rows
        self.two, self.three, self.four = two, three, four


def _shapes(groups: Ints) -> _Shapes:
    last, middle, first = _Rows(), _Rows(), _Rows()
    pages = groups.reshape(-1, _LAST_BYTES)
    same = (pages == pages[:, :1]).all(axis=1)
    number = np.zeros(len(pages), np.int64)
    flat: dict[int, int] = {}
    for page in np.flatnonzero(~same).tolist():
        number[page] = last.number(pages[page])
    heads = pages[:, 0]
    for group in np.unique(heads[same]).tolist():
        flat[group] = last.number(np.full(_LAST_BYTES, group, np.int64))
    number[same] = [flat[group] for group in heads[same].tolist()]
    nothing = last.number(np.full(_LAST_BYTES, -1, np.int64))
    books = number.copy()
    books[:0x20] = nothing  # e0 80 to e0 9f would be overlong
    middles = np.array([middle.number(book) for book in books.reshape(-1, _LAST_BYTES)], np.int64)
    blank = middle.number(np.full(_LAST_BYTES, nothing, np.int64))
    shelves = np.full(5 * _LAST_BYTES, blank, np.int64)
    shelves[16 : len(middles)] = middles[16:]  # f0 80 to f0 8f would be overlong
    firsts = np.array([first.number(shelf) for shelf in shelves.reshape(-1, _LAST_BYTES)], np.int64)
    return _Shapes(last, middle, first, number[2:0x20], middles[:16], firsts)


class _Grown:
    """States added behind those of the automaton; `level` gives the state for each pair (state, shape)."""

    def __init__(self, targets: Ints) -> None:
        self.num_states = len(targets)
        self.rows: list[Ints] = []
        self.numbers: dict[bytes, int] = {}

    def level(self, shapes: list[Ints], below: Ints) -> Ints:
        numbers = np.zeros((len(below), len(shapes)), np.int64)
        for column, shape in enumerate(shapes):
            reached = below[:, shape]
            for state in np.flatnonzero(reached.any(axis=1)).tolist():
                numbers[state, column] = self._number(reached[state])
        return numbers

    def _number(self, row: Ints) -> int:
        key = row.tobytes()
        if key not in self.numbers:
            self.numbers[key] = self.num_states
            self.num_states += 1
            self.rows.append(row)
            if self.num_states > 8 * MAX_STATES:
                raise UnsupportedGrammar(f"too large: far more than {MAX_STATES} states are needed")
        return self.numbers[key]


@lru_cache(maxsize=1)
def any_text() -> ByteAutomaton:
    """All texts, as the bytes of valid UTF-8: nothing overlong, no surrogates."""
    return text_length(0, None)


@lru_cache(maxsize=64)
def text_length(low: int, high: int | None) -> ByteAutomaton:
    """Texts of `low` to `high` code points (None: no end).

    >>> [text_length(1, 2).accepts(text.encode()) for text in ("", "é", "日本", "abc")]
    [False, True, True, False]
    """
    if low < 0 or (high is not None and high < low):
        raise ValueError(f"a text's length needs 0 <= low <= high, not low {low}, high {high}")
    longest = low if high is None else high
    if longest > MAX_STATES:
        raise UnsupportedGrammar(f"too large: a length of {longest} needs more than {MAX_STATES} states")
    table = [[0], *([state + 1] for state in range(1, longest + 1)), [longest + 1 if high is None else 0]]
    accepting = [False, *(length >= low for length in range(longest + 1))]
    groups = np.zeros(0x110000, np.int64)
    groups[0xD800:0xE000] = -1
    return in_utf8(table, accepting, 1, groups)
