"""A machine x a vocabulary: which tokens are legal in each state, and which depend on the stack.

The trie of the tokens is walked once for all states, level by level. Two states that cannot be told apart within the
bytes that are left below a node are walked as one: so the many states of a bounded text, or of a listed name, cost
hardly more than one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.machine import Edge, Machine
from zllm_jax.fence.vocabulary import Level, Vocabulary

Ints = npt.NDArray[np.int64]
DEPENDENT, LEGAL = 1, 2


@dataclass(frozen=True, eq=False)
class TokenTables:
    """masks: u32[U, W], the legal tokens of each kind of state; bit i of word w is token 32w + i.

    row: i32[Q], the kind of each state. depends: for each kind, the tokens that only the stack can decide: the ids
    dependent[depends[u]:depends[u + 1]], i32. EOS is in neither: it is legal where a text may end.
    """

    machine: Machine
    vocabulary: Vocabulary
    masks: npt.NDArray[np.uint32]
    row: npt.NDArray[np.int32]
    depends: npt.NDArray[np.int32]
    dependent: npt.NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        return self.masks.nbytes + self.machine.edges.nbytes + self.dependent.nbytes

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256((self.machine.digest + self.vocabulary.digest).encode()).hexdigest()


def compile_tokens(machine: Machine, vocabulary: Vocabulary) -> TokenTables:
    """The tables of a machine.

    A token is legal where each of its bytes leads on and the text can still be completed with this vocabulary. Raises
    `UnsupportedGrammar` where even the first token cannot come, or where that cannot be decided: a machine with frames
    needs each of its bytes as a token of its own.
    """
    machine, missing = _spellable(machine, vocabulary)
    walk = _Walk(machine, vocabulary)
    row, found = walk.row, walk.found()
    if missing:
        row, found = _completable(machine, vocabulary)
    if not (found.kind == row[machine.start]).any():
        raise UnsupportedGrammar("the fence cannot be satisfied with this vocabulary: no token may come first")
    num_kinds = int(row.max()) + 1
    masks = _masks(num_kinds, len(vocabulary), found.only(LEGAL))
    open_ones = found.only(DEPENDENT).sorted()
    depends = np.zeros(num_kinds + 1, np.int32)
    np.cumsum(np.bincount(open_ones.kind, minlength=num_kinds), out=depends[1:])
    return TokenTables(machine, vocabulary, masks, row.astype(np.int32), depends, open_ones.token.astype(np.int32))


@dataclass(frozen=True, eq=False)
class _Found:
    """Tokens that may come, by kind of state: parallel arrays."""

    kind: Ints
    token: Ints
    verdict: npt.NDArray[np.uint8]

    def only(self, verdict: int) -> _Found:
        chosen = np.flatnonzero(self.verdict == verdict)
        return _Found(self.kind[chosen], self.token[chosen], self.verdict[chosen])

    def sorted(self) -> _Found:
        order = np.lexsort((self.token, self.kind))
        return _Found(self.kind[order], self.token[order], self.verdict[order])


def _masks(num_kinds: int, num_tokens: int, legal: _Found) -> npt.NDArray[np.uint32]:
    """u32[U, W]. Rows of few tokens are made word by word, the others bit by bit."""
    num_words = -(-num_tokens // 32)
    masks = np.zeros((num_kinds, num_words), np.uint32)
    dense = np.flatnonzero(np.bincount(legal.kind, minlength=num_kinds) > num_words)
    place = np.full(num_kinds, -1, np.int64)
    place[dense] = np.arange(len(dense))
    full = place[legal.kind] >= 0
    bits = np.zeros((len(dense), num_tokens), np.bool_)
    bits[place[legal.kind[full]], legal.token[full]] = True
    masks[dense] = pack_bits(bits)
    kind, token = legal.kind[~full], legal.token[~full]
    np.bitwise_or.at(masks, (kind, token // 32), np.uint32(1) << (token % 32).astype(np.uint32))
    return masks


def pack_bits(bits: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """bool[..., V] -> u32[..., W], W = ceil(V/32): bit i of word w is token 32w + i, bits beyond V are 0.

    >>> pack_bits(np.array([True, False, True])).tolist()
    [5]
    """
    *rows, num_tokens = bits.shape
    num_words = -(-num_tokens // 32)
    packed = np.packbits(bits, axis=-1, bitorder="little")
    padded = np.zeros((*rows, num_words * 4), np.uint8)
    padded[..., : packed.shape[-1]] = packed
    return padded.view("<u4").astype(np.uint32, copy=False)


def unpack_bits(words: npt.NDArray[np.uint32], num_tokens: int) -> npt.NDArray[np.bool_]:
    """u32[..., W] -> bool[..., V]: the inverse of `pack_bits`."""
    octets = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=num_tokens, bitorder="little").astype(np.bool_)


def _spellable(machine: Machine, vocabulary: Vocabulary) -> tuple[Machine, bool]:
    """The machine without bytes that are no tokens of their own, where it can do without them.

    So every way that is left can be gone to its end. Few vocabularies have all 256; the missing ones begin characters
    that nobody uses. True: other tokens contain them; whether a text can be completed then depends on those.
    """
    missing = set(np.flatnonzero((machine.edges != DEAD).any(axis=0)).tolist()) - vocabulary.single_bytes
    if not missing:
        return machine, False
    if not machine.special and not missing.isdisjoint(b"".join(vocabulary.tokens)):
        return machine, True
    edges = machine.edges.copy()
    edges[:, sorted(missing)] = DEAD
    without = replace(machine, edges=edges)
    if np.array_equal(_leading_on(without), _leading_on(machine)):
        return without, False
    if machine.special:
        raise UnsupportedGrammar(f"the vocabulary has no token for the single bytes {bytes(sorted(missing))!r}")
    return machine, True


def _leading_on(machine: Machine) -> npt.NDArray[np.bool_]:
    """By state, whether some way leads to the end of its frame or of the text, guards aside."""
    alive = machine.accepting.copy()
    while True:
        special = np.array([_leads_on(machine, edge, alive) for edge in machine.special], np.bool_)
        targets = np.where(machine.edges >= 0, alive[np.maximum(machine.edges, 0)], False)
        if len(special):
            targets |= (machine.edges < 0) & special[np.maximum(~machine.edges, 0)]
        grown = alive | targets.any(axis=1)
        if (grown == alive).all():
            return alive
        alive = grown


def _leads_on(machine: Machine, edge: Edge, alive: npt.NDArray[np.bool_]) -> bool:
    for one in _chain(edge):
        if one.pop is not None:
            return True
        if alive[one.target] and (one.push is None or any(alive[state] for state in machine.returns[one.push])):
            return True
    return False


def _completable(machine: Machine, vocabulary: Vocabulary) -> tuple[Ints, _Found]:
    """By state, the tokens after which some tokens lead to an end: for a machine without frames, state by state."""
    data, starts = vocabulary.flat
    begin, length = starts[vocabulary.order], np.diff(starts)[vocabulary.order]
    targets = np.repeat(np.arange(machine.num_states)[:, None], len(length), axis=1)
    for depth in range(int(length.max(initial=0))):
        longer = np.flatnonzero(length > depth)
        targets[:, longer] = machine.edges[targets[:, longer], data[begin[longer] + depth]]
    completable = machine.accepting.copy()
    while True:
        grown = completable | completable[targets].any(axis=1)
        if (grown == completable).all():
            break
        completable = grown
    kind, place = np.nonzero(completable[targets])
    found = _Found(kind, vocabulary.order[place], np.full(len(kind), LEGAL, np.uint8))
    return np.arange(machine.num_states), found


@dataclass(frozen=True, eq=False)
class _Items:
    """Places of the walk, each once: a state, a node of the level, and the frames that the token pushed itself."""

    state: Ints
    node: Ints
    stack: Ints


@dataclass(frozen=True, eq=False)
class _Steps:
    """From an item to one of the next level: first those over plain edges.

    sure: of the others, whether no guard and no unknown frame has a say.
    """

    source: Ints
    target: Ints
    num_plain: int
    sure: npt.NDArray[np.bool_]


class _Walk:
    def __init__(self, machine: Machine, vocabulary: Vocabulary) -> None:
        self._machine, self._levels = machine, vocabulary.levels
        self._edges, self._order = machine.edges, vocabulary.order
        self._alike = _alike(machine, len(self._levels) - 1)
        self._stacks: list[tuple[int, int]] = [(0, -1)]  # of each pushed stack: the one below, and its row of returns
        self._stack_ids: dict[tuple[int, int], int] = {}
        self._callers = _callers(machine)
        self.kinds, self.row = np.unique(self._alike[-1], return_inverse=True)

    def found(self) -> _Found:
        """What may come, by kind of state."""
        zeros = np.zeros(len(self.kinds), np.int64)
        items = [_Items(self.kinds, zeros, zeros)]
        steps: list[_Steps] = []
        for level, below in pairwise(self._levels):
            after, ways = self._down(items[-1], level, below)
            items.append(after)
            steps.append(ways)
        results, offsets = self._up(items, steps)
        ways, child = steps[0], items[1].node[steps[0].target]
        first = self._levels[1]
        length = first.stop[child] - first.start[child]
        verdict = self._weighed(ways, results[_ranges(offsets[ways.target], length)], length)
        kind, place = np.repeat(ways.source, length), _ranges(first.start[child], length)
        cut = int(length[: ways.num_plain].sum())
        pair, best = _strongest(kind[cut:] * len(self._order) + place[cut:], verdict[cut:])
        more, where = np.divmod(pair, len(self._order))
        kept = np.flatnonzero(verdict[:cut])
        return _Found(
            np.concatenate([kind[kept], more]),
            self._order[np.concatenate([place[kept], where])],
            np.concatenate([verdict[kept], best]),
        )

    def _down(self, items: _Items, level: Level, below: Level) -> tuple[_Items, _Steps]:
        """All places one byte further."""
        count = level.count[items.node]
        source = np.repeat(np.arange(len(count)), count)
        node = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count) + level.first[items.node][source]
        edge = self._edges[items.state[source], below.byte[node]].astype(np.int64)
        plain = edge > 0
        special = np.flatnonzero(edge < 0)
        *taken, sure = self._taken(items, source[special], node[special], ~edge[special])
        parts = (source[plain], node[plain], edge[plain], items.stack[source[plain]])
        source, node, state, stack = (np.concatenate(both) for both in zip(parts, taken, strict=True))
        state = self._merged(state, below.height[node])
        num_nodes, num_stacks = len(below.byte), len(self._stacks)
        key, target = np.unique((state * num_nodes + node) * num_stacks + stack, return_inverse=True)
        rest, stacks = np.divmod(key, num_stacks)
        states, nodes = np.divmod(rest, num_nodes)
        return _Items(states, nodes, stacks), _Steps(source, target, int(plain.sum()), sure)

    def _merged(self, state: Ints, height: Ints) -> Ints:
        """The first of the states that look alike within so many bytes."""
        merged: Ints = self._alike[np.minimum(height, len(self._alike) - 1), state]
        return merged

    def _taken(
        self, items: _Items, source: Ints, node: Ints, special: Ints
    ) -> tuple[Ints, Ints, Ints, Ints, npt.NDArray[np.bool_]]:
        """The ways that edges with guards, pushes and pops may lead, from these items."""
        if not len(source):
            none = np.zeros(0, np.int64)
            return none, none, none, none, none.astype(np.bool_)
        keys = np.stack([special, items.stack[source], items.state[source]])
        unique, which = np.unique(keys, axis=1, return_inverse=True)
        ways = [self._ways(*map(int, one)) for one in unique.T]
        count = np.array([len(one) for one in ways])[which.reshape(-1)]
        picked = np.repeat(np.arange(len(source)), count)
        flat = [way for one in which.reshape(-1).tolist() for way in ways[one]]
        state, stack, sure = (
            (np.array(part, np.int64) for part in zip(*flat, strict=True)) if flat else np.zeros((3, 0), np.int64)
        )
        return source[picked], node[picked], state, stack, sure.astype(np.bool_)

    def _ways(self, special: int, stack: int, state: int) -> list[tuple[int, int, bool]]:
        """(state, stack, sure) after an edge."""
        found: list[tuple[int, int, bool]] = []
        edge: Edge | None = self._machine.special[special]
        sure = edge is not None and not edge.guard
        while edge is not None:
            if edge.pop is not None:
                below, row = self._stacks[stack]
                known = row >= 0
                rows = [row] if known else sorted(self._callers[state])
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

    def _up(self, items: list[_Items], steps: list[_Steps]) -> tuple[npt.NDArray[np.uint8], Ints]:
        """What becomes of all tokens below each place of level 1, and where those of each place begin."""
        results, offsets = np.zeros(0, np.uint8), np.zeros(0, np.int64)
        for depth in reversed(range(1, len(items))):
            level, here = self._levels[depth], items[depth]
            size = level.stop[here.node] - level.start[here.node]
            starts = np.cumsum(size) - size
            filled = np.zeros(int(size.sum()), np.uint8)
            filled[_ranges(starts, level.own[here.node] - level.start[here.node])] = LEGAL
            if depth < len(steps):
                way, below = steps[depth], self._levels[depth + 1]
                child = items[depth + 1].node[way.target]
                length = below.stop[child] - below.start[child]
                to = starts[way.source] + below.start[child] - level.start[here.node[way.source]]
                copied = self._weighed(way, results[_ranges(offsets[way.target], length)], length)
                cut = int(length[: way.num_plain].sum())
                filled[_ranges(to[: way.num_plain], length[: way.num_plain])] = copied[:cut]
                np.maximum.at(filled, _ranges(to[way.num_plain :], length[way.num_plain :]), copied[cut:])
            results, offsets = filled, starts
        return results, offsets

    def _weighed(self, way: _Steps, results: npt.NDArray[np.uint8], length: Ints) -> npt.NDArray[np.uint8]:
        """What the tokens behind these steps come to, where a step itself may not be sure. Changes `results`."""
        cut = int(length[: way.num_plain].sum())
        most = np.repeat(np.where(way.sure, LEGAL, DEPENDENT).astype(np.uint8), length[way.num_plain :])
        np.minimum(results[cut:], most, out=results[cut:])
        return results


def _strongest(pair: Ints, verdict: npt.NDArray[np.uint8]) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Each pair once, with the best that one of its ways comes to, where that is anything."""
    key = np.unique(pair * 4 + LEGAL - verdict)
    once = np.ones(len(key), np.bool_)
    once[1:] = key[1:] // 4 != key[:-1] // 4
    pair, best = np.divmod(key[once], 4)
    return pair[best < LEGAL], (LEGAL - best[best < LEGAL]).astype(np.uint8)


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """start, start + 1, ... for each of them, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    places: Ints = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return places


def _alike(machine: Machine, most: int) -> Ints:
    """By number of bytes h and state: the first state that looks alike for h bytes, i64[h, Q].

    States look alike for no bytes where both are alive, and for one more where each byte leads to such as look alike,
    or takes the same edge.
    """
    scramble = np.random.default_rng(0).integers(1, 2**63, 257, dtype=np.uint64) | np.uint64(1)
    label = np.minimum(np.arange(machine.num_states), 1)
    layers = [_firsts(label)]
    taken = machine.num_states + np.maximum(~machine.edges.astype(np.int64), 0)
    for _ in range(most):
        after = np.where(machine.edges < 0, taken, label[np.maximum(machine.edges, 0)])
        seen = np.concatenate([after, label[:, None]], axis=1).astype(np.uint64) + np.uint64(1)
        seen *= np.uint64(0x9E3779B97F4A7C15)
        seen ^= seen >> np.uint64(31)
        names, new = np.unique((seen * scramble).sum(axis=1, dtype=np.uint64), return_inverse=True)
        layers.append(_firsts(new.reshape(-1)))
        if len(names) == int(label.max()) + 1:
            break
        label = new.reshape(-1)
    return np.stack(layers)


def _firsts(label: Ints) -> Ints:
    """Of each state, the first one with its label."""
    _, first, index = np.unique(label, return_index=True, return_inverse=True)
    firsts: Ints = first[index.reshape(-1)]
    return firsts


def _callers(machine: Machine) -> dict[int, set[int]]:
    """By state, the rows of returns that the frame it is in may remember."""
    callers: dict[int, set[int]] = {state: set() for state in range(machine.num_states)}
    follows: dict[int, set[int]] = {}
    pushes: list[tuple[int, int]] = []
    for state in range(1, machine.num_states):
        targets = set(np.unique(machine.edges[state]).tolist())
        follows[state] = {target for target in targets if target > 0}
        for value in (target for target in targets if target < 0):
            for edge in _chain(machine.special[~value]):
                if edge.push is not None:
                    pushes.append((edge.target, edge.push))
                    follows[state] |= {one for one in machine.returns[edge.push] if one}
                elif edge.pop is None:
                    follows[state].add(edge.target)
    for target, row in pushes:
        waiting = [target]
        while waiting:
            state = waiting.pop()
            if state != DEAD and row not in callers[state]:
                callers[state].add(row)
                waiting += follows[state]
    return callers


def _chain(edge: Edge | None) -> Iterable[Edge]:
    while edge is not None:
        yield edge
        edge = edge.otherwise
