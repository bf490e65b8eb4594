"""Free stretches of a machine, such as the inside of a text: what tokens do there is the same in every grammar.

A region is a set of states that all lead to each other. For a vocabulary, the tokens that stay inside from their first
byte to their last, and the places where others leave, are found once and kept with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.machine import Machine
from zllm_jax.fence.vocabulary import Level, Vocabulary, pack_bits

Ints = npt.NDArray[np.int64]
MAX_STATES = 64
MOST_KEPT = 32  # for each vocabulary
WIDE = 64  # a region has so many bytes, at least, that lead from its widest state to itself


@dataclass(frozen=True, eq=False)
class Region:
    """states: of the machine, the widest first. inside: i64[k, 256], the next of them, or -1; leaves: other edges."""

    states: Ints
    inside: Ints
    leaves: npt.NDArray[np.bool_]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.inside.tobytes() + self.leaves.tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Exits:
    """Where tokens leave at one depth: walks from state `root` reach a node of the trie, whose byte leaves `state`."""

    root: Ints
    node: Ints
    state: Ints


@dataclass(frozen=True, eq=False)
class RegionTables:
    """masks: u32[k, W], the tokens that stay inside. exits: by depth."""

    masks: npt.NDArray[np.uint32]
    exits: Sequence[Exits]


_KEPT: WeakKeyDictionary[Vocabulary, dict[str, RegionTables]] = WeakKeyDictionary()


def regions_of(machine: Machine) -> list[Region]:
    """The regions that are wide and small."""
    source, byte = np.nonzero(machine.edges > 0)
    target = machine.edges[source, byte]
    loops = np.bincount(source[source == target], minlength=machine.num_states)
    if loops.max(initial=0) < WIDE:
        return []
    size = (machine.num_states, machine.num_states)
    graph = coo_array((np.ones(len(source), np.bool_), (source, target)), shape=size)
    _, label = connected_components(graph, connection="strong")
    sizes = np.bincount(label)
    roots: dict[int, int] = {}
    for state in np.flatnonzero(loops >= WIDE).tolist():
        best = roots.setdefault(int(label[state]), state)
        if loops[state] > loops[best]:
            roots[int(label[state])] = state
    return [_region(machine, root, label == one) for one, root in roots.items() if sizes[one] <= MAX_STATES]


def _region(machine: Machine, root: int, member: npt.NDArray[np.bool_]) -> Region:
    states = {root: 0}
    for state in (waiting := [root]):
        targets = machine.edges[state]
        _, first = np.unique(targets, return_index=True)
        for target in targets[np.sort(first)].tolist():
            if target > 0 and member[target] and target not in states:
                states[target] = len(states)
                waiting.append(target)
    local = np.full(machine.num_states, -1, np.int64)
    local[waiting] = np.arange(len(waiting))
    edges = machine.edges[waiting]
    inside = np.where(edges > 0, local[np.maximum(edges, 0)], -1)
    return Region(np.array(waiting, np.int64), inside, (edges != DEAD) & (inside < 0))


def region_tables(region: Region, vocabulary: Vocabulary) -> RegionTables:
    """Made once for each kind of region, and kept with the vocabulary."""
    kept = _KEPT.setdefault(vocabulary, {})
    digest = region.digest
    if digest not in kept:
        made = _tables(region, vocabulary)
        while len(kept) >= MOST_KEPT:
            kept.pop(next(iter(kept)), None)
        kept[digest] = made
        return made
    return kept[digest]


def _tables(region: Region, vocabulary: Vocabulary) -> RegionTables:
    levels, num_states = vocabulary.levels, len(region.states)
    bits = np.zeros((num_states, len(vocabulary)), np.bool_)
    root, state, node = np.arange(num_states), np.arange(num_states), np.zeros(num_states, np.int64)
    exits = [Exits(root[:0], node[:0], state[:0])]
    for level, below in pairwise(levels):
        source, node = children(level, node)
        byte = below.byte[node]
        leaves = np.flatnonzero(region.leaves[state[source], byte])
        exits.append(Exits(root[source[leaves]], node[leaves], state[source[leaves]]))
        after = region.inside[state[source], byte]
        stays = np.flatnonzero(after >= 0)
        root, state, node = root[source[stays]], after[stays], node[stays]
        own = below.own[node] - below.start[node]
        bits[np.repeat(root, own), vocabulary.order[ranges(below.start[node], own)]] = True
    return RegionTables(pack_bits(bits), tuple(exits))


def children(level: Level, node: Ints) -> tuple[Ints, Ints]:
    """The children of several nodes: the index of each one's parent in `node`, and the nodes of the next level."""
    count = level.count[node]
    return np.repeat(np.arange(len(count)), count), ranges(level.first[node], count)


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """start, start + 1, ... for each of them, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    places: Ints = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return places
