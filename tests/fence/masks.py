"""The mask of a position, from the tables of its machine: what the device does, on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zllm_jax.fence import Position, TokenTables, unpack_bits


def mask(tables: TokenTables, at: Position) -> npt.NDArray[np.bool_]:
    """The tokens that may come next, bool[V]; EOS where the text may end."""
    machine, vocabulary = tables.machine, tables.vocabulary
    if at.dead:
        return np.zeros(len(vocabulary), np.bool_)
    kind = tables.row[at.state]
    found = unpack_bits(tables.masks[kind], len(vocabulary))
    if tables.count_row[kind] >= 0:
        counts = tables.counts[tables.count_row[kind]].astype(np.int64)
        found |= (counts > 0) & (counts <= tables.count_most[kind] - at.stack[-1].count)
    for token in tables.dependent[tables.depends[kind] : tables.depends[kind + 1]].tolist():
        found[token] = not machine.run(vocabulary.tokens[token], at).dead
    found[list(vocabulary.eos_ids)] = machine.ended(at)
    return found


def legal(tables: TokenTables, at: Position, token: int) -> bool:
    """One bit of `mask`."""
    if at.dead:
        return False
    if token in tables.vocabulary.eos_ids:
        return tables.machine.ended(at)
    kind = tables.row[at.state]
    if token in tables.dependent[tables.depends[kind] : tables.depends[kind + 1]]:
        return not tables.machine.run(tables.vocabulary.tokens[token], at).dead
    if tables.count_row[kind] >= 0 and (count := int(tables.counts[tables.count_row[kind], token])):
        return count + at.stack[-1].count <= tables.count_most[kind]
    return bool(tables.masks[kind, token // 32] >> np.uint32(token % 32) & np.uint32(1))
