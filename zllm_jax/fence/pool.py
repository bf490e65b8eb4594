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
from zllm_jax.fence.device import words
from zllm_jax.fence.forced import may_force
from zllm_jax.fence.machine import Condition, Edge, Machine
from zllm_jax.fence.placed import OUTCOMES, Patch, table_shapes
from zllm_jax.fence.tables import TokenTables
from zllm_jax.fence.vocabulary import Vocabulary

_NAMES = ("states", "kinds", "masks", "dependent", "special", "conditions", "returns", "counts")
_PARTS: Mapping[str, tuple[str, ...]] = {  # of the table, which have a row for each of these
    **{name: (name,) for name in _NAMES},
    "states": ("edges", "accepting", "pauses", "kind"),
}


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
    """Which grammar lies where. `load` and `release` count users; one that nobody uses stays until room is needed.

    num_states bounds the states of all grammars together; the other parts grow with it. shapes: of the table.
    """

    def __init__(self, vocabulary: Vocabulary, num_states: int) -> None:
        self.vocabulary = vocabulary
        sizes = {
            **dict.fromkeys(_NAMES, num_states),
            "masks": 16 + num_states // 2,  # about two of three kinds have a mask that another has too
            "dependent": 32 * num_states,
            "counts": 2 + num_states // 128,
        }
        self._rooms = {name: _Room(size) for name, size in sizes.items()}
        for name in ("states", "kinds", "masks"):
            self._rooms[name].taken.append((DEAD, 2))
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        self.shapes = table_shapes(vocabulary, {part: sizes[name] for name in _NAMES for part in _PARTS[name]})

    def load(self, tables: TokenTables) -> tuple[Place, Patch | None]:
        """Where the grammar lies, and what to write there first. Each call needs a `release`.

        Raises `UnsupportedGrammar` when it alone is too large, `Overloaded` while others need the room.
        """
        if tables.vocabulary.origin != self.vocabulary.digest:
            raise ValueError("the tables are of another vocabulary")
        patch = None
        if tables.digest not in self._loaded:
            masks = _distinct(tables.masks)
            self._loaded[tables.digest] = _Loaded(self._make_room(_lengths(tables, len(masks[0]))))
            patch = _patch(tables, *masks, self._loaded[tables.digest].spans)
        one = self._loaded[tables.digest]
        one.users += 1
        self._loaded.move_to_end(tables.digest)
        return Place(one.spans["states"][0] - 1, one.spans["returns"][0]), patch

    def forget(self, tables: TokenTables) -> None:
        """Undo a `load` whose patch could not be written: the next one has it again."""
        self._free(self._loaded.pop(tables.digest))

    def release(self, tables: TokenTables) -> None:
        self._loaded[tables.digest].users -= 1

    def _make_room(self, need: Mapping[str, int]) -> dict[str, tuple[int, int]]:
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
            self._free(self._loaded.pop(idle))
        spans = {name: (first, need[name]) for name, first in found.items() if first is not None}
        for name, span in spans.items():
            self._rooms[name].taken = sorted([*self._rooms[name].taken, span])
        return spans

    def _free(self, one: _Loaded) -> None:
        for name, span in one.spans.items():
            self._rooms[name].taken.remove(span)


def _distinct(masks: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Each row once, and of each kind which one."""
    rows: dict[bytes, int] = {}
    row = np.array([rows.setdefault(one.tobytes(), len(rows)) for one in masks], np.int64)
    return masks[np.unique(row, return_index=True)[1]], row


def _patch(
    tables: TokenTables,
    masks: npt.NDArray[np.uint32],
    mask_row: npt.NDArray[np.int64],
    spans: Mapping[str, tuple[int, int]],
) -> Patch:
    """The grammar with its numbers moved to where it lies. Its own `DEAD` is everybody's."""
    machine = tables.machine
    first = {name: span[0] for name, span in spans.items()}
    moved = first["states"] - 1
    edges = machine.edges[1:]
    flat, conditions = _flattened(machine)
    rows: dict[str, list[Any] | npt.NDArray[Any]] = {
        "edges": np.where(edges > 0, edges + moved, np.where(edges < 0, edges - first["special"], DEAD)),
        "accepting": machine.accepting[1:],
        "pauses": may_force(machine)[1:],
        "kind": tables.row[1:] + first["kinds"],
        "kinds": np.stack(
            [
                tables.depends[:-1] + first["dependent"],
                np.diff(tables.depends),
                np.where(tables.count_row < 0, -1, tables.count_row + first["counts"]),
                tables.count_most,
                mask_row + first["masks"],
            ],
            axis=1,
        ),
        "masks": masks,
        "dependent": tables.dependent,
        "counts": tables.counts,
        "special": [_edge_row(*one, first) for one in flat],
        "conditions": [
            (*words(c.need), *words(c.some_clear), c.low, c.high, *words(c.owed), c.room) for c in conditions
        ],
        "returns": [
            [*(state + moved if state else DEAD for state in one), *([DEAD] * (OUTCOMES - len(one)))]
            for one in machine.returns
        ],
    }
    return {part: (first[name], np.asarray(rows[part])) for name in _NAMES for part in _PARTS[name]}


def _edge_row(edge: Edge, otherwise: int | None, condition: int, first: Mapping[str, int]) -> tuple[int, ...]:
    return (
        edge.target + first["states"] - 1 if edge.target else DEAD,
        *words(edge.use),
        edge.add,
        -1 if edge.push is None else edge.push + first["returns"],
        -1 if edge.pop is None else edge.pop,
        -1 if otherwise is None else otherwise + first["special"],
        condition + first["conditions"],
        len(edge.guard),
    )


def _lengths(tables: TokenTables, num_masks: int) -> dict[str, int]:
    flat, conditions = _flattened(tables.machine)
    sizes = (tables.machine.num_states - 1, len(tables.masks), num_masks, len(tables.dependent), len(flat))
    return dict(zip(_NAMES, (*sizes, len(conditions), len(tables.machine.returns), len(tables.counts)), strict=True))


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
