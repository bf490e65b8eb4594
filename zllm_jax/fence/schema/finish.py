"""The last step of a compilation: bounds that always hold go, and so do states that cannot be reached or told apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.flow import columns
from zllm_jax.fence.machine import MAX_DEPTH, Condition, Edge, Machine


def finished(machine: Machine, module_of: npt.NDArray[np.int64]) -> Machine:
    """The same machine, smaller. module_of: by state, the first state of its module (0: the outermost)."""
    return merged(_without_bounds(machine, module_of))


def _without_bounds(machine: Machine, module_of: npt.NDArray[np.int64]) -> Machine:
    """Without demands for room where the stack can never be that deep."""
    deepest = _deepest(machine, module_of)
    edges = machine.edges.copy()
    special: dict[Edge, int] = {}
    for source, byte in np.argwhere(edges < 0).tolist():
        edge = _simplified(machine.special[~edges[source, byte]], deepest[int(module_of[source])])
        edges[source, byte] = DEAD if edge is None else _plain(edge) or ~special.setdefault(edge, len(special))
    return replace(machine, edges=edges, special=tuple(special))


def _deepest(machine: Machine, module_of: npt.NDArray[np.int64]) -> dict[int, int]:
    """By module, the most frames below its own; at least MAX_DEPTH + 1 where there is no bound."""
    calls: dict[int, set[int]] = {int(module): set() for module in np.unique(module_of)}
    for source, byte in np.argwhere(machine.edges < 0).tolist():
        edge: Edge | None = machine.special[~machine.edges[source, byte]]
        while edge is not None:
            if edge.push is not None:
                calls[int(module_of[source])].add(int(module_of[edge.target]))
            edge = edge.otherwise
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
    image = list(range(machine.num_states))
    kinds: dict[tuple[int, ...], int] = {}
    moved = _Moved(machine, image)
    rows: list[list[int]] = machine.edges[:, columns(machine)].tolist()
    accepting = machine.accepting.tolist()
    order = _successors_first(machine, rows)
    for state in order:
        key = [image[target] if target >= 0 else moved.special(~target) for target in rows[state]]
        image[state] = kinds.setdefault((*key, accepting[state]), state)
    kept = [DEAD, *(state for state in reversed(order) if image[state] == state)]
    return _renumbered(machine, kept, np.array(image))


class _Moved:
    """Numbers for special edges in which equal ones, as far as is known of their targets, are equal."""

    def __init__(self, machine: Machine, image: list[int]) -> None:
        self._machine, self._image = machine, image
        self._numbers: dict[Edge, int] = {}

    def special(self, index: int) -> int:
        return ~self._numbers.setdefault(self._edge(self._machine.special[index]), len(self._numbers))

    def _edge(self, edge: Edge) -> Edge:
        otherwise = None if edge.otherwise is None else self._edge(edge.otherwise)
        return replace(edge, target=self._image[edge.target], otherwise=otherwise)


def _successors_first(machine: Machine, rows: list[list[int]]) -> list[int]:
    """The states that can be reached, each after those that it leads to, but for cycles."""
    order: list[int] = []
    if machine.start == DEAD:
        return order
    seen = {DEAD, machine.start}
    stack = [(machine.start, iter(_next_states(machine, rows[machine.start])))]
    while stack:
        state, following = stack[-1]
        target = next((one for one in following if one not in seen), None)
        if target is None:
            order.append(state)
            stack.pop()
        else:
            seen.add(target)
            stack.append((target, iter(_next_states(machine, rows[target]))))
    return order


def _next_states(machine: Machine, row: list[int]) -> list[int]:
    found: list[int] = []
    for target in set(row):
        found += [target] if target >= 0 else _targets(machine, machine.special[~target])
    return sorted(found)


def _targets(machine: Machine, edge: Edge | None) -> list[int]:
    found: list[int] = []
    while edge is not None:
        found.append(edge.target)
        if edge.push is not None:
            found += machine.returns[edge.push]
        edge = edge.otherwise
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
