"""Texts in which a regular expression is found, as automata.

A state of the search is a set of threads. A thread is a place in the expression and the promises it made: each
lookahead that it passed is an automaton which runs beside it over what follows. A lookbehind is an automaton over all
that was read, asked where a thread wants to pass. So both are exact, wherever they stand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.automaton import DEAD, ByteAutomaton
from zllm_jax.fence.regular.code_points import ALL, CodePoints, partition
from zllm_jax.fence.regular.compact import MAX_STATES, reduced
from zllm_jax.fence.regular.pattern import Chars, Choice, Look, Node, Repeat, Sequence, parse
from zllm_jax.fence.regular.texts import in_utf8

Promise = tuple[int, int]  # (number of an automaton, its state)
Thread = tuple[int, frozenset[Promise]]
Config = tuple[frozenset[Thread], tuple[int, ...]]  # threads, and the state of each lookbehind
_MAX_STEPS = 2_000_000
_NO_PROMISE: frozenset[Promise] = frozenset()
_DEAD: Config = (frozenset(), ())
_FULL: Config = (frozenset([(-1, _NO_PROMISE)]), ())  # whatever follows is accepted
_ANYTHING = Repeat(Chars(ALL), 0, None)


@lru_cache(maxsize=128)
def regex(pattern: str) -> ByteAutomaton:
    r"""All texts (UTF-8) in which the ECMA-262 pattern is found somewhere, as `pattern` in JSON Schema means it.

    Unicode mode, no flags. Raises `UnsupportedGrammar` for what is no pattern, for references to groups, for a
    lookahead within a lookbehind, for properties other than general categories, and beyond 20,000 states.

    >>> [regex("^(?!no)[a-z]+$").accepts(text) for text in (b"nay", b"nobody", b"a1")]
    [True, False, False]
    """
    return _compiled(Sequence((_ANYTHING, parse(pattern), _ANYTHING)))


@lru_cache(maxsize=128)
def fullmatch_regex(pattern: str) -> ByteAutomaton:
    """All texts (UTF-8) that the ECMA-262 pattern matches as a whole; see `regex`."""
    return _compiled(parse(pattern))


def _compiled(node: Node) -> ByteAutomaton:
    sets = sorted(_sets(node) | {ALL}, key=lambda points: points.ranges)
    groups = partition(sets)
    search = _Search(dict(zip(sets, groups.members, strict=True)))
    graph = search.graph(node)
    table = search.table(graph, search.begins())
    return in_utf8(table.rows, table.accepting, table.start, groups)


def _sets(node: Node) -> set[CodePoints]:
    if isinstance(node, Chars):
        return {node.points}
    parts = node.parts if isinstance(node, Sequence | Choice) else (node.part,)
    return set[CodePoints]().union(*map(_sets, parts))


@dataclass(frozen=True)
class _Table:
    """An automaton over groups of code points. empty: states that accept nothing more; full: those that accept all."""

    rows: list[list[int]]
    accepting: list[bool]
    start: int
    empty: frozenset[int]
    full: frozenset[int]

    @staticmethod
    def of(rows: list[list[int]], accepting: list[bool], start: int) -> _Table:
        return _Table(rows, accepting, start, _closed(rows, accepting, True), _closed(rows, accepting, False))

    def negated(self) -> _Table:
        accepting = [not accepts for accepts in self.accepting]
        return _Table(self.rows, accepting, self.start, self.full, self.empty)


def _closed(rows: list[list[int]], accepting: list[bool], kind: bool) -> frozenset[int]:
    """States from which no state is reached whose acceptance is `kind`."""
    before: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for target in set(row):
            before[target].append(state)
    reaching = {state for state, accepts in enumerate(accepting) if accepts == kind}
    todo = list(reaching)
    while todo:
        for source in before[todo.pop()]:
            if source not in reaching:
                reaching.add(source)
                todo.append(source)
    return frozenset(range(len(rows))) - reaching


class _Guard(NamedTuple):
    behind: bool
    number: int
    negative: bool


@dataclass
class _Graph:
    """Places of an expression. moves: by group of code points; skips: to other places, on a condition.

    goes_on: any text may follow the end.
    """

    goes_on: bool
    moves: list[dict[int, int]] = field(default_factory=list)
    skips: list[list[tuple[_Guard | None, int]]] = field(default_factory=list)
    start: int = 0
    end: int = 0

    def place(self) -> int:
        self.moves.append({})
        self.skips.append([])
        if len(self.moves) > MAX_STATES:
            raise UnsupportedGrammar(f"too large: the pattern has more than {MAX_STATES} places when written out")
        return len(self.moves) - 1


class _Search:
    def __init__(self, groups: dict[CodePoints, tuple[int, ...]]) -> None:
        self.groups = groups
        self.num_groups = len(groups[ALL])
        self.behinds: list[_Table] = []
        self.behind_numbers: dict[Node, int] = {}
        self.ahead_graphs: list[_Graph] = []
        self.ahead_numbers: dict[Node, int] = {}
        self.aheads: list[_Table] = []
        self.steps = 0
        self.promised: dict[tuple[_Guard, tuple[int, ...]], int] = {}

    def graph(self, node: Node, *, within_behind: bool = False) -> _Graph:
        """The places of `node`; automata for its lookbehinds are made on the way."""
        graph = _Graph(isinstance(node, Sequence) and node.parts[-1:] == (_ANYTHING,))
        graph.start = graph.place()
        graph.end = self._lay(graph, node, graph.start, within_behind)
        return graph

    def _lay(self, graph: _Graph, node: Node, begin: int, within_behind: bool) -> int:
        """Lays `node` from the place `begin` on; returns the place behind it."""
        if isinstance(node, Sequence):
            for part in node.parts:
                begin = self._lay(graph, part, begin, within_behind)
            return begin
        if isinstance(node, Repeat):
            return self._lay_repeat(graph, node, begin, within_behind)
        end = graph.place()
        if isinstance(node, Chars):
            graph.moves[begin] = dict.fromkeys(self.groups[node.points], end)
            return end
        if isinstance(node, Choice):
            for part in node.parts:
                first = graph.place()
                graph.skips[begin].append((None, first))
                graph.skips[self._lay(graph, part, first, within_behind)].append((None, end))
            return end
        graph.skips[begin].append((self._guard(node, within_behind), end))
        return end

    def _lay_repeat(self, graph: _Graph, node: Repeat, begin: int, within_behind: bool) -> int:
        for _ in range(node.low):
            before, begin = begin, self._lay(graph, node.part, begin, within_behind)
            if begin == before:  # an empty group: once is as good as often
                break
        end = graph.place()
        if node.high is None:
            loop = graph.place()
            graph.skips[begin].append((None, loop))
            graph.skips[loop].append((None, end))
            first = graph.place()
            graph.skips[loop].append((None, first))
            graph.skips[self._lay(graph, node.part, first, within_behind)].append((None, loop))
            return end
        for _ in range(node.high - node.low):
            graph.skips[begin].append((None, end))
            first = graph.place()
            graph.skips[begin].append((None, first))
            begin = self._lay(graph, node.part, first, within_behind)
        graph.skips[begin].append((None, end))
        return end

    def _guard(self, look: Look, within_behind: bool) -> _Guard:
        if look.behind:
            if look.part not in self.behind_numbers:
                graph = self.graph(Sequence((_ANYTHING, look.part)), within_behind=True)
                table = self.table(graph, self.begins())
                self.behind_numbers[look.part] = len(self.behinds)
                self.behinds.append(table)
            return _Guard(True, self.behind_numbers[look.part], look.negative)
        if within_behind:
            raise UnsupportedGrammar(r"a lookahead (also $ and \b) within a lookbehind cannot be enforced")
        if look.part not in self.ahead_numbers:
            graph = self.graph(Sequence((look.part, _ANYTHING)))
            self.ahead_numbers[look.part] = len(self.ahead_graphs)
            self.ahead_graphs.append(graph)
        return _Guard(False, self.ahead_numbers[look.part], look.negative)

    def begins(self) -> tuple[int, ...]:
        """The states of all lookbehinds at the begin of a text."""
        return tuple(behind.start for behind in self.behinds)

    def table(self, graph: _Graph, behinds: tuple[int, ...]) -> _Table:
        """The automaton of `graph`, begun where the lookbehinds are in the given states."""
        start = self._settled(graph, {(graph.start, _NO_PROMISE)}, behinds)
        numbers = {_DEAD: DEAD}
        numbers.setdefault(start, 1)
        order, rows, accepting = list(numbers), [[DEAD] * self.num_groups], [False]
        while len(rows) < len(order):
            config = order[len(rows)]
            self.steps += len(config[0]) * self.num_groups
            if self.steps > _MAX_STEPS:
                raise UnsupportedGrammar(f"too large: more than {_MAX_STEPS} steps are needed to compile the pattern")
            accepting.append(config == _FULL or self._accepts(graph, config))
            row = []
            for group in range(self.num_groups):
                target = config if config == _FULL else self._step(graph, config, group)
                if target not in numbers:
                    numbers[target] = len(order)
                    order.append(target)
                row.append(numbers[target])
            rows.append(row)
            if len(order) > MAX_STATES:
                raise UnsupportedGrammar(f"too large: the pattern needs more than {MAX_STATES} states")
        small, labels, begin = reduced(rows, [int(accepts) for accepts in accepting], numbers[start])
        return _Table.of(small, [bool(label) for label in labels], begin)

    def _accepts(self, graph: _Graph, config: Config) -> bool:
        return any(
            place == graph.end and all(self.aheads[number].accepting[state] for number, state in promises)
            for place, promises in config[0]
        )

    def _step(self, graph: _Graph, config: Config, group: int) -> Config:
        threads, behinds = config
        after = tuple(self.behinds[i].rows[state][group] for i, state in enumerate(behinds))
        moved = set()
        for place, promises in threads:
            target = graph.moves[place].get(group)
            if target is None:
                continue
            kept = self._kept(promises, group) if promises else promises
            if kept is not None:
                moved.add((target, kept))
        return self._settled(graph, moved, after)

    def _kept(self, promises: frozenset[Promise], group: int) -> frozenset[Promise] | None:
        """The promises one character on, without those that are fulfilled; None when one is broken."""
        kept = set()
        for number, state in promises:
            table = self.aheads[number]
            target = table.rows[state][group]
            if target in table.empty:
                return None
            if target not in table.full:
                kept.add((number, target))
        return frozenset(kept)

    def _settled(self, graph: _Graph, threads: set[Thread], behinds: tuple[int, ...]) -> Config:
        """With all that is reached without reading; only threads that read or are at the end stay."""
        seen = set(threads)
        todo = list(threads)
        while todo:
            place, promises = todo.pop()
            for guard, target in graph.skips[place]:
                kept = promises if guard is None else self._passed(guard, promises, behinds)
                if kept is not None and (target, kept) not in seen:
                    seen.add((target, kept))
                    todo.append((target, kept))
        stay = {thread for thread in seen if graph.moves[thread[0]] or thread[0] == graph.end}
        if any(promises for _, promises in stay):
            stay = _without_weaker(stay)
        if graph.goes_on and (graph.end, _NO_PROMISE) in stay:
            return _FULL
        return (frozenset(stay), behinds) if stay else _DEAD

    def _passed(
        self, guard: _Guard, promises: frozenset[Promise], behinds: tuple[int, ...]
    ) -> frozenset[Promise] | None:
        """The promises of a thread that passes `guard`; None where it cannot."""
        if guard.behind:
            accepts = self.behinds[guard.number].accepting[behinds[guard.number]]
            return promises if accepts != guard.negative else None
        number = self._promised(guard, behinds)
        table = self.aheads[number]
        if table.start in table.empty:
            return None
        return promises if table.start in table.full else promises | {(number, table.start)}

    def _promised(self, guard: _Guard, behinds: tuple[int, ...]) -> int:
        key = (guard, behinds)
        if key not in self.promised:
            table = self.table(self.ahead_graphs[guard.number], behinds)
            self.promised[key] = len(self.aheads)
            self.aheads.append(table.negated() if guard.negative else table)
        return self.promised[key]


def _without_weaker(threads: set[Thread]) -> set[Thread]:
    """Without threads at the same place as one with fewer promises."""
    by_place: dict[int, list[frozenset[Promise]]] = {}
    for place, promises in threads:
        by_place.setdefault(place, []).append(promises)
    return {(place, promises) for place, promises in threads if not any(other < promises for other in by_place[place])}
