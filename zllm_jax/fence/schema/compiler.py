"""Schemas -> machine. Values of one place are states; arrays and objects are frames, each kind written once.

Where several alternatives are possible, they are followed together: a value is read once, and its outcome, a bit mask,
says which of the expressions it is in. A continuation is a tuple of states by outcome, with 0 where an outcome is not
allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import regular
from zllm_jax.fence.automaton import DEAD, ByContent, ByteAutomaton
from zllm_jax.fence.machine import Condition, Edge, MachineBuilder
from zllm_jax.fence.schema.reader import Reader
from zllm_jax.fence.schema.values import ArrayShape, Expr, Language, ObjectShape, Values

Whitespace = Literal["spaced", "dense", "free"]
Joint = tuple[Expr, ...]
Continuation = tuple[int, ...]
Alternative = tuple[int, ArrayShape | ObjectShape]  # the index of the expression that it belongs to, and its shape

WHITESPACE = b" \t\n\r"
MAX_JOINT = 4  # expressions that one value is read for at a time
_FINITE = 4096  # texts of a language up to which it is spelled canonically


@dataclass(frozen=True)
class Module:
    """A kind of frame: the alternatives it reads, and the outcomes that whoever enters it can go on with."""

    alternatives: tuple[Alternative, ...]
    allowed: frozenset[int]


@dataclass(eq=False)
class Compiler:
    """Builds one machine. `members` and `items` write the states of a module; see objects.py and arrays.py."""

    reader: Reader
    whitespace: Whitespace
    write_object: Callable[[Compiler, Module, int], None]
    write_array: Callable[[Compiler, Module, int], None]
    builder: MachineBuilder = field(default_factory=MachineBuilder)
    module_of: list[int] = field(default_factory=lambda: [0])  # by state
    _module: int = 0
    _starts: dict[Module, int] = field(default_factory=dict)
    _waiting: list[Module] = field(default_factory=list)
    _memo: dict[object, int] = field(default_factory=dict)
    _fused: list[tuple[int, int]] = field(default_factory=list)
    _texts: dict[tuple[int, int], int] = field(default_factory=dict)

    def root(self, after: int, module: int = 0) -> int:
        """The state in which a value of the whole schema begins, within a module; it goes on in `after`.

        Raises `UnsupportedGrammar`. `finish` must follow once all edges of `after` are there.
        """
        expr = self.reader.root
        if not self.reader.inhabited(expr):
            raise UnsupportedGrammar("no value satisfies the schema: nothing could be generated", where="#")
        self._module = module
        start = self.value((expr,), (0, after))
        self.loose(after)
        while self._waiting:
            one = self._waiting.pop()
            self._module = self._starts[one]
            first = one.alternatives[0][1]
            write = self.write_array if isinstance(first, ArrayShape) else self.write_object
            try:
                write(self, one, self._starts[one])
            except UnsupportedGrammar as error:
                where = error.where or self.reader.place(first)
                raise UnsupportedGrammar(error.reason, where=where) from None
        return start

    def finish(self) -> None:
        """Let what follows a number follow its digits."""
        for source, target in self._fused:
            self.builder.copy_edges(source, target)
        self._fused.clear()

    def state(self, *, accepting: bool = False) -> int:
        self.module_of.append(self._module)
        return self.builder.state(accepting=accepting)

    def once(self, key: object, make: Callable[[int], None]) -> int:
        """The state of this key; made where there is none yet, within the module under way."""
        key = (self._module, key)
        if key not in self._memo:
            self._memo[key] = state = self.state()
            make(state)
        return self._memo[key]

    def spaced(self, target: int) -> int:
        """A state that leads to `target` as white space wants it after a comma or a colon."""
        if self.whitespace != "spaced":
            return target
        return self.once(("space", target), lambda state: self.builder.edge(state, b" ", target))

    def loose(self, state: int) -> None:
        """White space may stand here."""
        if self.whitespace == "free":
            self.builder.edge(state, WHITESPACE, state)

    def value(self, joint: Joint, after: Continuation) -> int:
        """The state in which a value begins."""
        if len(joint) > MAX_JOINT:
            raise UnsupportedGrammar(f"more than {MAX_JOINT} alternatives that must be told apart in one place")

        def make(state: int) -> None:
            several = [self.reader.values(one) for one in joint]
            self.loose(state)
            self._literals(state, several, after)
            self._scalars(state, [one.string for one in several], after, text=True)
            self._scalars(state, [self._spelled(one.number) for one in several], after, text=False)
            self._nested(state, b"[", [(i, shape) for i, one in enumerate(several) for shape in one.arrays], after)
            self._nested(state, b"{", [(i, shape) for i, one in enumerate(several) for shape in one.objects], after)

        return self.once(("value", joint, after), make)

    def _spelled(self, number: Language | None) -> Language | None:
        sets = self.reader.sets
        return None if number is None else sets.common(number, sets.spelled_number)

    def possible(self, joint: Joint, outcome: int) -> bool:
        """Whether a value can be in exactly these of the expressions; True where that is not known."""
        sets = self.reader.sets
        chosen = [one if outcome >> i & 1 else sets.other_than(one) for i, one in enumerate(joint)]
        try:
            return self.reader.inhabited(sets.both(*chosen))
        except UnsupportedGrammar:
            return True

    def _literals(self, state: int, several: Sequence[Values], after: Continuation) -> None:
        for name in ("null", "true", "false"):
            outcome = _mask(getattr(one, name) for one in several)
            if after[outcome]:
                self.builder.edge(state, name[:1].encode(), self._rest(name[1:].encode(), after[outcome]))

    def _rest(self, text: bytes, target: int) -> int:
        if not text:
            return target
        return self.once(
            ("rest", text, target), lambda state: self.builder.edge(state, text[:1], self._rest(text[1:], target))
        )

    def _scalars(self, state: int, languages: Sequence[Language | None], after: Continuation, *, text: bool) -> None:
        owners = [i for i, one in enumerate(languages) if one is not None]
        if not owners:
            return
        several = [one for one in languages if one is not None]
        if text and len(after) == 2 and several[0].counted and after[1]:
            room = (Condition(room=1),)
            edge = Edge(self._counted(several[0]), room, push=self.builder.returns(after))
            self.builder.edge(state, b'"', edge)
            return
        if all(one.unsure for one in several):
            raise UnsupportedGrammar("whether any text has, or breaks, the format is not known")
        joined, accepted, sure = _jointly(several, text=text)
        seen, which = np.unique(accepted, return_inverse=True)
        outcomes = np.array([_mask_of(owners, one) for one in seen.tolist()])[which.reshape(-1)]
        targets = np.where(sure, np.array(after)[outcomes], DEAD)
        alive = _leading_to(joined, targets != 0)
        if not alive[joined.start]:
            return
        key = ("scalars", joined.digest, targets.tobytes(), text)
        if text:
            self.builder.edge(state, b'"', self._entered(key, joined, targets, alive, closing=True))
        else:
            self.builder.copy_edges(self._entered(key, joined, targets, alive, closing=False), state)

    def _counted(self, language: Language) -> int:
        """The rest of a text whose characters its own frame counts, behind the opening quote.

        Every character begins in the automaton's first state, and only there.
        """
        assert language.lengths is not None
        low, high = language.lengths
        assert high is not None

        if (low, high) in self._texts:
            return self._texts[low, high]
        outer, self._module = self._module, len(self.module_of)
        every = regular.json_string(regular.any_text(), canonical=False)
        self._texts[low, high] = start = self.state()
        inner = np.zeros(every.num_states, np.int32)
        for one in np.flatnonzero(~every.accepting).tolist()[1:]:
            inner[one] = start if one == every.start else self.state()
        for one in np.flatnonzero(inner).tolist():
            self.builder.edges(int(inner[one]), inner[every.transitions[one]])
        guard = (Condition(high=high - 1),)
        for byte in np.flatnonzero(self.builder.row(start)).tolist():
            self.builder.replace(start, byte, Edge(int(self.builder.row(start)[byte]), guard, add=1))
        self.builder.edge(start, b'"', Edge(guard=(Condition(low=low),) if low else (), pop=1))
        self._module = outer
        return start

    def _entered(
        self,
        key: object,
        joined: ByteAutomaton,
        targets: npt.NDArray[np.int64],
        alive: npt.NDArray[np.bool_],
        *,
        closing: bool,
    ) -> int:
        """The start of a copy of the automaton that goes on in `targets` from its accepting states.

        closing: at once, for a text; else with the byte that follows, for a number.
        """

        def make(start: int) -> None:
            states = np.zeros(len(alive), np.int32)
            for i in np.flatnonzero(alive).tolist():
                if closing and targets[i]:
                    states[i] = targets[i]
                else:
                    states[i] = start if i == joined.start else self.state()
            rows = states[joined.transitions]
            for i in np.flatnonzero(alive).tolist():
                if closing and targets[i]:
                    continue
                self.builder.edges(int(states[i]), rows[i])
                if targets[i]:
                    self._fused.append((int(targets[i]), int(states[i])))

        return self.once(key, make)

    def _nested(self, state: int, opening: bytes, alternatives: list[Alternative], after: Continuation) -> None:
        kept = [(i, shape) for i, shape in alternatives if self.reader.needs.of_shape(shape) is not None]
        if not kept or not any(after):
            return
        module = Module(tuple(dict.fromkeys(kept)), frozenset(i for i, target in enumerate(after) if target))
        if module not in self._starts:
            outer, self._module = self._module, len(self.module_of)
            self._starts[module] = self.state()
            self._module = outer
            self._waiting.append(module)
        depth = min(self.reader.needs.of_shape(shape) or 0 for _, shape in kept)
        edge = Edge(self._starts[module], (Condition(room=depth),), push=self.builder.returns(after))
        self.builder.edge(state, opening, edge)


def _jointly(
    several: Sequence[Language], *, text: bool
) -> tuple[ByteAutomaton, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """One automaton for all, by state a bit mask of the languages that have what ends there, and whether that is sure.

    text: the rest of a JSON text after its opening quote. Where there are few texts, each has one spelling.
    """
    automata = [one.automaton for one in several] + [one.possible for one in several if not one.exact]
    doubted = tuple(i for i, one in enumerate(several) if not one.exact)
    return _product(tuple(map(ByContent, automata)), doubted, text)


@lru_cache(maxsize=256)
def _product(
    several: tuple[ByContent, ...], doubted: tuple[int, ...], text: bool
) -> tuple[ByteAutomaton, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    automata = [one.automaton for one in several]
    if text:
        few = all(regular.finite_texts(one, _FINITE) is not None for one in automata)
        automata = [regular.json_string(one, canonical=few) for one in automata]
    if len(automata) == 1:
        return automata[0], automata[0].accepting.astype(np.int64), automata[0].accepting
    joined, accepted = regular.product(automata)
    num_languages = len(several) - len(doubted)
    sure = np.ones(len(accepted), np.bool_)
    for second, i in enumerate(doubted, num_languages):
        sure &= (accepted >> second & 1) == (accepted >> i & 1)
    return joined, accepted & ((1 << num_languages) - 1), sure


def _leading_to(automaton: ByteAutomaton, ends: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The states from which one of `ends` can be reached, in an automaton without states that lead to no end."""
    alive = ends.copy()
    alive[DEAD] = False
    if np.array_equal(alive, automaton.accepting):
        alive[:] = True
        alive[DEAD] = False
        return alive
    transitions = automaton.transitions[:, (automaton.transitions != DEAD).any(axis=0)]
    while True:
        grown = alive | alive[transitions].any(axis=1)
        grown[DEAD] = False
        if (grown == alive).all():
            return alive
        alive = grown


def _mask(flags: Iterable[bool]) -> int:
    return sum(1 << i for i, flag in enumerate(flags) if flag)


def _mask_of(owners: Sequence[int], accepted: int) -> int:
    return sum(1 << owner for i, owner in enumerate(owners) if accepted >> i & 1)
