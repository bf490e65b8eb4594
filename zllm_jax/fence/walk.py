"""The walk of a vocabulary's trie through a machine, for all its states at once, level by level.

Two states that cannot be told apart within the bytes that are left below a node are walked as one: so the many states
of a listed name, or of a bounded text, cost hardly more than one. What stays in a free stretch is not walked at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zllm_jax.fence.alike import alike
from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.closed import alone, closed_tables, with_closed
from zllm_jax.fence.flow import callers
from zllm_jax.fence.machine import Edge, Machine
from zllm_jax.fence.regions import Region, RegionTables, children, open_tables, ranges, region_tables, regions_of
from zllm_jax.fence.vocabulary import Level, Vocabulary, pack_bits

Ints = npt.NDArray[np.int64]
DEPENDENT, LEGAL = 1, 2


@dataclass(frozen=True, eq=False)
class Found:
    """Tokens that may come, by kind of state: parallel arrays."""

    kind: Ints
    token: Ints
    verdict: npt.NDArray[np.uint8]

    def only(self, verdict: int) -> Found:
        chosen = np.flatnonzero(self.verdict == verdict)
        return Found(self.kind[chosen], self.token[chosen], self.verdict[chosen])

    def with_doubted(self, kind: Ints, token: Ints) -> Found:
        """And these, which only the stack can decide."""
        verdict = np.append(self.verdict, np.full(len(kind), DEPENDENT, np.uint8))
        return Found(np.append(self.kind, kind), np.append(self.token, token), verdict)

    def sorted(self) -> Found:
        order = np.lexsort((self.token, self.kind))
        return Found(self.kind[order], self.token[order], self.verdict[order])


@dataclass(frozen=True, eq=False)
class _Items:
    """Places of the walk, each once: a state, a node of the level, and the frames that the token pushed itself."""

    state: Ints
    node: Ints
    stack: Ints


@dataclass(frozen=True, eq=False)
class _Steps:
    """Edges that lead to the items of a level: first the plain ones. source: an item of the level before, or a kind.

    sure: of the others, whether no guard and no unknown frame has a say.
    """

    source: Ints
    target: Ints
    num_plain: int
    sure: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Stretch:
    """Kinds of state that are in regions of one digest, or follow them, with their states, i64[K].

    local: which state of the region. most: what the count may come to. states: i64[K, k], those of the region that a
    kind is in; None where kinds may follow it.
    """

    kind: Ints
    state: Ints
    local: Ints
    most: Ints
    tables: RegionTables
    states: Ints | None

    def begins(self, plain: Ints) -> tuple[Ints, Ints, Ints, npt.NDArray[np.bool_], Ints]:
        """Kind, node, state, doubt, depth: where its walks begin, at the byte that leaves; by depth."""
        exits, starts = self.tables.exits.exits, self.tables.exits.starts
        index, which = np.nonzero(exits.root[:, None] == self.local)
        if self.states is not None:
            state = self.states[which, exits.end[index]]
        else:
            state, path = self.state[which], exits.path[index]
            for i, first in enumerate(np.searchsorted(index, starts[2:-1])):
                state[first:] = plain[state[first:], path[first:, i]]
        depth = np.searchsorted(starts, index, side="right") - 1
        return self.kind[which], exits.node[index], state, exits.doubt[index], depth


class Walk:
    """kinds: the first of all states that look alike for the longest token. row: i64[Q], each state's kind."""

    def __init__(self, machine: Machine, vocabulary: Vocabulary, *, closed: bool = True) -> None:
        self._machine, self._levels = machine, vocabulary.levels
        self._edges, self._order = machine.edges, vocabulary.order
        self._callers = callers(machine)
        self._alike = alike(machine, self._callers, len(self._levels) - 1)
        self._stacks: list[tuple[int, int]] = [(0, -1)]  # of each pushed stack: the one below, and its row of returns
        self._stack_ids: dict[tuple[int, int], int] = {}
        self.kinds, self.row = np.unique(self._alike[-1], return_inverse=True)
        self._regions = with_closed(machine, regions_of(machine)) if closed else regions_of(machine)
        self._stretches = list(self._find_stretches(vocabulary))
        self._begins, self._begin_starts = self._all_begins()

    def _find_stretches(self, vocabulary: Vocabulary) -> Iterator[_Stretch]:
        regions = self._regions.regions
        digests = [one.digest for one in regions]
        of_kind = self._regions.index[self.kinds]
        for digest in dict.fromkeys(digests):
            same: npt.NDArray[np.bool_] = np.array([one == digest for one in digests])
            kind = np.flatnonzero((of_kind >= 0) & same[of_kind])
            if not len(kind):
                continue
            state, most = self.kinds[kind], np.array([one.most or 0 for one in regions])[of_kind[kind]]
            first = regions[int(np.argmax(same))]
            tables = region_tables(first, vocabulary, _closed_tables if first.closed else open_tables)
            states = np.stack([regions[one].states for one in of_kind[kind]]) if first.closed else None
            yield _Stretch(kind, state, self._regions.local[state], most, tables, states)

    def _all_begins(self) -> tuple[list[npt.NDArray[Any]], Ints]:
        """Kind, node, state, doubt of all walks that begin where a stretch is left, by depth; and where each begins."""
        several = [_NO_BEGINS, *(one.begins(self._regions.plain) for one in self._stretches)]
        *begins, depth = (np.concatenate(parts) for parts in zip(*several, strict=True))
        order = np.argsort(depth, kind="stable")
        starts = np.searchsorted(depth[order], np.arange(len(self._levels) + 1))
        return [one[order] for one in begins], starts

    def inside(self) -> Iterator[tuple[Ints, npt.NDArray[np.uint32]]]:
        """Kinds within free stretches, and the tokens that stay there, u32[., W]; `found` has the others."""
        return ((one.kind, one.tables.masks[one.local]) for one in self._stretches)

    def counted(self) -> Iterator[tuple[Ints, Ints, npt.NDArray[np.uint8]]]:
        """Kinds within stretches that count to a bound: the bounds, and what each token adds, u8[., V] (0: not so)."""
        for one in self._stretches:
            some = np.flatnonzero(np.any(one.tables.counts[one.local], axis=1))
            yield one.kind[some], one.most[some], one.tables.counts[one.local[some]]

    def found(self) -> Found:
        """What may come, by kind of state."""
        items, steps, begun = [_Items(_NONE, _NONE, _NONE)], [_NO_STEPS], [_NO_STEPS]
        last = int(np.flatnonzero(np.diff(self._begin_starts)).max(initial=0))
        for depth in range(1, len(self._levels)):  # all that is in no free stretch begins at the first
            if depth > max(last, 1) and not len(items[-1].node):
                break
            after, ways, first = self._down(items[-1], depth)
            items.append(after)
            steps.append(ways)
            begun.append(first)
        return self._up(items, steps, begun)

    def _down(self, items: _Items, depth: int) -> tuple[_Items, _Steps, _Steps]:
        """All places one byte further, with the ways from those before, and from the kinds that begin to be walked."""
        level, below = self._levels[depth - 1], self._levels[depth]
        source, node = children(level, items.node)
        kind, first, state, doubt = (np.concatenate(parts) for parts in zip(*self._beginning(depth), strict=True))
        none = np.zeros(len(source), np.bool_)
        onward = self._moved(source, node, items.state[source], items.stack[source], none, below)
        begun = self._moved(kind, first, state, np.zeros_like(kind), doubt, below)
        num_nodes, num_stacks = len(below.byte), len(self._stacks)
        state, node, stack = (np.concatenate(both) for both in zip(onward[1:4], begun[1:4], strict=True))
        key, target = np.unique((state * num_nodes + node) * num_stacks + stack, return_inverse=True)
        rest, stacks = np.divmod(key, num_stacks)
        states, nodes = np.divmod(rest, num_nodes)
        cut = len(onward[0])
        ways, jumps = _Steps(onward[0], target[:cut], *onward[4:]), _Steps(begun[0], target[cut:], *begun[4:])
        return _Items(states, nodes, stacks), ways, jumps

    def _beginning(self, depth: int) -> Iterator[tuple[Ints, Ints, Ints, npt.NDArray[np.bool_]]]:
        """Kind, node, state, doubt: where walks begin. Within a free stretch, at the byte that leaves it."""
        here = slice(*self._begin_starts[depth : depth + 2])
        kind, node, state, doubt = (one[here] for one in self._begins)
        yield kind, node, state, doubt
        if depth == 1:
            others = np.ones(len(self.kinds), np.bool_)
            for one in self._stretches:
                others[one.kind] = False
            kinds = np.flatnonzero(others)
            index, node = np.nonzero(self._edges[self.kinds[kinds]][:, self._levels[depth].byte])
            yield kinds[index], node, self.kinds[kinds[index]], np.zeros(len(node), np.bool_)

    def _moved(
        self, source: Ints, node: Ints, state: Ints, stack: Ints, doubt: npt.NDArray[np.bool_], below: Level
    ) -> tuple[Ints, Ints, Ints, Ints, int, npt.NDArray[np.bool_]]:
        """From states with stacks over the bytes of nodes: source, state, node, stack, how many plain, whether sure."""
        edge = self._edges[state, below.byte[node]].astype(np.int64)
        plain, doubted = np.flatnonzero((edge > 0) & ~doubt), np.flatnonzero((edge > 0) & doubt)
        special = np.flatnonzero(edge < 0)
        picked, *taken, sure = self._taken(state[special], stack[special], ~edge[special])
        sure = np.concatenate([np.zeros(len(doubted), np.bool_), sure & ~doubt[special[picked]]])
        where = np.concatenate([plain, doubted, special[picked]])
        plainly = np.concatenate([plain, doubted])
        after, pushed = (np.concatenate(both) for both in zip((edge[plainly], stack[plainly]), taken, strict=True))
        height = np.minimum(below.height[node[where]], len(self._alike) - 1)
        return source[where], self._alike[height, after], node[where], pushed, len(plain), sure

    def _taken(self, state: Ints, stack: Ints, special: Ints) -> tuple[Ints, Ints, Ints, npt.NDArray[np.bool_]]:
        """The ways that edges with guards, pushes and pops may lead: of which one, state, stack, whether sure."""
        if not len(state):
            none = np.zeros(0, np.int64)
            return none, none, none, none.astype(np.bool_)
        keys = np.stack([special, stack, state])
        unique, which = np.unique(keys, axis=1, return_inverse=True)
        ways = [self._ways(*map(int, one)) for one in unique.T]
        which = which.reshape(-1)
        count = np.array([len(one) for one in ways])
        picked = np.repeat(np.arange(len(which)), count[which])
        flat = np.array([way for one in ways for way in one], np.int64).reshape(-1, 3)
        chosen = flat[ranges((np.cumsum(count) - count)[which], count[which])]
        return picked, chosen[:, 0], chosen[:, 1], chosen[:, 2].astype(np.bool_)

    def _ways(self, special: int, stack: int, state: int) -> list[tuple[int, int, bool]]:
        """(state, stack, sure) after an edge."""
        found: list[tuple[int, int, bool]] = []
        edge: Edge | None = self._machine.special[special]
        sure = edge is not None and not edge.guard
        while edge is not None:
            if edge.pop is not None:
                below, row = self._stacks[stack]
                known = row >= 0
                rows = [row] if known else sorted(self._callers.get(state, ()))
                returns = [self._machine.returns[one] for one in rows]
                found += [
                    (one[edge.pop], below if known else 0, sure and known) for one in returns if len(one) > edge.pop
                ]
            elif edge.push is not None:
                found.append((edge.target, self._pushed(stack, edge.push), sure))
            else:
                found.append((edge.target, stack, sure))
            edge = edge.otherwise
        return list(dict.fromkeys(one for one in found if one[0] != DEAD))

    def _pushed(self, stack: int, row: int) -> int:
        key = (stack, row)
        if key not in self._stack_ids:
            self._stack_ids[key] = len(self._stacks)
            self._stacks.append(key)
        return self._stack_ids[key]

    def _up(self, items: list[_Items], steps: list[_Steps], begun: list[_Steps]) -> Found:
        """What becomes of all tokens below each place, level by level, and so of those of each kind."""
        results, offsets = np.zeros(0, np.uint8), np.zeros(0, np.int64)
        gathered = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8))]
        doubted = [*gathered]
        for depth in reversed(range(1, len(items))):
            level, here = self._levels[depth], items[depth]
            size = level.stop[here.node] - level.start[here.node]
            starts = np.cumsum(size) - size
            filled = np.zeros(int(size.sum()), np.uint8)
            filled[ranges(starts, level.own[here.node] - level.start[here.node])] = LEGAL
            if depth + 1 < len(items):
                way, below = steps[depth + 1], self._levels[depth + 1]
                child = items[depth + 1].node[way.target]
                length = below.stop[child] - below.start[child]
                to = starts[way.source] + below.start[child] - level.start[here.node[way.source]]
                copied = self._weighed(way, results[ranges(offsets[way.target], length)], length)
                cut = int(length[: way.num_plain].sum())
                filled[ranges(to[: way.num_plain], length[: way.num_plain])] = copied[:cut]
                np.maximum.at(filled, ranges(to[way.num_plain :], length[way.num_plain :]), copied[cut:])
            results, offsets = filled, starts
            way = begun[depth]
            child = here.node[way.target]
            length = level.stop[child] - level.start[child]
            verdict = self._weighed(way, results[ranges(offsets[way.target], length)], length)
            kind, place = np.repeat(way.source, length), ranges(level.start[child], length)
            cut = int(length[: way.num_plain].sum())
            kept = np.flatnonzero(verdict[:cut])
            gathered.append((kind[kept], place[kept], verdict[kept]))
            doubted.append((kind[cut:], place[cut:], verdict[cut:]))
        kind, place, verdict = (np.concatenate(parts) for parts in zip(*doubted, strict=True))
        pair, best = _strongest(kind * len(self._order) + place, verdict)
        gathered.append((*np.divmod(pair, len(self._order)), best))
        kind, place, verdict = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
        return Found(kind, self._order[place], verdict)

    def _weighed(self, way: _Steps, results: npt.NDArray[np.uint8], length: Ints) -> npt.NDArray[np.uint8]:
        """What the tokens behind these steps come to, where a step itself may not be sure. Changes `results`."""
        cut = int(length[: way.num_plain].sum())
        most = np.repeat(np.where(way.sure, LEGAL, DEPENDENT).astype(np.uint8), length[way.num_plain :])
        np.minimum(results[cut:], most, out=results[cut:])
        return results


def _closed_tables(region: Region, vocabulary: Vocabulary) -> RegionTables:
    """Of a text that is left by quotes only: what stays inside is what is legal where nothing leaves."""
    walk = Walk(alone(region), vocabulary, closed=False)
    found = walk.found()
    bits = np.zeros((len(walk.kinds), len(vocabulary)), np.bool_)
    bits[found.kind, found.token] = True
    masks = pack_bits(bits)
    for kinds, words in walk.inside():
        masks[kinds] |= words
    return closed_tables(region, masks[walk.row[1:]], vocabulary)


def _strongest(pair: Ints, verdict: npt.NDArray[np.uint8]) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Each pair once, with the best that one of its ways comes to, where that is anything."""
    key = np.unique(pair * 4 + LEGAL - verdict)
    once = np.ones(len(key), np.bool_)
    once[1:] = key[1:] // 4 != key[:-1] // 4
    pair, best = np.divmod(key[once], 4)
    return pair[best < LEGAL], (LEGAL - best[best < LEGAL]).astype(np.uint8)


_NONE = np.zeros(0, np.int64)
_NO_BEGINS = (_NONE, _NONE, _NONE, _NONE.astype(np.bool_), _NONE)
_NO_STEPS = _Steps(_NONE, _NONE, 0, _NONE.astype(np.bool_))
