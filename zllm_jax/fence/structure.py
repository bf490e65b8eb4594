"""Machines of fixed texts, values and members in any order, written piece by piece: what a call is made of.

A piece is a state. `fork` leads from one to others over fixed texts, `text` and `json` read values, `until` reads free
text in which a fixed one means something. A member that may come once, or an end that needs others before it, says so
with a `Condition` on its branch: the guards stand where the texts part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from zllm_jax.fence import regular
from zllm_jax.fence.automaton import DEAD, ByteAutomaton
from zllm_jax.fence.machine import Condition, Edge, Machine, MachineBuilder
from zllm_jax.fence.schema import SchemaWriter, Whitespace
from zllm_jax.fence.schema.document import Schema
from zllm_jax.fence.schema.finish import finished

_ALWAYS = Condition()
_WHITESPACE = b" \t\r\n"
_LATER = -1  # a text's beginning is over


@dataclass(frozen=True)
class Branch:
    """A fixed text and where it leads. With `push`, into a new frame, at whose end it goes on in the state `push`.

    pop: out of the frame. use: the bits of the members that it stands for.
    """

    text: bytes
    to: int = DEAD
    condition: Condition = _ALWAYS
    use: int = 0
    push: int | None = None
    pop: bool = False


@dataclass(eq=False)
class _Trie:
    children: dict[int, _Trie] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    end: Branch | None = None


class Structure:
    """Collects pieces; `machine` makes the whole. whitespace: of the JSON values."""

    def __init__(self, *, whitespace: Whitespace = "spaced") -> None:
        self._builder = MachineBuilder()
        self._module_of = [0]
        self._module = 0
        self._writer = SchemaWriter(self._builder, self._module_of, whitespace)
        self._written: dict[tuple[object, ...], int] = {}  # values, so that equal ones are written once

    def state(self, *, accepting: bool = False) -> int:
        self._module_of.append(self._module)
        return self._builder.state(accepting=accepting)

    def frame(self) -> int:
        """The first state of a frame; states made after it belong to it, until `leave`."""
        self._module = len(self._module_of)
        return self.state()

    def leave(self) -> None:
        self._module = 0

    def fork(self, source: int, branches: Sequence[Branch], *, assured: bool = False, beside: int = DEAD) -> None:
        """From `source`, one of these texts. Raises `ValueError` where one begins with another.

        assured: whatever leads to `source` has seen to it that the condition of one of them holds. beside: or else what
        this state does; of its texts none may begin with one of `branches`. Raises `ValueError` where it would have to
        change the stack while it can still be either.
        """
        root = _Trie()
        for branch in branches:
            node = root
            node.branches.append(branch)
            for byte in branch.text:
                if node.end is not None:
                    raise ValueError(f"{branch.text!r} begins with {node.end.text!r}: they cannot be told apart")
                node = node.children.setdefault(byte, _Trie())
                node.branches.append(branch)
            if node.children or node.end is not None:
                raise ValueError(f"another text begins with {branch.text!r}: they cannot be told apart")
            node.end = branch
        self._write(source, root, len(branches) if assured else 0, beside)

    def _write(self, source: int, node: _Trie, known: int, beside: int) -> None:
        """known: how many branches an earlier guard has vouched for; a guard stands where they become fewer."""
        for byte, child in sorted(node.children.items()):
            guard = () if len(child.branches) == known else _any_of(child.branches)
            if child.end is not None:
                self._builder.edge(source, [byte], self._edge(child.end, guard))
                continue
            other = int(self._builder.row(beside)[byte])
            if other < 0 or (other and guard):
                raise ValueError(f"byte {byte:#x} does too much in state {beside}: what follows cannot be told apart")
            target = self.state()
            self._builder.edge(source, [byte], Edge(target, guard) if guard else target)
            self._write(target, child, len(child.branches), other)
        if beside != DEAD:
            self._builder.copy_edges(beside, source, keep=True)

    def _edge(self, branch: Branch, guard: tuple[Condition, ...]) -> int | Edge:
        push = None if branch.push is None else self._builder.returns((DEAD, branch.push))
        edge = Edge(branch.to, guard, use=branch.use, push=push, pop=1 if branch.pop else None)
        return branch.to if edge == Edge(branch.to) else edge

    def json(self, schema: Schema, after: int) -> int:
        """A state in which a JSON value of this schema begins; it goes on in `after`."""
        key = (json.dumps(schema), after, self._module)
        if key not in self._written:
            self._written[key] = self._writer.value(schema, after, self._module)
        return self._written[key]

    def text(self, language: ByteAutomaton, ending: bytes, after: int) -> int:
        """A state in which a text of `language` begins that ends before the first `ending`; `DEAD` where none can."""
        key = (language.transitions.tobytes(), language.accepting.tobytes(), ending, after, self._module)
        if key not in self._written:
            ended = _up_to(language, ending)
            self._written[key] = DEAD if regular.is_empty(ended) else self._copied(ended, after)
        return self._written[key]

    def _copied(self, automaton: ByteAutomaton, after: int) -> int:
        """Its states, with `after` in the place of those that accept, which nothing leads on from."""
        states = np.array(
            [DEAD, *(after if automaton.accepting[i] else self.state() for i in range(1, automaton.num_states))],
            np.int32,
        )
        for i in range(1, automaton.num_states):
            if not automaton.accepting[i]:
                self._builder.edges(int(states[i]), states[automaton.transitions[i]])
        return int(states[automaton.start])

    def until(self, triggers: Mapping[bytes, int], *, accepting: bool, first: Branch | None = None) -> int:
        """A state in which free text begins that goes on in a trigger's state at its end; `DEAD` forbids the trigger.

        accepting: whether the text may end without one. first: a text that leads elsewhere where nothing but white
        space stands before it.
        """
        utf8 = regular.any_text()
        begin = b"", utf8.start, 0 if first is not None else _LATER
        nodes: dict[tuple[bytes, int, int], int] = {begin: self.state(accepting=accepting)}
        waiting = list(nodes)
        for seen, where, begun in waiting:
            row = np.zeros(256, np.int32)
            for byte in np.flatnonzero(utf8.transitions[where]).tolist():
                if first is not None and begun != _LATER and bytes([byte]) == first.text[begun:]:
                    row[byte] = first.to
                    continue
                text, after = _longest_begun(seen + bytes([byte]), triggers), int(utf8.transitions[where, byte])
                if text in triggers:
                    row[byte] = triggers[text]
                    continue
                key = text, after, _LATER if first is None else _begun(first.text, begun, byte)
                if key not in nodes:
                    nodes[key] = self.state(accepting=accepting and bool(utf8.accepting[after]))
                    waiting.append(key)
                row[byte] = nodes[key]
            self._builder.edges(nodes[seen, where, begun], row)
        return nodes[begin]

    def one_of(self, branches: Sequence[Branch], beside: int) -> int:
        """A state from which one of these texts comes, or else what `beside` does: white space that this allows may
        stand before them. Raises as `fork` does.
        """
        made = {beside: self.state()}
        waiting = [beside]
        for other in waiting:
            self.fork(made[other], branches, beside=other)
            for byte in _WHITESPACE:
                after = int(self._builder.row(other)[byte])
                if after < 0:
                    raise ValueError(f"state {other} does too much with white space: what follows cannot be told apart")
                if after != DEAD and after not in made:
                    made[after] = self.state()
                    waiting.append(after)
                self._builder.replace(made[other], byte, made.get(after, DEAD))
        return made[beside]

    def embedded(self, machine: Machine) -> int:
        """The state in which a text of `machine` begins, whose end is the end of the whole."""
        outer, self._module = self._module, len(self._module_of)
        states = [DEAD, *(self.state(accepting=bool(one)) for one in machine.accepting[1:])]
        self._module = outer
        builder, numbers = self._builder, np.array(states, np.int32)
        returns = [builder.returns([states[one] for one in row]) for row in machine.returns]

        def moved(edge: Edge | None) -> Edge | None:
            if edge is None:
                return None
            push = None if edge.push is None else returns[edge.push]
            return replace(edge, target=states[edge.target], push=push, otherwise=moved(edge.otherwise))

        special = [moved(edge) for edge in machine.special]
        for state, row in zip(states[1:], machine.edges[1:], strict=True):
            builder.edges(state, np.where(row > 0, numbers[np.maximum(row, 0)], DEAD))
            for byte in np.flatnonzero(row < 0).tolist():
                edge = special[~int(row[byte])]
                assert edge is not None
                builder.replace(state, byte, edge)
        return states[machine.start]

    def either(self, one: int, other: int) -> int:
        """A state that goes on as both do. Raises `ValueError` where they differ in what follows a byte."""
        state = self.state()
        self._builder.copy_edges(one, state)
        self._builder.copy_edges(other, state)
        return state

    def machine(self, start: int) -> Machine:
        """The machine of all pieces that can be reached from `start`."""
        self._writer.finish()
        return finished(self._builder.build(start), np.array(self._module_of))


def _up_to(language: ByteAutomaton, ending: bytes) -> ByteAutomaton:
    """The texts of a language that do not contain `ending`, each with it behind, where it does not end sooner."""
    end, anything = regular.literal(ending), regular.any_text()
    contains = regular.concat(anything, end, anything)
    too_late = regular.difference(contains, regular.concat(anything, end))
    return regular.difference(regular.concat(regular.difference(language, contains), end), too_late)


def _any_of(branches: Sequence[Branch]) -> tuple[Condition, ...]:
    """Holds where the condition of one of the branches does. Members that differ only in their bit become one."""
    clear: dict[Condition, int] = {}
    others: list[Condition] = []
    for branch in branches:
        one = branch.condition
        if one == _ALWAYS:
            return ()
        if one.some_clear:
            bare = replace(one, some_clear=0)
            clear[bare] = clear.get(bare, 0) | one.some_clear
        else:
            others.append(one)
    return (*dict.fromkeys(others), *(replace(bare, some_clear=bits) for bare, bits in clear.items()))


def _begun(first: bytes, begun: int, byte: int) -> int:
    """How much of `first` there is after one byte more, or `_LATER`."""
    if begun == _LATER:
        return _LATER
    if first[begun] == byte:
        return begun + 1
    return 0 if begun == 0 and byte in _WHITESPACE else _LATER


def _longest_begun(text: bytes, triggers: Mapping[bytes, int]) -> bytes:
    """The longest end of `text` that a trigger begins with."""
    for start in range(len(text)):
        if any(trigger.startswith(text[start:]) for trigger in triggers):
            return text[start:]
    return b""
