"""The grammars that are on the device at a time: one table of fixed size, so that no program is compiled again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from zllm_jax.errors import Overloaded, UnsupportedGrammar
from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.device import FREE, FenceTables, words
from zllm_jax.fence.forced import may_force
from zllm_jax.fence.machine import Condition, Edge, Machine
from zllm_jax.fence.tables import TokenTables
from zllm_jax.fence.vocabulary import Vocabulary, pack_bits

OUTCOMES = 16  # of a frame: masks of up to four alternatives
_NAMES = ("states", "rows", "dependent", "special", "conditions", "returns", "counts")


@dataclass(frozen=True)
class Place:
    """Where a grammar lies: what is added to its states, and to its rows of returns."""

    states: int
    returns: int


@dataclass(eq=False)
class _Loaded:
    spans: Mapping[str, tuple[int, int]]  # of each part, where it begins and how long it is
    users: int = 0


@dataclass(eq=False)
class _Room:
    """First fit in one dimension of the table."""

    size: int
    taken: list[tuple[int, int]] = field(default_factory=list)  # (first, length), in order

    def find(self, length: int) -> int | None:
        first = 0
        for start, taken in self.taken:
            if start - first >= length:
                return first
            first = start + taken
        return first if self.size - first >= length else None


class FencePool:
    """Host copy of the table. `load` and `release` count users; a grammar that nobody uses stays until room is needed.

    num_states bounds the states of all grammars together; the other parts grow with it.
    """

    def __init__(self, vocabulary: Vocabulary, num_states: int) -> None:
        self.vocabulary = vocabulary
        sizes = {**dict.fromkeys(_NAMES, num_states), "dependent": 32 * num_states, "counts": 2 + num_states // 32}
        self._rooms = {name: _Room(size) for name, size in sizes.items()}
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        num_words = -(-len(vocabulary) // 32)
        data, starts = vocabulary.flat
        eos = np.zeros(len(vocabulary), np.bool_)
        eos[list(vocabulary.eos_ids)] = True
        self._parts: dict[str, npt.NDArray[Any]] = {
            "edges": np.zeros((num_states, 256), np.int32),
            "accepting": np.zeros(num_states, np.bool_),
            "pauses": np.zeros(num_states, np.bool_),
            "row": np.zeros(num_states, np.int32),
            "masks": np.zeros((num_states, num_words), np.uint32),
            "depends": np.zeros((num_states, 4), np.int32),
            "dependent": np.zeros(sizes["dependent"], np.int32),
            "counts": np.zeros((sizes["counts"], len(vocabulary)), np.uint8),
            "special": np.zeros((num_states, 9), np.int32),
            "conditions": np.zeros((num_states, 9), np.int32),
            "returns": np.zeros((num_states, OUTCOMES), np.int32),
            "token_bytes": data,
            "token_start": starts,
            "eos": pack_bits(eos),
        }
        self._write_free()

    @property
    def tables(self) -> FenceTables:
        """The host's copy: it changes with `load`."""
        return FenceTables(**self._parts)

    def _write_free(self) -> None:
        """`DEAD`, where nothing may come, and `FREE`, where everything may."""
        free = {"edges": FREE, "accepting": True, "row": FREE, "masks": 0xFFFFFFFF}
        for name, value in free.items():
            self._parts[name][FREE] = value
        self._parts["depends"][:, 2] = -1
        for name in ("states", "rows"):
            self._rooms[name].taken.append((DEAD, 2))

    @property
    def nbytes(self) -> int:
        """Of the table, on the host and again on the device."""
        return sum(part.nbytes for part in self._parts.values())

    def load(self, tables: TokenTables) -> tuple[Place, bool]:
        """Where the grammar lies, and whether the table changed. Each call needs a `release`.

        Raises `UnsupportedGrammar` when it alone is too large, `Overloaded` while others need the room.
        """
        if tables.vocabulary.origin != self.vocabulary.digest:
            raise ValueError("the tables are of another vocabulary")
        fresh = tables.digest not in self._loaded
        if fresh:
            self._loaded[tables.digest] = _Loaded(self._make_room(tables))
            self._write(tables, self._loaded[tables.digest].spans)
        one = self._loaded[tables.digest]
        one.users += 1
        self._loaded.move_to_end(tables.digest)
        return Place(one.spans["states"][0] - 1, one.spans["returns"][0]), fresh

    def release(self, tables: TokenTables) -> None:
        self._loaded[tables.digest].users -= 1

    def _make_room(self, tables: TokenTables) -> dict[str, tuple[int, int]]:
        need = _lengths(tables)
        for name, length in need.items():
            if length + 2 > self._rooms[name].size:
                raise UnsupportedGrammar(
                    f"the fence needs {length} {name}, but there is room for {self._rooms[name].size - 2}: "
                    "raise EngineConfig.fence_states, or simplify the grammar"
                )
        while True:
            found = {name: self._rooms[name].find(length) for name, length in need.items()}
            if None not in found.values():
                break
            idle = next((digest for digest, one in self._loaded.items() if not one.users), None)
            if idle is None:
                raise Overloaded("the fences of running requests leave no room for another: try again later")
            self._forget(self._loaded.pop(idle))
        spans = {name: (first, need[name]) for name, first in found.items() if first is not None}
        for name, span in spans.items():
            self._rooms[name].taken = sorted([*self._rooms[name].taken, span])
        return spans

    def _forget(self, one: _Loaded) -> None:
        for name, span in one.spans.items():
            self._rooms[name].taken.remove(span)

    def _write(self, tables: TokenTables, spans: Mapping[str, tuple[int, int]]) -> None:
        """The grammar with its numbers moved to where it lies. Its own `DEAD` is everybody's."""
        machine, parts = tables.machine, self._parts
        states, rows = _slice(spans["states"]), _slice(spans["rows"])
        moved = spans["states"][0] - 1
        edges = machine.edges[1:]
        parts["edges"][states] = np.where(
            edges > 0, edges + moved, np.where(edges < 0, edges - spans["special"][0], DEAD)
        )
        parts["accepting"][states] = machine.accepting[1:]
        parts["pauses"][states] = may_force(machine)[1:]
        parts["row"][states] = tables.row[1:] + spans["rows"][0]
        parts["masks"][rows] = tables.masks
        parts["depends"][rows, 0] = tables.depends[:-1] + spans["dependent"][0]
        parts["depends"][rows, 1] = np.diff(tables.depends)
        parts["depends"][rows, 2] = np.where(tables.count_row < 0, -1, tables.count_row + spans["counts"][0])
        parts["depends"][rows, 3] = tables.count_most
        parts["counts"][_slice(spans["counts"])] = tables.counts
        parts["dependent"][_slice(spans["dependent"])] = tables.dependent
        flat, conditions = _flattened(machine)
        for i, (edge, otherwise, first) in enumerate(flat):
            parts["special"][spans["special"][0] + i] = (
                edge.target + moved if edge.target else DEAD,
                *words(edge.use),
                edge.add,
                -1 if edge.push is None else edge.push + spans["returns"][0],
                -1 if edge.pop is None else edge.pop,
                -1 if otherwise is None else otherwise + spans["special"][0],
                first + spans["conditions"][0],
                len(edge.guard),
            )
        for i, c in enumerate(conditions):
            parts["conditions"][spans["conditions"][0] + i] = (
                *words(c.need), *words(c.some_clear), c.low, c.high, *words(c.owed), c.room
            )  # fmt: skip
        for i, outcomes in enumerate(machine.returns):
            at = parts["returns"][spans["returns"][0] + i]
            at[:] = DEAD
            at[: len(outcomes)] = [state + moved if state else DEAD for state in outcomes]


def _lengths(tables: TokenTables) -> dict[str, int]:
    flat, conditions = _flattened(tables.machine)
    sizes = (tables.machine.num_states - 1, len(tables.masks), len(tables.dependent), len(flat), len(conditions))
    return dict(zip(_NAMES, (*sizes, len(tables.machine.returns), len(tables.counts)), strict=True))


def _flattened(machine: Machine) -> tuple[list[tuple[Edge, int | None, int]], list[Condition]]:
    """Edges, first those of the machine in their order, each with the index of the next to try and of its guard."""
    flat: list[tuple[Edge, int | None, int]] = []
    conditions: list[Condition] = []
    waiting: list[Edge] = list(machine.special)
    for edge in waiting:
        otherwise = None
        if edge.otherwise is not None:
            otherwise = len(waiting)
            waiting.append(edge.otherwise)
        flat.append((edge, otherwise, len(conditions)))
        conditions += edge.guard
    return flat, conditions


def _slice(span: tuple[int, int]) -> slice:
    return slice(span[0], span[0] + span[1])
