"""Texts of a machine that hang together: entered behind a quote, left by a quote alone, such as those of one format.

What tokens do there is the same in every grammar that has the text, whatever follows it.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.machine import Machine
from zllm_jax.fence.regions import Exits, Region, Regions, RegionTables, flat_exits
from zllm_jax.fence.vocabulary import Vocabulary

Ints = npt.NDArray[np.int64]
QUOTE, BACKSLASH = 0x22, 0x5C
MIN_STATES, MAX_STATES = 8, 2048
MOST_ENDS = 3  # states that may follow the quote: more, and it is a list of names
_PATHS: WeakKeyDictionary[Vocabulary, list[tuple[Ints, npt.NDArray[np.uint8]]]] = WeakKeyDictionary()


def closed_texts(machine: Machine, taken: npt.NDArray[np.bool_]) -> list[Region]:
    """The texts of a machine that begin in none of the states `taken`, and that end in few ways."""
    edges, kinds = machine.edges, np.sort(machine.columns)  # by byte, so that equal texts have equal digests
    inner: list[list[int]] = edges[:, kinds[kinds != QUOTE]].tolist()
    found: list[Region] = []
    covered = taken.copy()
    for entry in np.unique(edges[:, QUOTE][edges[:, QUOTE] > 0]).tolist():
        if covered[entry] or edges[entry, BACKSLASH] <= 0:
            continue
        states = _reached(entry, inner)
        if states is not None and len(np.setdiff1d(edges[states, QUOTE], states)) <= 1 + MOST_ENDS:
            found.append(_text(machine, states))
            covered[states] = True
    return found


def with_closed(machine: Machine, found: Regions) -> Regions:
    """And the texts; states that are in another region stay there."""
    texts = closed_texts(machine, found.index >= 0)
    index, local = found.index.copy(), found.local.copy()
    for number, one in enumerate(texts, len(found.regions)):
        free = index[one.states] < 0
        index[one.states[free]], local[one.states[free]] = number, np.flatnonzero(free)
    return Regions([*found.regions, *texts], found.plain, index, local)


def _reached(entry: int, inner: list[list[int]]) -> Ints | None:
    """The states of a text, in the order in which they are reached; None where it is no text, too small or large.

    A quote that leads to one of them is part of an escape.
    """
    order, seen = [entry], {entry}
    for state in order:
        for target in dict.fromkeys(inner[state]):
            if target < 0:
                return None
            if target and target not in seen:
                seen.add(target)
                order.append(target)
        if len(order) > MAX_STATES:
            return None
    return np.array(order, np.int64) if len(order) >= MIN_STATES else None


def _text(machine: Machine, states: Ints) -> Region:
    local = np.full(machine.num_states, -1, np.int64)
    local[states] = np.arange(len(states))
    edges = machine.edges[states]
    inside = np.where(edges > 0, local[np.maximum(edges, 0)], -1)
    leaves = (edges != DEAD) & (inside < 0)
    return Region(states, inside, leaves, np.zeros_like(leaves), None, closed=True)


def alone(region: Region) -> Machine:
    """The text as a machine of its own, that nothing leaves; its states are one more than in the region."""
    edges = np.zeros((len(region.states) + 1, 256), np.int32)
    edges[1:] = region.inside + 1
    return Machine(edges, np.zeros(len(edges), np.bool_), 1)


def closed_tables(region: Region, masks: npt.NDArray[np.uint32], vocabulary: Vocabulary) -> RegionTables:
    """masks: u32[k, W], the tokens that stay inside."""
    exits = []
    for node, path in _paths_to_quotes(vocabulary):
        state = np.repeat(np.arange(len(region.states))[:, None], len(node), axis=1)
        for byte in path.T:
            state = np.where(state >= 0, region.inside[state, byte], -1)
        root, index = np.nonzero((state >= 0) & region.leaves[state, QUOTE])
        none = np.zeros(len(root), np.bool_)
        exits.append(Exits(root, node[index], path[index], none, state[root, index]))
    return RegionTables(masks, np.zeros((len(region.states), 0), np.uint8), flat_exits(exits))


def _paths_to_quotes(vocabulary: Vocabulary) -> list[tuple[Ints, npt.NDArray[np.uint8]]]:
    """By depth, the nodes of the trie whose byte is a quote, and the bytes before it."""
    found = _PATHS.get(vocabulary)
    if found is None:
        found = _PATHS[vocabulary] = _found_paths(vocabulary)
    return found


def _found_paths(vocabulary: Vocabulary) -> list[tuple[Ints, npt.NDArray[np.uint8]]]:
    data, starts = vocabulary.flat
    found = [(np.zeros(0, np.int64), np.zeros((0, 0), np.uint8))]
    for depth, level in enumerate(vocabulary.levels[1:]):
        node = np.flatnonzero(level.byte == QUOTE)
        begin = starts[vocabulary.order[level.start[node]]].astype(np.int64)
        found.append((node, data[begin[:, None] + np.arange(depth)]))
    return found
