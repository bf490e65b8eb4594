"""Free stretches of a machine, such as the inside of a text: what tokens do there is the same in every grammar.

A region is a state that leads to itself by many bytes, and those that it reaches and that cannot but lead back. For a
vocabulary, the tokens that stay inside from their first byte to their last, and the places where others leave, are
found once and kept with it. Edges inside may count, as the characters of a text that must not become too long: of each
token is known how often.

Another state may follow a region's: whatever stays inside there is legal here too, as in names of which some are listed
and lead elsewhere once they end. It shares the region's tokens.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.machine import Condition, Machine
from zllm_jax.fence.vocabulary import Level, Vocabulary, pack_bits

Ints = npt.NDArray[np.int64]
MAX_STATES = 64
LONGEST_WAY = 12  # bytes from a state back to its region's widest
MOST_KEPT, MOST_BYTES = 64, 2**26  # for each vocabulary
WIDE = 64  # a region has so many bytes, at least, that lead from its widest state to itself


@dataclass(frozen=True, eq=False)
class Region:
    """states: of the machine, the widest first. inside: i64[k, 256], the next of them, or -1; leaves: other edges.
    closed: whether it is a text of `fence.closed`, which is entered at its first state.

    counts: bool[k, 256], the edges inside that add one to the frame's count. most: what that count may come to; None
    where there is no bound.
    """

    states: Ints
    inside: Ints
    leaves: npt.NDArray[np.bool_]
    counts: npt.NDArray[np.bool_]
    most: int | None
    closed: bool = False

    @cached_property
    def digest(self) -> str:
        """Of all that matters to tokens, but for the bound's value."""
        inside = self.inside.astype(np.int16)
        flags = (self.leaves.tobytes(), self.counts.tobytes(), bytes([self.most is None, self.closed]))
        return hashlib.sha256(b"".join((inside.tobytes(), *flags))).hexdigest()


@dataclass(frozen=True, eq=False)
class Exits:
    """Where tokens leave: walks from state `root` reach a node of the trie at `end`, and its byte leaves.

    path: u8[., d - 1], the bytes before that. doubt: whether a bound may have stopped them before.
    """

    root: Ints
    node: Ints
    path: npt.NDArray[np.uint8]
    doubt: npt.NDArray[np.bool_]
    end: Ints


@dataclass(frozen=True, eq=False)
class AllExits:
    """Those of all depths, one after the other: of depth d from starts[d] to starts[d + 1]. Paths are filled up."""

    exits: Exits
    starts: Ints


def flat_exits(by_depth: Sequence[Exits]) -> AllExits:
    """by_depth: from the root of the trie on, where none leaves."""
    longest = max(one.path.shape[1] for one in by_depth)
    paths = [np.pad(one.path, ((0, 0), (0, longest - one.path.shape[1]))) for one in by_depth]
    root, node, doubt, end = (
        np.concatenate([getattr(one, name) for one in by_depth]) for name in ("root", "node", "doubt", "end")
    )
    starts = np.cumsum([0, *(len(one.node) for one in by_depth)])
    return AllExits(Exits(root, node, np.concatenate(paths), doubt, end), starts)


@dataclass(frozen=True, eq=False)
class RegionTables:
    """masks: u32[k, W], the tokens that stay inside whatever the count.

    counts: u8[k, V], of the others that stay inside, how much they add to the count; 0 for all else. [k, 0] without a
    bound.
    """

    masks: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.uint8]
    exits: AllExits

    @property
    def nbytes(self) -> int:
        return self.masks.nbytes + self.counts.nbytes + self.exits.exits.path.nbytes


_KEPT: WeakKeyDictionary[Vocabulary, dict[str, RegionTables]] = WeakKeyDictionary()
_LOCK = threading.Lock()


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of a machine. plain: i64[Q, 256], its edges, those that only count as if plain, no other special one.

    index, local: i64[Q], of each state the region that it is in, or follows, and which of its states; -1 for none.
    """

    regions: Sequence[Region]
    plain: Ints
    index: Ints
    local: Ints


def regions_of(machine: Machine) -> Regions:
    """The regions that are wide and small, and what follows them."""
    plain, most = _with_counted(machine)
    loops = (plain == np.arange(machine.num_states)[:, None]).sum(axis=1)
    loops[DEAD] = 0
    home = np.where(loops >= WIDE, np.arange(machine.num_states), 0)
    _spread(home, plain, machine)
    regions: list[Region] = []
    index, local = np.full(machine.num_states, -1), np.full(machine.num_states, -1)
    for root in np.flatnonzero(loops >= WIDE).tolist():
        region = _region(machine, plain, most, root, home == root)
        if region is not None:
            index[region.states], local[region.states] = len(regions), np.arange(len(region.states))
            regions.append(region)
    if regions:
        _follow(machine, plain, regions, index, local)
    return Regions(regions, plain, index, local)


def _spread(home: Ints, plain: Ints, machine: Machine) -> None:
    """Give states from which all ways lead to one root that root as their `home`."""
    kinds = machine.columns
    edges, own = plain[:, kinds], machine.edges[:, kinds]
    free = (home == 0) & (own != DEAD).any(axis=1) & ~((own < 0) & (edges == 0)).any(axis=1)
    for _ in range(LONGEST_WAY):
        homes = home[edges]
        low, high = np.where(edges > 0, homes, len(home)).min(axis=1), homes.max(axis=1)
        fresh = free & (home == 0) & (low == high)
        if not fresh.any():
            break
        home[fresh] = high[fresh]


def _follow(machine: Machine, plain: Ints, regions: Sequence[Region], index: Ints, local: Ints) -> None:
    """Find the states that follow those of a region."""
    kinds = machine.columns
    edges, own = plain[:, kinds], machine.edges[:, kinds]
    others = np.flatnonzero((index < 0) & ((edges > 0).sum(axis=1) >= 2))
    home = np.where(edges[others] > 0, index[edges[others]], -1)
    known = (home >= 0).any(axis=1)
    others, home = others[known], home.max(axis=1)[known]
    for number, region in enumerate(regions):
        mine = others[home == number]
        if not len(mine) or region.counts.any():
            continue
        best = np.zeros(len(mine), np.int64)
        for state, (after, leaves) in enumerate(zip(region.inside[:, kinds], region.leaves[:, kinds], strict=True)):
            allowed = np.where(after >= 0, edges[mine] > 0, leaves | (own[mine] == DEAD)).all(axis=1)
            shared = ((edges[mine] == region.states[after]) & (after >= 0)).sum(axis=1)
            better = allowed & (shared > best)
            best[better] = shared[better]
            index[mine[better]], local[mine[better]] = number, state
    inside = [region.inside[:, kinds] for region in regions]
    while True:
        dropped = False
        for number, inner in enumerate(inside):
            mine = others[(index[others] == number)]
            after = inner[local[mine]]
            target = edges[mine]
            good = (after < 0) | ((index[target] == number) & (local[target] == after))
            wrong = mine[~good.all(axis=1)]
            index[wrong], local[wrong] = -1, -1
            dropped |= bool(len(wrong))
        if not dropped:
            return


def _with_counted(machine: Machine) -> tuple[Ints, dict[int, int | None]]:
    """The edges, those that only count as if plain, no other special one; and, by number, what those may count to."""
    most: dict[int, int | None] = {}
    targets = np.zeros(len(machine.special) + 1, np.int64)
    for number, edge in enumerate(machine.special):
        high = edge.guard[0].high if edge.guard else -1
        if edge.only_counts and edge.guard in ((), (Condition(high=high),)):
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
    if len(bounds) > 1 or len(waiting) > MAX_STATES:
        return None
    return Region(
        np.array(waiting, np.int64), inside, (own != DEAD) & (inside < 0), counts, bounds.pop() if bounds else None
    )


def region_tables(
    region: Region, vocabulary: Vocabulary, make: Callable[[Region, Vocabulary], RegionTables]
) -> RegionTables:
    """Made once for each kind of region, and kept with the vocabulary."""
    kept = _KEPT.setdefault(vocabulary, {})
    made = kept.get(region.digest) or make(region, vocabulary)
    with _LOCK:  # several threads compile
        kept.pop(region.digest, None)
        kept[region.digest] = made  # the last one used is the last one to go
        while len(kept) > MOST_KEPT or (len(kept) > 1 and sum(one.nbytes for one in kept.values()) > MOST_BYTES):
            del kept[next(iter(kept))]
    return made


def open_tables(region: Region, vocabulary: Vocabulary) -> RegionTables:
    levels, num_states = vocabulary.levels, len(region.states)
    bits = np.zeros((num_states, len(vocabulary)), np.bool_)
    counts = np.zeros((num_states, len(vocabulary) if region.most is not None else 0), np.uint8)
    root, state = np.arange(num_states), np.arange(num_states)
    node, count = np.zeros(num_states, np.int64), np.zeros(num_states, np.int64)
    path = np.zeros((num_states, 0), np.uint8)
    exits = [Exits(root[:0], node[:0], path[:0], node[:0] > 0, root[:0])]
    for level, below in pairwise(levels):
        source, node = children(level, node)
        byte = below.byte[node]
        leaves = np.flatnonzero(region.leaves[state[source], byte])
        gone = source[leaves]
        exits.append(Exits(root[gone], node[leaves], path[gone], count[gone] > 0, state[gone]))
        after, counted = region.inside[state[source], byte], region.counts[state[source], byte]
        stays = np.flatnonzero(after >= 0)
        source = source[stays]
        path = np.concatenate([path[source], byte[stays, None].astype(np.uint8)], axis=1)
        root, state, node = root[source], after[stays], node[stays]
        count = count[source] + (counted[stays] if region.most is not None else 0)
        own = below.own[node] - below.start[node]
        where = np.repeat(root, own), vocabulary.order[ranges(below.start[node], own)]
        bits[where] = np.repeat(count == 0, own)
        if region.most is not None:
            counts[where] = np.repeat(np.where(count < 256, count, 0), own)  # longer tokens are left out
    return RegionTables(pack_bits(bits), counts, flat_exits(exits))


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
