"""Where a machine may go, guards aside: as graphs over its states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.machine import Edge, Machine

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Ints = npt.NDArray[np.int64]


def chain(edge: Edge | None) -> Iterator[Edge]:
    """An edge and what is tried after it."""
    while edge is not None:
        yield edge
        edge = edge.otherwise


def leading_on(machine: Machine) -> npt.NDArray[np.bool_]:
    """By state, whether some way leads to the end of its frame or of the text."""
    source, target, special = _ways(machine)
    alive = machine.accepting.copy()
    pushes: list[tuple[int, Edge]] = []
    for state, edge in special:
        alive[state] |= edge.pop is not None
        if edge.push is not None:
            pushes.append((state, edge))
    graph = _graph(target, source, machine.num_states)
    while True:
        alive = _reached(graph, alive)
        found = [state for state, edge in pushes if alive[edge.target] and _returning(machine, edge, alive)]
        if alive[found].all():
            return alive
        alive[found] = True


def callers(machine: Machine) -> dict[int, frozenset[int]]:
    """By state, the rows of returns that the frame it is in may remember; none for states of the outermost frame."""
    from scipy.sparse.csgraph import breadth_first_order  # 15 MB: an engine that follows no fence does without

    source, target, special = _ways(machine)
    more = [(state, row) for state, edge in special if edge.push is not None for row in machine.returns[edge.push]]
    beyond = np.array([one for one in more if one[1] != DEAD], np.int64).reshape(-1, 2)
    graph = _graph(np.append(source, beyond[:, 0]), np.append(target, beyond[:, 1]), machine.num_states)
    pushes: dict[int, set[int]] = {}
    for _, edge in special:
        if edge.push is not None:
            pushes.setdefault(edge.target, set()).add(edge.push)
    found: dict[int, set[int]] = {}
    for first, rows in pushes.items():
        for state in breadth_first_order(graph, first, return_predecessors=False).tolist():
            found.setdefault(state, set()).update(rows)
    return {state: frozenset(rows) for state, rows in found.items()}


def _ways(machine: Machine) -> tuple[Ints, Ints, list[tuple[int, Edge]]]:
    """From where to where edges lead within a frame; and the special ones, each with its state."""
    edges = machine.edges[:, machine.columns]
    source, column = np.nonzero(edges > 0)
    target = edges[source, column].astype(np.int64)
    states, column = np.nonzero(edges < 0)
    numbers = sorted(set(zip(states.tolist(), (~edges[states, column]).tolist(), strict=True)))
    special = [(state, edge) for state, number in numbers for edge in chain(machine.special[number])]
    within = [(state, edge.target) for state, edge in special if edge.pop is None and edge.push is None]
    more = np.array(within, np.int64).reshape(-1, 2)
    return np.append(source, more[:, 0]), np.append(target, more[:, 1]), special


def _graph(source: Ints, target: Ints, num_states: int) -> csr_array:
    from scipy.sparse import coo_array

    return coo_array((np.ones(len(source), np.int32), (source, target)), shape=(num_states, num_states)).tocsr()


def _reached(graph: csr_array, begin: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """What can be reached from any of several states."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order

    first, size = len(begin), (len(begin) + 1, len(begin) + 1)
    starts = np.flatnonzero(begin)
    more = csr_array((np.ones(len(starts), np.int32), starts, [*([0] * first), 0, len(starts)]), shape=size)
    graph = csr_array((graph.data, graph.indices, np.append(graph.indptr, graph.indptr[-1])), shape=size)
    reached = np.zeros(first + 1, np.bool_)
    reached[breadth_first_order(graph + more, first, return_predecessors=False)] = True
    return reached[:first]


def _returning(machine: Machine, edge: Edge, alive: npt.NDArray[np.bool_]) -> bool:
    return edge.push is not None and any(alive[state] for state in machine.returns[edge.push])
