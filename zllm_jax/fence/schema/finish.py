"""The last step of a compilation: bounds that always hold go, and so do states that cannot be reached or told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.flow import chain
from zllm_jax.fence.machine import MAX_DEPTH, Condition, Edge, Machine


def finished(machine: Machine, module_of: npt.NDArray[np.int64]) -> Machine:
    """The same machine, smaller. module_of: by state, the first state of its module (0: the outermost)."""
    return merged(_without_bounds(machine, module_of))


def _without_bounds(machine: Machine, module_of: npt.NDArray[np.int64]) -> Machine:
    """Without demands for room where the stack can never be that deep."""
    source, byte = np.nonzero(machine.edges < 0)
    number = ~machine.edges[source, byte]
    deepest = _deepest(machine, module_of, np.unique(np.stack([module_of[source], number]), axis=1))
    special: dict[Edge, int] = {}
    known: dict[tuple[int, int], int] = {}
    targets = []
    for key in zip(module_of[source].tolist(), number.tolist(), strict=True):
        if key not in known:
            edge = _simplified(machine.special[key[1]], deepest[key[0]])
            known[key] = DEAD if edge is None else _plain(edge) or ~special.setdefault(edge, len(special))
        targets.append(known[key])
    edges = machine.edges.copy()
    edges[source, byte] = targets
    return replace(machine, edges=edges, special=tuple(special))


def _deepest(machine: Machine, module_of: npt.NDArray[np.int64], taken: npt.NDArray[np.int64]) -> dict[int, int]:
    """By module, the most frames below its own; at least MAX_DEPTH + 1 where there is no bound.

    taken: i64[2, .], modules and the special edges that they take.
    """
    calls: dict[int, set[int]] = {int(module): set() for module in np.unique(module_of)}
    for module, number in taken.T.tolist():
        for edge in chain(machine.special[number]):
            if edge.push is not None:
                calls[module].add(int(module_of[edge.target]))
    depth = dict.fromkeys(calls, 0)
    for _ in range(MAX_DEPTH + 1):
        for module, inner in calls.items():
            for one in inner:
                depth[one] = max(depth[one], min(depth[module] + 1, MAX_DEPTH + 1))
    return depth


def _simplified(edge: Edge | None, depth: int) -> Edge | None:
    """An edge without conditions that always hold at this depth, or that never do."""
    if edge is None:
        return None
    guard = tuple(dict.fromkeys(replace(one, room=0) if depth + one.room <= MAX_DEPTH else one for one in edge.guard))
    if Condition() in guard:
        guard = ()
    otherwise = _simplified(edge.otherwise, depth) if guard else None
    return replace(edge, guard=guard, otherwise=otherwise)


def _plain(edge: Edge) -> int:
    """Where an edge leads that neither reads nor changes the stack; 0 for others."""
    busy = edge.guard or edge.use or edge.add or edge.push is not None or edge.pop is not None
    return 0 if busy else edge.target


def merged(machine: Machine) -> Machine:
    """Without states that cannot be reached, and with equal ones merged.

    States are compared after those that they lead to, so that one pass merges all that is not on a cycle.
    """
    rows: list[list[int]] = machine.edges[:, machine.columns].tolist()
    distinct = [set(row) for row in rows]
    moved = _Moved(machine.special)
    image = list(range(machine.num_states + len(machine.special)))  # the last ones, by ~i, are for special edges
    kinds: dict[tuple[object, ...], int] = {}
    accepting = machine.accepting.tolist()
    order = _successors_first(machine, distinct)
    for state in order:
        for target in distinct[state]:
            if target < 0:
                image[target] = moved.special(~target, image)
        image[state] = kinds.setdefault((accepting[state], *map(image.__getitem__, rows[state])), state)
    kept = [DEAD, *(state for state in reversed(order) if image[state] == state)]
    return _renumbered(machine, kept, np.array(image[: machine.num_states]))


class _Moved:
    """Numbers for special edges in which equal ones, as far as is known of their targets, are equal."""

    def __init__(self, special: Sequence[Edge]) -> None:
        self._targets = [[one.target for one in chain(edge)] for edge in special]
        kinds: dict[tuple[Edge, ...], int] = {}
        self._kinds = [kinds.setdefault(_untargeted(edge), len(kinds)) for edge in special]
        self._numbers: dict[tuple[int, ...], int] = {}

    def special(self, index: int, image: list[int]) -> int:
        key = (self._kinds[index], *map(image.__getitem__, self._targets[index]))
        return ~self._numbers.setdefault(key, len(self._numbers))


def _untargeted(edge: Edge) -> tuple[Edge, ...]:
    return tuple(replace(one, target=DEAD, otherwise=None) for one in chain(edge))


def _successors_first(machine: Machine, distinct: list[set[int]]) -> list[int]:
    """The states that can be reached, each after those that it leads to, but for cycles."""
    order: list[int] = []
    if machine.start == DEAD:
        return order
    after = [_targets(machine, edge) for edge in machine.special]
    seen = {DEAD, machine.start}
    stack = [(machine.start, iter(_next_states(distinct[machine.start], after)))]
    while stack:
        state, following = stack[-1]
        for target in following:
            if target not in seen:
                seen.add(target)
                stack.append((target, iter(_next_states(distinct[target], after))))
                break
        else:
            order.append(state)
            stack.pop()
    return order


def _next_states(targets: set[int], after: list[list[int]]) -> list[int]:
    found: list[int] = []
    for target in targets:
        if target >= 0:
            found.append(target)
        else:
            found += after[~target]
    found.sort()
    return found


def _targets(machine: Machine, first: Edge) -> list[int]:
    found: list[int] = []
    for edge in chain(first):
        found.append(edge.target)
        if edge.push is not None:
            found += machine.returns[edge.push]
    return found


def _renumbered(machine: Machine, kept: list[int], image: npt.NDArray[np.int64]) -> Machine:
    """The machine of the states in `kept`, which others are replaced by as `image` says."""
    numbers = np.zeros(machine.num_states, np.int64)
    numbers[kept] = np.arange(len(kept))
    numbers = numbers[image]
    special: dict[Edge, int] = {}
    rows: dict[tuple[int, ...], int] = {}

    def moved(edge: Edge | None) -> Edge | None:
        if edge is None:
            return None
        push = edge.push
        if push is not None:
            push = rows.setdefault(tuple(int(numbers[state]) for state in machine.returns[push]), len(rows))
        return replace(edge, target=int(numbers[edge.target]), push=push, otherwise=moved(edge.otherwise))

    edges = machine.edges[kept]
    taken = np.zeros(len(machine.special), np.int64)
    for i in np.unique(~edges[edges < 0]).tolist():
        edge = moved(machine.special[i])
        assert edge is not None
        taken[i] = ~special.setdefault(edge, len(special))
    moved_edges = numbers[np.maximum(edges, 0)]
    moved_edges[edges < 0] = taken[~edges[edges < 0]]
    return Machine(
        moved_edges.astype(np.int32),
        machine.accepting[kept],
        int(numbers[machine.start]),
        tuple(special),
        tuple(rows),
    )
