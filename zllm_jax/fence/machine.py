"""The machine that every grammar becomes: deterministic over bytes, with a bounded stack of small registers.

A nested structure (an object, an array, a call) is a frame: it remembers where to go on when it closes, which of its
members were used (bits) and how many there were. So members in any order cost states in their number, not in that of
their subsets, and recursion costs none. `Machine.step` is the definition; the device does the same on arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from zllm_jax.fence.automaton import DEAD, ByteAutomaton

MAX_DEPTH = 24  # frames above the outermost one
USED_BITS = 64  # members of one frame that can be told apart
SEVERAL, ASK = -1, -2  # in place of a state's only byte


@dataclass(frozen=True)
class Condition:
    """What must hold of the top frame; by default it always does.

    need: bits that are all used. some_clear: bits of which at least one is not used (0: no such demand).
    low: at least so many members were counted. high: at most so many, those bits of `owed` included that are not used
    yet (-1: no limit). room: so many more frames still fit on the stack.
    """

    need: int = 0
    some_clear: int = 0
    low: int = 0
    high: int = -1
    owed: int = 0
    room: int = 0

    def holds(self, frame: Frame, depth: int) -> bool:
        missing = (self.owed & ~frame.used).bit_count()
        return (
            self.need & ~frame.used == 0
            and (self.some_clear == 0 or self.some_clear & ~frame.used != 0)
            and frame.count >= self.low
            and (self.high < 0 or frame.count + missing <= self.high)
            and depth + self.room <= MAX_DEPTH
        )


@dataclass(frozen=True)
class Edge:
    """A transition that reads or changes the stack.

    Taken when one of the conditions of `guard` holds (empty: always); `otherwise` is tried where none does. The bits of
    `use` and the number `add` go into the top frame. Then, to `target`; with `push`, below a new frame that remembers
    the row `push` of `Machine.returns`; with `pop`, out of the top frame, to the entry `pop` of the row it remembers.
    """

    target: int = DEAD
    guard: tuple[Condition, ...] = ()
    use: int = 0
    add: int = 0
    push: int | None = None
    pop: int | None = None
    otherwise: Edge | None = None

    @property
    def only_counts(self) -> bool:
        """Whether all that it does, if its guard holds, is to add one to the count."""
        return self == Edge(self.target, self.guard, add=1)


@dataclass(frozen=True)
class Frame:
    """returns: the row of `Machine.returns` to go on with."""

    returns: int = 0
    used: int = 0
    count: int = 0


@dataclass(frozen=True)
class Position:
    """Where a text has led: a value. `stack` has the outermost frame first, and is never empty."""

    state: int
    stack: tuple[Frame, ...] = (Frame(),)

    @property
    def dead(self) -> bool:
        return self.state == DEAD


_NOWHERE = Position(DEAD)


@dataclass(frozen=True, eq=False)
class Machine:
    """States 0 .. Q - 1, of which 0 is `DEAD`.

    edges: i32[Q, 256], the next state of each byte, or ~i for the i-th of `special`. accepting: bool[Q], where a text
    may end once the stack is down to its outermost frame. returns: rows of states, one an outcome of a frame.

    From every position that can be reached, the text can be completed: builders see to that.
    """

    edges: npt.NDArray[np.int32]
    accepting: npt.NDArray[np.bool_]
    start: int
    special: tuple[Edge, ...] = ()
    returns: tuple[tuple[int, ...], ...] = ()

    @property
    def num_states(self) -> int:
        return len(self.accepting)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of its content."""
        state = hashlib.sha256(self.edges.tobytes() + self.accepting.tobytes())
        state.update(repr((self.start, self.special, self.returns)).encode())
        return state.hexdigest()

    @cached_property
    def lone_bytes(self) -> npt.NDArray[np.int16]:
        """i16[Q]: the only byte that may follow; `SEVERAL` where more may, or none; `ASK` where the stack decides."""
        plain, special = (self.edges > 0).sum(axis=1), (self.edges < 0).any(axis=1)
        lone = np.where(plain == 1, (self.edges > 0).argmax(axis=1), SEVERAL)
        return np.where(special & (plain <= 1), ASK, lone).astype(np.int16)

    @cached_property
    def columns(self) -> npt.NDArray[np.int64]:
        """One byte of each kind: the others do in every state what one of these does."""
        scramble = np.random.default_rng(0).integers(1, 2**63, self.num_states, dtype=np.uint64) | np.uint64(1)
        names = scramble @ self.edges.astype(np.uint64)
        found: npt.NDArray[np.int64] = np.unique(names, return_index=True)[1]
        return found

    @property
    def begin(self) -> Position:
        return Position(self.start)

    def step(self, at: Position, byte: int) -> Position:
        """The position after one byte; a dead one where it may not come."""
        target = int(self.edges[at.state, byte])
        if target >= 0:
            return Position(target, at.stack) if target else _NOWHERE
        edge: Edge | None = self.special[~target]
        depth = len(at.stack) - 1
        top = at.stack[-1]
        while edge is not None and edge.guard and not any(one.holds(top, depth) for one in edge.guard):
            edge = edge.otherwise
        if edge is None:
            return _NOWHERE
        if edge.pop is not None:
            if depth == 0:
                return _NOWHERE
            return Position(self.returns[top.returns][edge.pop], at.stack[:-1])
        stack = (*at.stack[:-1], Frame(top.returns, top.used | edge.use, top.count + edge.add))
        if edge.push is not None:
            if depth == MAX_DEPTH:
                return _NOWHERE
            stack = (*stack, Frame(edge.push))
        return Position(edge.target, stack)

    def run(self, text: bytes, at: Position | None = None) -> Position:
        """The position after `text`, from `at` or the beginning."""
        at = at or self.begin
        for byte in text:
            if at.dead:
                return at
            at = self.step(at, byte)
        return at

    def ended(self, at: Position) -> bool:
        """Whether the text may end here."""
        return len(at.stack) == 1 and bool(self.accepting[at.state])

    def accepts(self, text: bytes) -> bool:
        return self.ended(self.run(text))


def machine_of(automaton: ByteAutomaton) -> Machine:
    """A finite automaton, without what cannot be completed."""
    alive = automaton.accepting.copy()
    while True:
        grown = alive | alive[automaton.transitions].any(axis=1)
        if (grown == alive).all():
            break
        alive = grown
    edges = np.where(alive[automaton.transitions], automaton.transitions, DEAD).astype(np.int32)
    return Machine(edges, automaton.accepting, automaton.start if alive[automaton.start] else DEAD)


@dataclass(eq=False)
class MachineBuilder:
    """Collects states and edges; equal edges and rows are kept once."""

    _rows: list[npt.NDArray[np.int32]] = field(default_factory=lambda: [np.zeros(256, np.int32)])
    _accepting: set[int] = field(default_factory=set)
    _special: dict[Edge, int] = field(default_factory=dict)
    _returns: dict[tuple[int, ...], int] = field(default_factory=dict)

    def state(self, *, accepting: bool = False) -> int:
        """A new state without edges."""
        self._rows.append(np.zeros(256, np.int32))
        if accepting:
            self._accepting.add(len(self._rows) - 1)
        return len(self._rows) - 1

    def edge(self, source: int, several: bytes | Sequence[int], to: int | Edge) -> None:
        """Each of these bytes leads from `source` to a state, or takes an edge. Raises where one leads elsewhere."""
        row, target = self._rows[source], self._target(to)
        for byte in several:
            if row[byte] not in (DEAD, target):
                raise ValueError(f"byte {byte:#x} already leads elsewhere from state {source}")
            row[byte] = target

    def edges(self, source: int, row: npt.NDArray[np.int32]) -> None:
        """All edges of `source` at once: i32[256] states, `DEAD` where a byte may not come."""
        self._rows[source][:] = row

    def replace(self, source: int, byte: int, to: int | Edge) -> None:
        """Another edge in the place of one."""
        self._rows[source][byte] = self._target(to)

    def row(self, source: int) -> npt.NDArray[np.int32]:
        """The edges of `source`, as `Machine.edges` has them."""
        return self._rows[source]

    def copy_edges(self, source: int, target: int, *, keep: bool = False) -> None:
        """What `source` does, `target` does too. Raises where it does something else, unless it is to `keep` that."""
        ours, theirs = self._rows[target], self._rows[source]
        if not keep and ((ours != DEAD) & (theirs != DEAD) & (ours != theirs)).any():
            raise ValueError(f"states {source} and {target} differ in what follows a byte")
        self._rows[target] = np.where(ours == DEAD, theirs, ours)
        if source in self._accepting:
            self._accepting.add(target)

    def returns(self, states: Sequence[int]) -> int:
        """The row in which a frame finds where to go on, by its outcome."""
        return self._returns.setdefault(tuple(states), len(self._returns))

    @property
    def num_states(self) -> int:
        return len(self._rows)

    def build(self, start: int) -> Machine:
        accepting = np.isin(np.arange(len(self._rows)), list(self._accepting))
        return Machine(np.stack(self._rows), accepting, start, tuple(self._special), tuple(self._returns))

    def _target(self, to: int | Edge) -> int:
        return to if isinstance(to, int) else ~self._special.setdefault(to, len(self._special))
