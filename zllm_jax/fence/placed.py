"""The table of all grammars on the device: made once, then written in place, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.device import FREE, FenceTables
from zllm_jax.fence.vocabulary import Vocabulary, pack_bits

OUTCOMES = 16  # of a frame: masks of up to four alternatives
# Rows of each part that one block writes: a grammar of a few hundred states is a few blocks.
BLOCK: Mapping[str, int] = {
    **dict.fromkeys(("edges", "accepting", "pauses", "kind", "kinds", "masks"), 64),
    **dict.fromkeys(("special", "conditions", "returns"), 32),
    "dependent": 256,
    "counts": 2,
}

Patch = Mapping[str, tuple[int, npt.NDArray[Any]]]  # of each part, where new rows go, and the rows
Block = Mapping[str, tuple[npt.NDArray[np.int32], npt.NDArray[Any]]]  # the same, each row with its place; shapes fixed


def table_shapes(vocabulary: Vocabulary, num_rows: Mapping[str, int]) -> FenceTables:
    """Shapes and types. num_rows: of each part of `BLOCK`."""
    num_words = -(-len(vocabulary) // 32)
    kinds: dict[str, tuple[tuple[int, ...], Any]] = {
        "edges": ((256,), np.int32),
        "accepting": ((), np.bool_),
        "pauses": ((), np.bool_),
        "kind": ((), np.int32),
        "kinds": ((5,), np.int32),
        "masks": ((num_words,), np.uint32),
        "dependent": ((), np.int32),
        "counts": ((len(vocabulary),), np.uint8),
        "special": ((9,), np.int32),
        "conditions": ((9,), np.int32),
        "returns": ((OUTCOMES,), np.int32),
    }
    parts = {name: _shape((num_rows[name], *row), kind) for name, (row, kind) in kinds.items()}
    fixed = {name: _shape(part.shape, part.dtype) for name, part in fixed_parts(vocabulary).items()}
    return FenceTables(**parts, **fixed)


def _shape(shape: tuple[int, ...], kind: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, kind)  # type: ignore[no-untyped-call]


def fixed_parts(vocabulary: Vocabulary) -> dict[str, npt.NDArray[Any]]:
    """What is the same for all grammars."""
    data, starts = vocabulary.flat
    eos = np.zeros(len(vocabulary), np.bool_)
    eos[list(vocabulary.eos_ids)] = True
    return {"token_bytes": data, "token_start": starts, "eos": pack_bits(eos)}


def first_patch(vocabulary: Vocabulary) -> Patch:
    """To write into zeros: `DEAD`, where nothing may come, and `FREE`, where everything may."""
    assert (DEAD, FREE) == (0, 1)
    num_words = -(-len(vocabulary) // 32)
    rows: dict[str, list[Any]] = {
        "edges": [[DEAD] * 256, [FREE] * 256],
        "accepting": [False, True],
        "kind": [DEAD, FREE],
        "kinds": [[0, 0, -1, 0, DEAD], [0, 0, -1, 0, FREE]],
        "masks": [[0] * num_words, [0xFFFFFFFF] * num_words],
    }
    return {name: (DEAD, np.array(several)) for name, several in rows.items()}


def write_block(tables: FenceTables, block: Block) -> FenceTables:
    """With the rows of a block; places beyond the table's end are for rows that are none."""
    parts = {
        name: jnp.asarray(getattr(tables, name)).at[ids].set(rows, mode="drop") for name, (ids, rows) in block.items()
    }
    return replace(tables, **parts)


def blocks_of(patch: Patch, tables: FenceTables) -> Iterator[Block]:
    """A patch, cut to blocks."""
    done = 0
    while done == 0 or any(done * BLOCK[name] < len(rows) for name, (_, rows) in patch.items()):
        yield {name: _part(patch.get(name), done, BLOCK[name], getattr(tables, name)) for name in BLOCK}
        done += 1


def _part(
    one: tuple[int, npt.NDArray[Any]] | None, done: int, size: int, table: jax.Array
) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
    ids = np.full(size, table.shape[0], np.int32)
    rows = np.zeros((size, *table.shape[1:]), table.dtype)
    if one is not None and len(one[1]):
        first, several = one
        several = several[done * size : (done + 1) * size]
        ids[: len(several)] = first + done * size + np.arange(len(several))
        rows[: len(several)] = several
    return ids, rows
