"""Free stretches of a machine, such as the inside of a text: what tokens do there is the same in every grammar.

A region is a set of states that all lead to each other. For a vocabulary, the tokens that stay inside from their first
byte to their last, and the places where others leave, are found once and kept with it. Edges inside may count, as the
characters of a text that must not become too long: of each token is known how often.
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
from zllm_jax.fence.machine import Condition, Edge, Machine
from zllm_jax.fence.vocabulary import Level, Vocabulary, pack_bits

Ints = npt.NDArray[np.int64]
MAX_STATES = 64
MOST_KEPT = 32  # for each vocabulary
WIDE = 64  # a region has so many bytes, at least, that lead from its widest state to itself


@dataclass(frozen=True, eq=False)
class Region:
    """states: of the machine, the widest first. inside: i64[k, 256], the next of them, or -1; leaves: other edges.

    counts: bool[k, 256], the edges inside that add one to the frame's count. most: what that count may come to; None
    where there is no bound.
    """

    states: Ints
    inside: Ints
    leaves: npt.NDArray[np.bool_]
    counts: npt.NDArray[np.bool_]
    most: int | None

    @property
    def digest(self) -> str:
        """Of all that matters to tokens, but for the bound's value."""
        parts = (self.inside.tobytes(), self.leaves.tobytes(), self.counts.tobytes(), bytes([self.most is None]))
        return hashlib.sha256(b"".join(parts)).hexdigest()


@dataclass(frozen=True, eq=False)
class Exits:
    """Where tokens leave at one depth: walks from state `root` reach a node of the trie, whose byte leaves `state`.

    doubt: whether a bound may have stopped them before.
    """

    root: Ints
    node: Ints
    state: Ints
    doubt: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class RegionTables:
    """masks: u32[k, W], the tokens that stay inside whatever the count. exits: by depth.

    counts: u8[k, V], of the others that stay inside, how much they add to the count; 0 for all else.
    """

    masks: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.uint8]
    exits: Sequence[Exits]

    @property
    def depth(self) -> int:
        """Behind which no token leaves."""
        return max((depth for depth, one in enumerate(self.exits) if len(one.node)), default=0)


_KEPT: WeakKeyDictionary[Vocabulary, dict[str, RegionTables]] = WeakKeyDictionary()


def regions_of(machine: Machine) -> list[Region]:
    """The regions that are wide and small."""
    edges, most = _with_counted(machine)
    source, byte = np.nonzero(edges > 0)
    target = edges[source, byte]
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
    small = ((root, label == one) for one, root in roots.items() if sizes[one] <= MAX_STATES)
    made = (_region(machine, edges, most, *one) for one in small)
    return [region for region in made if region is not None]


def _with_counted(machine: Machine) -> tuple[Ints, dict[int, int | None]]:
    """The edges, those that only count as if plain, no other special one; and, by number, what those may count to."""
    most: dict[int, int | None] = {}
    targets = np.zeros(len(machine.special) + 1, np.int64)
    for number, edge in enumerate(machine.special):
        high = edge.guard[0].high if edge.guard else -1
        if edge == Edge(edge.target, edge.guard, add=1) and edge.guard in ((), (Condition(high=high),)):
            most[number] = None if high < 0 else high + 1
            targets[number] = edge.target
    edges = machine.edges
    return np.where(edges < 0, targets[np.maximum(~edges, 0)], edges), most


def _region(
    machine: Machine, plain: Ints, most: dict[int, int | None], root: int, member: npt.NDArray[np.bool_]
) -> Region | None:
    """None where its edges count to different bounds."""
    states = {root: 0}
    for state in (waiting := [root]):
        targets = plain[state]
        _, first = np.unique(targets, return_index=True)
        for target in targets[np.sort(first)].tolist():
            if target > 0 and member[target] and target not in states:
                states[target] = len(states)
                waiting.append(target)
    local = np.full(machine.num_states, -1, np.int64)
    local[waiting] = np.arange(len(waiting))
    edges, own = plain[waiting], machine.edges[waiting]
    inside = np.where(edges > 0, local[np.maximum(edges, 0)], -1)
    counts = (inside >= 0) & (own < 0)
    bounds = {most[one] for one in np.unique(~own[counts]).tolist()}
    if len(bounds) > 1:
        return None
    return Region(
        np.array(waiting, np.int64), inside, (own != DEAD) & (inside < 0), counts, bounds.pop() if bounds else None
    )


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
    counts = np.zeros((num_states, len(vocabulary)), np.uint8)
    root, state = np.arange(num_states), np.arange(num_states)
    node, count = np.zeros(num_states, np.int64), np.zeros(num_states, np.int64)
    exits = [Exits(root[:0], node[:0], state[:0], node[:0] > 0)]
    for level, below in pairwise(levels):
        source, node = children(level, node)
        byte = below.byte[node]
        leaves = np.flatnonzero(region.leaves[state[source], byte])
        gone = source[leaves]
        exits.append(Exits(root[gone], node[leaves], state[gone], count[gone] > 0))
        after, counted = region.inside[state[source], byte], region.counts[state[source], byte]
        stays = np.flatnonzero(after >= 0)
        source = source[stays]
        root, state, node = root[source], after[stays], node[stays]
        count = count[source] + (counted[stays] if region.most is not None else 0)
        own = below.own[node] - below.start[node]
        where = np.repeat(root, own), vocabulary.order[ranges(below.start[node], own)]
        bits[where] = np.repeat(count == 0, own)
        counts[where] = np.repeat(np.where(count < 256, count, 0), own)  # longer tokens are left out
    return RegionTables(pack_bits(bits), counts, tuple(exits))


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
