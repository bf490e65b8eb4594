"""Automata over classes of bytes: what the operations compute with, and the way back to the one minimal automaton."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.automaton import DEAD, ByteAutomaton

MAX_STATES = 20_000
Ints = npt.NDArray[np.int64]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Compact:
    """An automaton whose bytes are grouped. State 0 is dead; a label other than 0 accepts, and tells how.

    classes: i64[256], the group of each byte, numbered by first occurrence. rows: for each state its target by group.
    """

    classes: Ints
    rows: list[list[int]]
    labels: list[int]
    start: int


_COMPACT: WeakKeyDictionary[ByteAutomaton, Compact] = WeakKeyDictionary()


def compact(automaton: ByteAutomaton) -> Compact:
    """The same automaton by groups of bytes that no state tells apart."""
    if automaton not in _COMPACT:
        _COMPACT[automaton] = _compact(automaton)
    return _COMPACT[automaton]


def _compact(automaton: ByteAutomaton) -> Compact:
    used = (automaton.transitions != DEAD).any(axis=0)
    columns = np.ascontiguousarray(automaton.transitions.T)
    keys = (column.tobytes() if leads else b"" for column, leads in zip(columns, used, strict=True))
    groups: dict[bytes, int] = {}
    classes = np.array([groups.setdefault(key, len(groups)) for key in keys], np.int64)
    representatives = np.unique(classes, return_index=True)[1]
    rows: list[list[int]] = automaton.transitions[:, representatives].tolist()
    return Compact(classes, rows, automaton.accepting.astype(int).tolist(), automaton.start)


def aligned(automata: Sequence[Compact]) -> tuple[Ints, list[list[list[int]]]]:
    """Common groups of bytes, and the rows of each automaton by them."""
    stacked = np.stack([one.classes for one in automata], axis=1)
    groups: dict[bytes, int] = {}
    classes = np.array([groups.setdefault(pick.tobytes(), len(groups)) for pick in stacked], np.int64)
    picks = stacked[np.unique(classes, return_index=True)[1]]
    rows = [_picked(one.rows, picks[:, i].tolist()) for i, one in enumerate(automata)]
    return classes, rows


def _picked(rows: list[list[int]], columns: list[int]) -> list[list[int]]:
    return [[row[column] for column in columns] for row in rows]


def explore(
    start: Key,
    dead: Key,
    step: Callable[[Key], list[Key]],
    label: Callable[[Key], int],
    classes: Ints,
) -> Compact:
    """All that can be reached from `start` by `step`, which gives the key after each group of bytes.

    Raises `UnsupportedGrammar` beyond 20,000 states.
    """
    numbers = {dead: DEAD}
    order = [dead]
    if start not in numbers:
        numbers[start] = 1
        order.append(start)
    rows: list[list[int]] = [[DEAD] * (int(classes.max()) + 1)]
    while len(rows) < len(order):
        row = []
        for key in step(order[len(rows)]):
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(order)
                order.append(key)
            row.append(number)
        rows.append(row)
        if len(order) > MAX_STATES:
            raise UnsupportedGrammar(f"too large: more than {MAX_STATES} states are needed")
    return Compact(classes, rows, [0, *map(label, order[1:])], numbers[start])


def labelled(machine: Compact) -> tuple[ByteAutomaton, Ints]:
    """The minimal automaton that keeps labels apart, numbered canonically, and its labels i64[Q]."""
    rows, labels, start = reduced(machine.rows, machine.labels, machine.start)
    transitions = np.array(rows, np.int32)[:, machine.classes]
    return ByteAutomaton(transitions, np.array(labels) != 0, start), np.array(labels, np.int64)


def reduced(rows: list[list[int]], labels: list[int], start: int) -> tuple[list[list[int]], list[int], int]:
    """(rows, labels, start) of the minimal automaton, numbered in the order in which its states are reached.

    Only states remain that are reached and from which a label other than 0 can be reached.
    """
    alive = _alive(rows, labels, start)
    rows = [
        [target if target in alive else DEAD for target in row] if state in alive else row
        for state, row in enumerate(rows)
    ]
    blocks = _equivalent(rows, labels, alive)
    members = {blocks[state]: state for state in alive}
    numbers = {DEAD: DEAD}
    order: list[int] = []
    if start in alive:
        numbers[blocks[start]] = 1
        order.append(blocks[start])
    table = [[DEAD] * len(rows[0])]
    for block in order:
        row = []
        for target in rows[members[block]]:
            target_block = blocks[target]
            if target_block not in numbers:
                numbers[target_block] = len(numbers)
                order.append(target_block)
            row.append(numbers[target_block])
        table.append(row)
    return table, [0, *(labels[members[block]] for block in order)], int(start in alive)


def minimal(machine: Compact) -> ByteAutomaton:
    """The one minimal automaton of the language: equal languages give equal arrays."""
    return labelled(machine)[0]


def _alive(rows: list[list[int]], labels: list[int], start: int) -> set[int]:
    """States that are reached and from which acceptance can be reached."""
    reached = {DEAD, start}
    todo = [start]
    before: dict[int, list[int]] = {}
    while todo:
        state = todo.pop()
        for target in set(rows[state]):
            before.setdefault(target, []).append(state)
            if target not in reached:
                reached.add(target)
                todo.append(target)
    alive = {state for state in reached if labels[state]}
    todo = list(alive)
    while todo:
        for source in before.get(todo.pop(), ()):
            if source not in alive:
                alive.add(source)
                todo.append(source)
    return alive - {DEAD}


def _equivalent(rows: list[list[int]], labels: list[int], alive: set[int]) -> list[int]:
    """The block of each state; `DEAD` is alone in block 0. What leads to no cycle is settled from the leaves."""
    blocks = [DEAD] * len(rows)
    known: dict[tuple[int, ...], int] = {}
    before: dict[int, list[int]] = {}
    waits: dict[int, int] = {}
    ready = []
    for state in alive:
        targets = set(rows[state])
        targets.discard(DEAD)
        waits[state] = len(targets)
        if not targets:
            ready.append(state)
        for target in targets:
            before.setdefault(target, []).append(state)
    while ready:
        state = ready.pop()
        del waits[state]
        key = (labels[state], *map(blocks.__getitem__, rows[state]))
        blocks[state] = known.setdefault(key, len(known) + 1)
        for source in before.get(state, ()):
            waits[source] -= 1
            if not waits[source]:
                ready.append(source)
    if waits:
        _refine(rows, labels, blocks, sorted(waits), before, len(known) + 1)
    return blocks


def _refine(
    rows: list[list[int]],
    labels: list[int],
    blocks: list[int],
    states: list[int],
    before: dict[int, list[int]],
    first: int,
) -> None:
    """Moore's refinement of `states`, which lead to cycles; all others have their blocks already.

    It starts from labels and the distance to each kind of end, and compares rows by a hash until they agree exactly.
    """
    block = np.array(blocks, np.int64)
    members = np.array(states, np.int64)
    table = np.array(rows, np.int64)[members]
    distance = _distances(labels, blocks, before)
    seeds = [(labels[state], distance.get(state, -1)) for state in states]
    numbers: dict[tuple[int, int], int] = {}
    own = np.array([numbers.setdefault(seed, len(numbers)) for seed in seeds], np.int64)
    block[members] = own + first
    random = Random(1)
    while True:
        targets = block[table]
        factors = np.array([random.getrandbits(62) for _ in range(targets.shape[1] + 1)], np.int64)
        hashed = targets @ factors[1:] + own * factors[:1]
        _, firsts, finer = np.unique(hashed, return_index=True, return_inverse=True)
        finer = finer.reshape(-1)
        settled = len(firsts) == own.max() + 1
        own = finer.astype(np.int64)
        block[members] = own + first
        if settled:
            targets = block[table]
            if np.array_equal(targets, targets[firsts[own]]):
                break
    for state, number in zip(states, own.tolist(), strict=True):
        blocks[state] = number + first


def _distances(labels: list[int], blocks: list[int], before: dict[int, list[int]]) -> dict[int, int]:
    """Bytes to the nearest accepting state, for each state from which there is one."""
    frontier = [state for state in range(len(labels)) if labels[state]]
    found = dict.fromkeys(frontier, 0)
    length = 0
    while frontier:
        length += 1
        new = []
        for state in frontier:
            for source in before.get(state, ()):
                if source not in found:
                    found[source] = length
                    new.append(source)
        frontier = new
    return found
