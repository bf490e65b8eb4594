"""From automata over groups of code points to automata over their UTF-8 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.automaton import ByteAutomaton
from zllm_jax.fence.regular.algebra import empty
from zllm_jax.fence.regular.code_points import ALL, MAX_CODE_POINT, Partition, partition
from zllm_jax.fence.regular.compact import MAX_STATES, Ints, compact, minimal

_ROW = 64  # continuation bytes 80 to bf
_STATES_BY_CHARACTER = 8  # one before it, and seven inside
_END = MAX_CODE_POINT + 1


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


def in_utf8(
    table: Sequence[Sequence[int]], accepting: Sequence[bool], start: int, partition: Partition
) -> ByteAutomaton:
    """The bytes of an automaton over groups of code points.

    table: for each state (0 is dead) its target by group.
    """
    targets = np.array(table, np.int64)
    targets = np.concatenate([targets, np.zeros((len(targets), 1), np.int64)], axis=1)  # group -1 leads nowhere
    shapes = _shapes(partition)
    grown = _Grown(len(targets))
    lasts = grown.level(shapes.last, targets)
    middles = grown.level(shapes.middle, lasts)
    firsts = grown.level(shapes.first, middles)
    num = len(targets)
    rows = np.zeros((grown.num_states, 256), np.int64)
    rows[num:, 0x80:0xC0] = np.array(grown.rows).reshape(-1, _ROW)
    rows[:num, :0x80] = targets[:, partition.group(np.arange(0x80))]
    rows[:num, 0xC2:0xE0] = lasts[:, shapes.two]
    rows[:num, 0xE0:0xF0] = middles[:, shapes.three]
    rows[:num, 0xF0:0xF5] = firsts[:, shapes.four]
    accepts = np.zeros(grown.num_states, np.bool_)
    accepts[:num] = accepting
    result = minimal(compact(ByteAutomaton(rows.astype(np.int32), accepts, start)))
    if result.num_states > MAX_STATES:
        raise UnsupportedGrammar(f"too large: {result.num_states} states, at most {MAX_STATES} are possible")
    return result


class _Shapes(NamedTuple):
    """Distinct rows of what 64 continuation bytes lead to, by how many bytes follow; and what each first byte begins.

    The last rows hold groups of code points, the others numbers of rows of the level before.
    """

    last: list[Ints]
    middle: list[Ints]
    first: list[Ints]
    two: Ints
    three: Ints
    four: Ints


def _shapes(partition: Partition) -> _Shapes:
    last, middle, first = _Rows(), _Rows(), _Rows()
    heads = np.arange(0, _END, _ROW)
    groups = partition.group(heads)
    pages = np.zeros(len(heads), np.int64)
    for group in np.unique(groups).tolist():
        pages[groups == group] = last.number(np.full(_ROW, group, np.int64))
    mixed = np.unique(partition.begins[(partition.begins % _ROW != 0)] // _ROW)
    for page in mixed.tolist():
        pages[page] = last.number(partition.group(np.arange(page * _ROW, (page + 1) * _ROW)))
    nothing = last.number(np.full(_ROW, -1, np.int64))
    allowed = pages.copy()
    allowed[:0x20] = nothing  # e0 80 to e0 9f would be overlong
    books = np.array([middle.number(row) for row in allowed.reshape(-1, _ROW)], np.int64)
    shelves = np.full(5 * _ROW, middle.number(np.full(_ROW, nothing, np.int64)), np.int64)
    shelves[16 : len(books)] = books[16:]  # f0 80 to f0 8f would be overlong
    four = np.array([first.number(row) for row in shelves.reshape(-1, _ROW)], np.int64)
    return _Shapes(last.rows, middle.rows, first.rows, pages[2:0x20], books[:16], four)


class _Grown:
    """States added behind those of the automaton; `level` gives the state for each pair (state, shape)."""

    def __init__(self, num_states: int) -> None:
        self.num_states = num_states
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
            if self.num_states > 2 * MAX_STATES:
                raise UnsupportedGrammar(f"too large: far more than {MAX_STATES} states are needed")
        return self.numbers[key]


@lru_cache(maxsize=1)
def any_text() -> ByteAutomaton:
    """All texts, as the bytes of valid UTF-8: nothing overlong, no surrogates."""
    return text_length(0, None)


@lru_cache(maxsize=64)
def text_length(low: int, high: int | None) -> ByteAutomaton:
    """Texts of `low` to `high` code points (None: no end); none at all when `high` is below `low`.

    Raises `UnsupportedGrammar` beyond 2,500 code points.

    >>> [text_length(1, 2).accepts(text.encode()) for text in ("", "é", "日本", "abc")]
    [False, True, True, False]
    """
    if low < 0 or (high is not None and high < 0):
        raise ValueError(f"a text's length cannot be below 0: low {low}, high {high}")
    if high is not None and high < low:
        return empty()
    longest = low if high is None else high
    if longest * _STATES_BY_CHARACTER > MAX_STATES:
        raise UnsupportedGrammar(
            f"too large: a length of {longest}, at most {MAX_STATES // _STATES_BY_CHARACTER} can be counted"
        )
    table = [[0], *([state + 1] for state in range(1, longest + 1)), [longest + 1 if high is None else 0]]
    accepting = [False, *(length >= low for length in range(longest + 1))]
    return in_utf8(table, accepting, 1, partition([ALL]))
