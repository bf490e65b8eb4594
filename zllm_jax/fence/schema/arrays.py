"""The states of an array: which alternatives are still possible, how many items there were, what they contained."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.machine import Condition, Edge
from zllm_jax.fence.schema.compiler import Compiler, Continuation, Joint, Module
from zllm_jax.fence.schema.values import ArrayShape, Expr

_MAX_INDEX = 64  # items counted by states; more are counted by the frame
_MAX_NODES = 2048


@dataclass(frozen=True)
class Node:
    """Between two items. counts: by alternative that is still possible, how many items each of its rules has met."""

    live: tuple[int, ...]
    index: int
    counts: tuple[tuple[int, ...], ...]


def write_array(compiler: Compiler, module: Module, start: int) -> None:
    """The states after `[`."""
    shapes = [shape for _, shape in module.alternatives if isinstance(shape, ArrayShape)]
    if max(max(one.low, one.high or 0, len(one.prefix)) for one in shapes) > _MAX_INDEX:
        _write_long(compiler, module, start)
        return
    graph = _Graph(compiler, module, shapes)
    graph.explore()
    writer = _Writer(compiler, module, graph)
    writer.open(start)


class _Graph:
    """Which node follows which, by the outcome of an item; only nodes from which the array can be closed are kept."""

    def __init__(self, compiler: Compiler, module: Module, shapes: list[ArrayShape]) -> None:
        self._compiler, self._module, self._shapes = compiler, module, shapes
        self._last = max(max(one.low, one.high or 0, len(one.prefix), *_offsets(one)) for one in shapes)
        self.first = Node(tuple(range(len(shapes))), 0, tuple((0,) * len(one.contains) for one in shapes))
        self.joints: dict[Node, Joint] = {}
        self.following: dict[Node, dict[int, Node]] = {}

    def explore(self) -> None:
        waiting = [self.first]
        while waiting:
            node = waiting.pop()
            if node in self.following:
                continue
            if len(self.following) > _MAX_NODES:
                raise UnsupportedGrammar(f"an array with more than {_MAX_NODES} situations")
            self.joints[node], self.following[node] = self._after(node)
            waiting += self.following[node].values()
        if not self._keep_feasible():
            raise UnsupportedGrammar("the rules for the items of an array contradict each other")

    def outcome(self, node: Node) -> int:
        """What closing here comes to; 0 where it is not allowed."""
        outcome = 0
        for i, counts in zip(node.live, node.counts, strict=True):
            shape = self._shapes[i]
            enough = all(one.low <= n for one, n in zip(shape.contains, counts, strict=True))
            if node.index >= shape.low and enough:
                outcome |= 1 << self._module.alternatives[i][0]
        return outcome if outcome in self._module.allowed else 0

    def _after(self, node: Node) -> tuple[Joint, dict[int, Node]]:
        steps = [
            (expr, i, counts)
            for i, before in zip(node.live, node.counts, strict=True)
            for expr, counts in self._steps(self._shapes[i], node.index, before)
        ]
        joint = tuple(dict.fromkeys(expr for expr, _, _ in steps))
        following = {}
        for outcome in range(1, 1 << len(joint)):
            chosen = {one for k, one in enumerate(joint) if outcome >> k & 1}
            kept = {i: counts for expr, i, counts in steps if expr in chosen}
            if kept and (len(joint) == 1 or self._compiler.possible(joint, outcome)):
                index = min(node.index + 1, self._last)
                following[outcome] = Node(tuple(sorted(kept)), index, tuple(kept[i] for i in sorted(kept)))
        return joint, following

    def _steps(self, shape: ArrayShape, index: int, before: tuple[int, ...]) -> list[tuple[Expr, tuple[int, ...]]]:
        """What the next item may be, each with the counts after it. The choices exclude each other."""
        if shape.high is not None and index >= shape.high:
            return []
        sets, item = self._compiler.reader.sets, shape.item(index)
        choices: list[list[tuple[Expr, int]]] = []
        for rule, count in zip(shape.contains, before, strict=True):
            most = rule.low if rule.high is None else rule.high
            if index < rule.offset or (rule.high is None and count >= rule.low):
                choices.append([(sets.everything, count)])
                continue
            met = [(rule.expr, count + 1)] if count < most else []
            choices.append([*met, (sets.other_than(rule.expr), count)])
        found = []
        for chosen in product(*choices):
            expr = sets.both(item, *(one for one, _ in chosen))
            if self._compiler.reader.inhabited(expr):
                found.append((expr, tuple(count for _, count in chosen)))
        return found

    def _keep_feasible(self) -> bool:
        """Whether the array can be closed at all."""
        feasible = {node for node in self.following if self.outcome(node)}
        while True:
            grown = {node for node, after in self.following.items() if not feasible.isdisjoint(after.values())}
            if grown <= feasible:
                break
            feasible |= grown
        for node, after in self.following.items():
            self.following[node] = {outcome: one for outcome, one in after.items() if one in feasible}
        return self.first in feasible


class _Writer:
    def __init__(self, compiler: Compiler, module: Module, graph: _Graph) -> None:
        self._compiler, self._module, self._graph = compiler, module, graph

    def open(self, start: int) -> None:
        """The state after `[`: an item or the end."""
        node = self._graph.first
        if self._graph.following[node]:
            self._compiler.builder.copy_edges(self._item(node), start)
        else:
            self._compiler.loose(start)
        self._close(start, node)

    def _item(self, node: Node) -> int:
        joint = self._graph.joints[node]
        after = [0] * (1 << len(joint))
        for outcome, following in self._graph.following[node].items():
            after[outcome] = self._between(following)
        return self._compiler.value(joint, tuple(after))

    def _between(self, node: Node) -> int:
        def make(state: int) -> None:
            self._compiler.loose(state)
            if self._graph.following[node]:
                self._compiler.builder.edge(state, b",", self._compiler.spaced(self._item(node)))
            self._close(state, node)

        return self._compiler.once(("between", node), make)

    def _close(self, state: int, node: Node) -> None:
        outcome = self._graph.outcome(node)
        if outcome:
            self._compiler.builder.edge(state, b"]", Edge(pop=outcome))


def _write_long(compiler: Compiler, module: Module, start: int) -> None:
    """An array whose items are counted by its frame: of one shape, without rules about what it contains."""
    ((owner, shape), *others) = module.alternatives
    assert isinstance(shape, ArrayShape)
    if others or shape.contains or len(shape.prefix) > _MAX_INDEX:
        raise UnsupportedGrammar(f"alternatives or contains in an array of more than {_MAX_INDEX} items")
    close = Edge(pop=1 << owner)
    if 1 << owner not in module.allowed:
        return

    def between(index: int) -> int:
        def make(state: int) -> None:
            compiler.loose(state)
            guard = () if shape.high is None else (Condition(high=shape.high - 2),)
            following = item(min(index + 1, len(shape.prefix)))
            compiler.builder.edge(state, b",", Edge(compiler.spaced(following), guard, add=1))
            guard = (Condition(low=shape.low - 1),) if shape.low > 1 else ()
            compiler.builder.edge(state, b"]", Edge(guard=guard, pop=1 << owner))

        return compiler.once(("counted", index), make)

    def item(index: int) -> int:
        after: Continuation = (0, between(index))
        return compiler.value((shape.item(index),), after)

    if compiler.reader.inhabited(shape.rest) or shape.prefix:
        compiler.builder.copy_edges(item(0), start)
    if shape.low == 0:
        compiler.builder.edge(start, b"]", close)


def _offsets(shape: ArrayShape) -> list[int]:
    return [one.offset for one in shape.contains]
