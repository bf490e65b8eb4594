"""The last step of a compilation: bounds that always hold go, and so do states that cannot be reached or told apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from zllm_jax.fence.automaton import DEAD
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
    """Without states that cannot be reached, and with equal ones merged."""
    while True:
        kept, image = _distinct(machine)
        if len(kept) == machine.num_states:
            return machine
        machine = _renumbered(machine, kept, image)


def _distinct(machine: Machine) -> tuple[list[int], npt.NDArray[np.int64]]:
    """One state of each kind, `DEAD` first, and by state the index of its kind; -1 where it cannot be reached."""
    reached = _reached(machine)
    kinds: dict[tuple[bytes, bool], int] = {(machine.edges[DEAD].tobytes(), False): 0}
    kept, image = [DEAD], np.full(machine.num_states, -1, np.int64)
    image[DEAD] = 0
    for state in reached:
        key = (machine.edges[state].tobytes(), bool(machine.accepting[state]))
        if key not in kinds:
            kinds[key] = len(kept)
            kept.append(state)
        image[state] = kinds[key]
    return kept, image


def _reached(machine: Machine) -> list[int]:
    """In the order of their discovery from the start."""
    order, seen = [machine.start], {machine.start, DEAD}
    if machine.start == DEAD:
        return []
    for state in order:
        targets: list[int] = []
        for target in np.unique(machine.edges[state]).tolist():
            targets += [target] if target >= 0 else _targets(machine, machine.special[~target])
        for target in targets:
            if target not in seen:
                seen.add(target)
                order.append(target)
    return order


def _targets(machine: Machine, edge: Edge | None) -> list[int]:
    found: list[int] = []
    while edge is not None:
        found.append(edge.target)
        if edge.push is not None:
            found += machine.returns[edge.push]
        edge = edge.otherwise
    return found


def _renumbered(machine: Machine, kept: list[int], image: npt.NDArray[np.int64]) -> Machine:
    special: dict[Edge, int] = {}
    rows: dict[tuple[int, ...], int] = {}

    def moved(edge: Edge | None) -> Edge | None:
        if edge is None:
            return None
        push = edge.push
        if push is not None:
            row = tuple(max(0, int(image[state])) for state in machine.returns[push])
            push = rows.setdefault(row, len(rows))
        return replace(edge, target=max(0, int(image[edge.target])), push=push, otherwise=moved(edge.otherwise))

    edges = machine.edges[kept].copy()
    plain = edges >= 0
    edges[plain] = np.maximum(image[edges[plain]], 0)
    for value in np.unique(edges[~plain]).tolist():
        edge = moved(machine.special[~value])
        assert edge is not None
        edges[(machine.edges[kept] == value)] = ~special.setdefault(edge, len(special))
    return Machine(edges, machine.accepting[kept], int(max(0, image[machine.start])), tuple(special), tuple(rows))
