"""The states of an object: members in any order, each listed one at most once, and closed when it may be.

Which listed members were used is in the frame. What it decides stands as guards on the edges: the opening quote of a
name (is any name left?), the places where the names part (is one of those below left?), and the closing brace.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import regular
from zllm_jax.fence.automaton import DEAD, ByteAutomaton
from zllm_jax.fence.machine import USED_BITS, Condition, Edge
from zllm_jax.fence.schema.compiler import Compiler, Module
from zllm_jax.fence.schema.names import NameNode, name_trie
from zllm_jax.fence.schema.values import Expr, Language, ObjectShape, Sets

Live = tuple[int, ...]  # the alternatives that the members so far agree with
Guard = tuple[Condition, ...]
NEVER: Guard = (Condition(low=1, high=0),)


def write_object(compiler: Compiler, module: Module, start: int) -> None:
    """The states after `{`."""
    _Object(compiler, module).open(start)


class _Object:
    def __init__(self, compiler: Compiler, module: Module) -> None:
        self._compiler, self._module = compiler, module
        self._builder, self._reader = compiler.builder, compiler.reader
        self._shapes = [self._counted(shape) for _, shape in module.alternatives if isinstance(shape, ObjectShape)]
        limits = {one.high for one in self._shapes}
        if len(self._shapes) > 1 and limits != {None}:
            raise UnsupportedGrammar("maxProperties beside alternatives that must be told apart")
        self._counting = any(one.low or one.high is not None for one in self._shapes)
        listed = {name for shape in self._shapes for name, _ in shape.named} | set().union(
            *map(_required, self._shapes)
        )
        required = set().union(*map(_required, self._shapes))
        order = sorted(required) + sorted(listed - required)
        if len(required) > USED_BITS:
            raise UnsupportedGrammar(f"more than {USED_BITS} required members in one object")
        self._bits = {name: 1 << i for i, name in enumerate(order[:USED_BITS])}
        self._names = sorted(listed)
        self._others: dict[Live, _Classes] = {}

    def _counted(self, shape: ObjectShape) -> ObjectShape:
        """Without a lower limit that the required members meet already."""
        low = shape.low if shape.low > len(shape.required) else 0
        unlisted = any(map(self._reader.inhabited, self._reader.needs.unlisted(shape)))
        if low > len(shape.required) + 1 and (unlisted or len(shape.named) > USED_BITS):
            which = "that are not listed" if unlisted else f"of more than {USED_BITS} listed ones"
            raise UnsupportedGrammar(f"minProperties: whether two members {which} have different names cannot be seen")
        return replace(shape, low=low)

    def open(self, start: int) -> None:
        live = tuple(range(len(self._shapes)))
        self._compiler.loose(start)
        self._begin_name(start, live)
        self._close(start, live)

    def _between(self, live: Live) -> int:
        """After a member."""

        def make(state: int) -> None:
            self._compiler.loose(state)
            guard = self._any_name(live)
            if guard != NEVER:
                next_name = self._compiler.once(("name", live), lambda inner: self._after_comma(inner, live))
                self._builder.edge(state, b",", Edge(self._compiler.spaced(next_name), guard))
            self._close(state, live)

        return self._compiler.once(("between", live), make)

    def _after_comma(self, state: int, live: Live) -> None:
        self._compiler.loose(state)
        self._begin_name(state, live)

    def _any_name(self, live: Live) -> Guard:
        """Whether another member may come."""
        return _either(self._other_names(live), self.listed_guard(live, self._usable(live)))

    def _begin_name(self, state: int, live: Live) -> None:
        """The opening quote of a name: any name where unlisted ones may come, else a listed one."""
        others, listed = self._other_names(live), self.listed_guard(live, self._usable(live))
        edge = None
        if listed not in (NEVER, others):
            edge = Edge(self._name(live, with_others=False), listed)
        if others != NEVER:
            edge = Edge(self._name(live, with_others=True), others, otherwise=edge)
        if edge is not None:
            self._builder.edge(state, b'"', edge)

    def _name(self, live: Live, *, with_others: bool) -> int:
        def make(state: int) -> None:
            classes = self._classes(live) if with_others else None
            _Names(self, live, classes).write(name_trie(self._usable(live)), state)

        return self._compiler.once(("names", live, with_others), make)

    def _usable(self, live: Live) -> tuple[str, ...]:
        """The listed names that some alternative allows."""
        return tuple(name for name in self._names if self._choices(live, name))

    def _choices(self, live: Live, name: str) -> tuple[tuple[int, Expr], ...]:
        """What a listed member must be, by alternative that allows it."""
        member = self._reader.sets.member
        found = ((i, member(self._shapes[i], name)) for i in live if self._shapes[i].high != 0)
        return tuple((i, expr) for i, expr in found if self._reader.inhabited(expr))

    def listed_guard(self, live: Live, names: Iterable[str]) -> Guard:
        """Whether one of these names may come: it is not used yet, and there is room for it."""
        clear: dict[Condition, int] = {}
        free: list[Condition] = []
        for name in names:
            bound = self._bound(live, name in self._required_of(live), [expr for _, expr in self._choices(live, name)])
            if name in self._bits:
                clear[bound] = clear.get(bound, 0) | self._bits[name]
            else:
                free.append(bound)
        found = [*free, *(_with_clear(bound, bits) for bound, bits in clear.items())]
        return _either(tuple(found) or NEVER)

    def _other_names(self, live: Live) -> Guard:
        """Whether a name that is not listed may come."""
        exprs = [expr for choices in self._classes(live).choices for _, expr in choices]
        return (self._bound(live, False, exprs, deepest=True),) if exprs else NEVER

    def _bound(self, live: Live, required: bool, exprs: list[Expr], *, deepest: bool = False) -> Condition:
        """What the number of members and the depth of the stack demand of another member."""
        needs = [self._reader.needs.of(expr) or 0 for expr in exprs]
        room = max(needs) if deepest else min(needs)
        shape = self._shapes[live[0]]
        if shape.high is None:
            return Condition(room=room)
        owed = sum(self._bits[name] for name in shape.required)
        return Condition(high=shape.high if required else shape.high - 1, owed=owed, room=room)

    def _required_of(self, live: Live) -> frozenset[str]:
        return self._shapes[live[0]].required

    def _classes(self, live: Live) -> _Classes:
        if live not in self._others:
            self._others[live] = _Classes(self, live)
        return self._others[live]

    @cached_property
    def listed(self) -> Language | None:
        """The listed names; None where there are none."""
        return self._reader.sets.texts(self._names) if self._names else None

    def after_name(self, choices: tuple[tuple[int, Expr], ...]) -> int:
        """The state after a name whose member must be so."""

        def make(state: int) -> None:
            self._compiler.loose(state)
            joint = tuple(dict.fromkeys(expr for _, expr in choices))
            after = [0] * (1 << len(joint))
            for outcome in range(1, len(after)):
                live = tuple(i for i, expr in choices if outcome >> joint.index(expr) & 1)
                if len(joint) == 1 or self._compiler.possible(joint, outcome):
                    after[outcome] = self._between(live)
            value = self._compiler.value(joint, tuple(after))
            self._builder.edge(state, b":", self._compiler.spaced(value))

        return self._compiler.once(("member", choices), make)

    def named_edge(self, live: Live, name: str, *, assured: bool) -> Edge:
        """The closing quote of a listed name. assured: an earlier guard has seen to it that it may come."""
        guard = () if assured else self.listed_guard(live, [name])
        target = self.after_name(self._choices(live, name))
        return Edge(target, guard, use=self._bits.get(name, 0), add=int(self._counting))

    def other_edge(self, choices: tuple[tuple[int, Expr], ...]) -> Edge:
        return Edge(self.after_name(choices), add=int(self._counting))

    def _close(self, state: int, live: Live) -> None:
        """The closing brace, to the largest outcome whose alternatives have all that they require."""
        owners: dict[int, list[Condition]] = {}
        for i in live:
            shape = self._shapes[i]
            need = sum(self._bits[name] for name in shape.required)
            owners.setdefault(self._module.alternatives[i][0], []).append(Condition(need=need, low=shape.low))
        edge = None
        for outcome in sorted(_subsets(list(owners)), key=int.bit_count):
            if outcome in self._module.allowed:
                guard = _all_of([owners[one] for one in owners if outcome >> one & 1])
                edge = Edge(guard=guard, pop=outcome, otherwise=edge if guard else None)
        if edge is not None:
            self._builder.edge(state, b"}", edge)

    @property
    def shapes(self) -> list[ObjectShape]:
        return self._shapes

    @property
    def compiler(self) -> Compiler:
        return self._compiler


class _Classes:
    """Names that are not listed, as one automaton of their spellings, and what their members must be."""

    def __init__(self, owner: _Object, live: Live) -> None:
        sets, reader = owner.compiler.reader.sets, owner.compiler.reader
        languages: dict[Language, list[tuple[int, Expr]]] = {}
        for i in (one for one in live if owner.shapes[one].high != 0):
            for names, expr in owner.shapes[i].classes:
                if reader.inhabited(expr):
                    languages.setdefault(names, []).append((i, expr))
        self._parts: list[tuple[Language, tuple[tuple[int, Expr], ...]]] = []
        for names, choices in languages.items():
            rest = names if owner.listed is None else sets.without(names, owner.listed)
            self._add(sets, rest, tuple(choices))

    def _add(self, sets: Sets, names: Language, choices: tuple[tuple[int, Expr], ...]) -> None:
        """Keep the parts apart: where two languages meet, both of their demands may be followed."""
        parts, rest = list[tuple[Language, tuple[tuple[int, Expr], ...]]](), names
        for other, old in self._parts:
            shared, alone = sets.common(other, rest), sets.without(other, rest)
            if not shared.empty:
                parts.append((shared, (*old, *choices)))
            if not alone.empty:
                parts.append((alone, old))
            rest = sets.without(rest, other)
        if not rest.empty:
            parts.append((rest, choices))
        self._parts = parts

    @property
    def choices(self) -> list[tuple[tuple[int, Expr], ...]]:
        return [choices for _, choices in self._parts]

    @cached_property
    def joined(self) -> tuple[ByteAutomaton, npt.NDArray[np.int64]]:
        """One automaton, and by state the index of the part that ends there, or -1."""
        spelled = [regular.json_string(names.automaton, canonical=False) for names, _ in self._parts]
        if len(spelled) == 1:
            return spelled[0], np.where(spelled[0].accepting, 0, -1)
        automaton, outcomes = regular.product(spelled)
        return automaton, np.array([int(one).bit_length() - 1 for one in outcomes])


@dataclass(eq=False)
class _Names:
    """Writes the states of a name: beside each other the trie of listed names and the automaton of all others."""

    owner: _Object
    live: Live
    classes: _Classes | None
    _states: dict[tuple[NameNode, int], int] = field(default_factory=dict)

    def write(self, trie: NameNode, start: int) -> None:
        """From `start` on, whichever name may come."""
        self._write(trie, self.classes.joined[0].start if self.classes is not None else DEAD, start)

    def _write(self, node: NameNode, other: int, state: int) -> None:
        builder = self.owner.compiler.builder
        if other:
            builder.edges(state, self._others[other])
        for byte, child in node.children.items():
            builder.replace(state, byte, self._to_child(byte, node, child, other))
        if node.name is not None:
            assured = not other and len(node.below) == 1
            builder.replace(state, ord('"'), self.owner.named_edge(self.live, node.name, assured=assured))

    def _to_child(self, byte: int, node: NameNode, child: NameNode, other: int) -> int | Edge:
        beyond = int(self.classes.joined[0].transitions[other, byte]) if self.classes is not None and other else DEAD
        target = self._states.get((child, beyond))
        if target is None:
            target = self._states[child, beyond] = self.owner.compiler.state()
            self._write(child, beyond, target)
        if beyond or (not other and child.below == node.below):
            return target
        guard = self.owner.listed_guard(self.live, sorted(child.below))
        return Edge(target, guard) if guard else target

    @cached_property
    def _others(self) -> npt.NDArray[np.int32]:
        """i32[states, 256]: where a name goes on that is none of those listed."""
        assert self.classes is not None
        automaton, parts = self.classes.joined
        builder, compiler = self.owner.compiler.builder, self.owner.compiler
        states = np.array([DEAD if i == 0 or parts[i] >= 0 else compiler.state() for i in range(len(parts))], np.int32)
        rows = states[automaton.transitions]
        for i in np.flatnonzero(states).tolist():
            state, ending = int(states[i]), int(parts[automaton.transitions[i, ord('"')]])
            builder.edges(state, rows[i])
            if ending >= 0:
                builder.replace(state, ord('"'), self.owner.other_edge(self.classes.choices[ending]))
                rows[i] = builder.row(state)
        return rows


def _required(shape: ObjectShape) -> frozenset[str]:
    return shape.required


def _with_clear(bound: Condition, bits: int) -> Condition:
    return replace(bound, some_clear=bits)


def _either(*guards: Guard) -> Guard:
    """Holds where one of them does."""
    conditions = tuple(dict.fromkeys(one for guard in guards if guard != NEVER for one in guard))
    if not conditions:
        return NEVER
    return (Condition(),) if Condition() in conditions else conditions


def _all_of(groups: list[list[Condition]]) -> Guard:
    """Holds where one condition of each group does."""
    found = [Condition()]
    for group in groups:
        found = [Condition(need=a.need | b.need, low=max(a.low, b.low)) for a in found for b in group]
    return () if Condition() in found else tuple(dict.fromkeys(found))


def _subsets(owners: list[int]) -> list[int]:
    """All bit masks over some of the owners, but none."""
    masks = [0]
    for one in owners:
        masks += [mask | 1 << one for mask in masks]
    return masks[1:]
