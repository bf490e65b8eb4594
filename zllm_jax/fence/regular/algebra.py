"""Operations on regular languages of bytes. Each result is the one minimal automaton of its language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.automaton import DEAD, ByteAutomaton
from zllm_jax.fence.regular.compact import Compact, aligned, compact, explore, labelled, minimal

Subset = frozenset[int]
_NOTHING: Subset = frozenset()


@lru_cache(maxsize=1)
def empty() -> ByteAutomaton:
    """The language without any text."""
    return ByteAutomaton(np.zeros((1, 256), np.int32), np.zeros(1, np.bool_), DEAD)


def literal(text: bytes) -> ByteAutomaton:
    """Exactly `text`.

    >>> literal(b"ab").accepts(b"ab"), literal(b"ab").accepts(b"a")
    (True, False)
    """
    num_states = len(text) + 2
    transitions = np.zeros((num_states, 256), np.int32)
    transitions[np.arange(1, num_states - 1), list(text)] = np.arange(2, num_states)
    accepting = np.zeros(num_states, np.bool_)
    accepting[-1] = True
    return ByteAutomaton(transitions, accepting, 1)


def byte_set(allowed: bytes) -> ByteAutomaton:
    """Exactly one byte, out of `allowed`."""
    transitions = np.zeros((3, 256), np.int32)
    transitions[1, list(allowed)] = 2
    return minimal(compact(ByteAutomaton(transitions, np.array([False, False, True]), 1)))


def union(*automata: ByteAutomaton) -> ByteAutomaton:
    """The texts of any of them."""
    some = [one for one in automata if not is_empty(one)]
    if len(some) > 2:
        return _determinised(some, range(len(some)), [], final=range(len(some)))
    if len(some) == 2:
        return minimal(_pairs(some[0], some[1], lambda a, b: a | b, needs=(False, False)))
    return minimal(compact(some[0])) if some else empty()


def intersect(*automata: ByteAutomaton) -> ByteAutomaton:
    """The texts of all of them. Raises `ValueError` without any automaton."""
    if not automata:
        raise ValueError("intersect needs at least one automaton")
    result = automata[0]
    for other in automata[1:]:
        result = minimal(_pairs(result, other, lambda a, b: a & b, needs=(True, True)))
    return result if len(automata) > 1 else minimal(compact(result))


def difference(a: ByteAutomaton, b: ByteAutomaton) -> ByteAutomaton:
    """The texts of `a` that are not in `b`."""
    return minimal(_pairs(a, b, lambda x, y: int(x and not y), needs=(True, False)))


def complement(a: ByteAutomaton, universe: ByteAutomaton) -> ByteAutomaton:
    """The texts of `universe` that are not in `a`."""
    return difference(universe, a)


def concat(*automata: ByteAutomaton) -> ByteAutomaton:
    """A text of the first, then one of the second, and so on; without any, the empty text."""
    if not automata:
        return literal(b"")
    last = len(automata) - 1
    return _determinised(automata, [0], [(i, i + 1) for i in range(last)], final=[last])


def star(a: ByteAutomaton) -> ByteAutomaton:
    """Any number of texts of `a`, one after another; also none."""
    return _determinised([literal(b""), a], [0], [(0, 1), (1, 1)], final=[0, 1])


def optional(a: ByteAutomaton) -> ByteAutomaton:
    """A text of `a`, or nothing."""
    return union(literal(b""), a)


def repeat(a: ByteAutomaton, low: int, high: int | None) -> ByteAutomaton:
    """From `low` to `high` texts of `a` (None: no end), one after another.

    >>> [repeat(literal(b"ab"), 1, 2).accepts(b"ab" * n) for n in range(4)]
    [False, True, True, False]
    """
    if low < 0 or (high is not None and high < low):
        raise ValueError(f"repeat needs 0 <= low <= high, not low {low}, high {high}")
    count = (max(low, 1) if high is None else high) + 1
    follows = [(i, i + 1) for i in range(count - 1)]
    if high is None:
        follows.append((count - 1, count - 1))
    return _determinised([literal(b""), *[a] * (count - 1)], [0], follows, final=range(low, count))


def is_empty(a: ByteAutomaton) -> bool:
    """Whether no text is in it."""
    reached = np.zeros(a.num_states, np.bool_)
    frontier = np.array([a.start])
    while frontier.any():
        if a.accepting[frontier].any():
            return False
        reached[frontier] = True
        frontier = np.unique(a.transitions[frontier])
        frontier = frontier[~reached[frontier] & (frontier != DEAD)]
    return True


def equal(a: ByteAutomaton, b: ByteAutomaton) -> bool:
    """Whether both hold the same texts."""
    one, other = minimal(compact(a)), minimal(compact(b))
    return np.array_equal(one.transitions, other.transitions) and np.array_equal(one.accepting, other.accepting)


def shortest(a: ByteAutomaton) -> bytes | None:
    """The first text by length, then by bytes; None if there is none."""
    texts = {a.start: b""}
    order = [a.start] if a.start != DEAD else []
    for state in order:
        if a.accepting[state]:
            return texts[state]
        targets, firsts = np.unique(a.transitions[state], return_index=True)
        for byte, target in sorted(zip(firsts.tolist(), targets.tolist(), strict=True)):
            if target != DEAD and target not in texts:
                texts[target] = texts[state] + bytes([byte])
                order.append(target)
    return None


def finite_texts(a: ByteAutomaton, limit: int) -> list[bytes] | None:
    """All texts in the order of bytes, or None when there are more than `limit`.

    >>> finite_texts(union(literal(b"b"), literal(b"a")), 2)
    [b'a', b'b']
    """
    a = minimal(compact(a))
    counts: dict[int, int] = {}
    if a.start == DEAD:
        return []
    if not _count(a, limit, counts):
        return None
    texts: list[bytes] = []
    todo = [(a.start, b"")]
    while todo:
        state, text = todo.pop()
        if a.accepting[state]:
            texts.append(text)
        for byte in np.flatnonzero(a.transitions[state])[::-1].tolist():
            todo.append((int(a.transitions[state, byte]), text + bytes([byte])))
    return texts


def _count(a: ByteAutomaton, limit: int, counts: dict[int, int]) -> bool:
    """Whether there are at most `limit` texts: states are counted once all behind them are."""
    rows = [row[row > 0].tolist() for row in a.transitions]
    waits = [len(set(row)) for row in rows]
    before: dict[int, list[int]] = {}
    for state, row in enumerate(rows):
        for target in set(row):
            before.setdefault(target, []).append(state)
    ready = [state for state in range(1, a.num_states) if not waits[state]]
    for state in ready:
        counts[state] = int(a.accepting[state]) + sum(counts[target] for target in rows[state])
        if counts[state] > limit:
            return False
        for source in before.get(state, ()):
            waits[source] -= 1
            if not waits[source]:
                ready.append(source)
    return a.start in counts


def product(automata: Sequence[ByteAutomaton]) -> tuple[ByteAutomaton, npt.NDArray[np.int64]]:
    """All of them at once: an automaton of their union, and for each state the bits of those that accept there.

    Returns (union, outcomes i64[Q]); bit i is `automata[i]`. Raises `ValueError` for none, and
    `UnsupportedGrammar` for more than 62.
    """
    if not automata:
        raise ValueError("product needs at least one automaton")
    if len(automata) > 62:
        raise UnsupportedGrammar(f"too large: {len(automata)} languages at once, at most 62 can be told apart")
    whole = compact(automata[0])
    for i, automaton in enumerate(automata[1:], 1):
        other = compact(automaton)
        other = Compact(other.classes, other.rows, [label << i for label in other.labels], other.start)
        whole = _joined(whole, other, lambda a, b: a | b, needs=(False, False))
    return labelled(whole)


def _pairs(
    a: ByteAutomaton, b: ByteAutomaton, label: Callable[[int, int], int], *, needs: tuple[bool, bool]
) -> Compact:
    return _joined(compact(a), compact(b), label, needs=needs)


def _joined(a: Compact, b: Compact, label: Callable[[int, int], int], *, needs: tuple[bool, bool]) -> Compact:
    """Pairs of states. needs: whether a pair is dead as soon as the first, the second is."""
    classes, (rows_a, rows_b) = aligned([a, b])
    width = len(b.rows)
    need_a, need_b = needs

    def key(x: int, y: int) -> int:
        return 0 if (need_a and not x) or (need_b and not y) else x * width + y

    def step(pair: int) -> list[int]:
        x, y = divmod(pair, width)
        targets = [p * width + q for p, q in zip(rows_a[x], rows_b[y], strict=True)]
        if need_a:
            targets = [target if target >= width else 0 for target in targets]
        if need_b:
            targets = [target if target % width else 0 for target in targets]
        return targets

    def labels(pair: int) -> int:
        x, y = divmod(pair, width)
        return label(a.labels[x], b.labels[y])

    return explore(key(a.start, b.start), 0, step, labels, classes)


def _determinised(
    parts: Sequence[ByteAutomaton],
    starts: Sequence[int],
    follows: Sequence[tuple[int, int]],
    *,
    final: Sequence[int],
) -> ByteAutomaton:
    """Subsets of the states of all parts. follows: after (part, begins another part); final: parts that may end."""
    distinct = {id(part): part for part in parts}
    compacts = {key: compact(part) for key, part in distinct.items()}
    classes, all_rows = aligned(list(compacts.values()))
    rows_of = dict(zip(compacts, all_rows, strict=True))
    offsets = np.cumsum([0, *(part.num_states for part in parts)]).tolist()
    after = _closures(parts, follows, offsets)
    table: list[list[Subset]] = []
    accepting: set[int] = set()
    for i, part in enumerate(parts):
        accepts = compacts[id(part)].labels
        reached = [
            _NOTHING if state == DEAD else frozenset([offsets[i] + state]) | (after[i] if accepts[state] else _NOTHING)
            for state in range(part.num_states)
        ]
        table.extend([reached[target] for target in row] for row in rows_of[id(part)])
        if i in set(final):
            accepting.update(offsets[i] + state for state in range(part.num_states) if accepts[state])
    begin = _NOTHING.union(*(_entered(parts, offsets, after, i) for i in starts))

    def step(subset: Subset) -> list[Subset]:
        if len(subset) == 1:
            (only,) = subset
            return table[only]
        return [_NOTHING.union(*several) for several in zip(*(table[state] for state in subset), strict=True)]

    return minimal(explore(begin, _NOTHING, step, lambda subset: int(not accepting.isdisjoint(subset)), classes))


def _entered(parts: Sequence[ByteAutomaton], offsets: list[int], after: list[Subset], i: int) -> Subset:
    part = parts[i]
    if part.start == DEAD:
        return _NOTHING
    return frozenset([offsets[i] + part.start]) | (after[i] if part.accepting[part.start] else _NOTHING)


def _closures(parts: Sequence[ByteAutomaton], follows: Sequence[tuple[int, int]], offsets: list[int]) -> list[Subset]:
    """For each part, the states in which one is besides as soon as it has ended."""
    nexts: dict[int, list[int]] = {}
    for i, j in follows:
        nexts.setdefault(i, []).append(j)
    closures = []
    for i in range(len(parts)):
        found: set[int] = set()
        todo = list(nexts.get(i, ()))
        while todo:
            j = todo.pop()
            if j in found:
                continue
            found.add(j)
            if parts[j].accepting[parts[j].start]:
                todo.extend(nexts.get(j, ()))
        closures.append(frozenset(offsets[j] + parts[j].start for j in found if parts[j].start != DEAD))
    return closures
