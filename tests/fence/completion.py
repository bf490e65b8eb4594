"""A whole text from any position of a machine: the rest that closes what is open, member after member."""

from __future__ import annotations

from functools import cache

import numpy as np

from zllm_jax.fence import Machine, Position


def completed(machine: Machine, at: Position) -> bytes | None:
    """A text that leads from `at` to an end; None where this search finds none. Frames are closed as soon as may be."""
    text = b""
    for _ in range(500):
        if at.dead or machine.ended(at):
            return None if at.dead else text
        ways = _ways(machine, at)
        if not ways:
            return None
        _, more, at = min(ways, key=lambda way: way[:2])
        text += more
    return None


def _ways(machine: Machine, at: Position) -> list[tuple[int, bytes, Position]]:
    """The shortest ways within the frame of `at` to what changes it: (rank, text, position)."""
    found: dict[int, tuple[int, bytes, Position]] = {}
    seen, waiting = {at.state}, [(b"", at)]
    for text, place in waiting:
        for byte in _bytes(machine, place.state):
            after = machine.step(place, byte)
            if after.dead:
                continue
            rank = _rank(machine, at, after)
            if rank is not None:
                found.setdefault(rank, (rank, text + bytes([byte]), after))
            elif after.state not in seen:
                seen.add(after.state)
                waiting.append((text + bytes([byte]), after))
    return list(found.values())


def _rank(machine: Machine, before: Position, after: Position) -> int | None:
    """How good a change is: an end, a member that was not used, an inner frame, one more member; None for no change."""
    old, new = before.stack[-1], after.stack[-1]
    if len(after.stack) < len(before.stack) or machine.ended(after):
        return 0
    if len(after.stack) > len(before.stack):
        return 2
    return None if new == old else 1 if new.used != old.used else 3


@cache
def _bytes(machine: Machine, state: int) -> tuple[int, ...]:
    """One byte of each different edge of a state, printable where that can be."""
    order = [*range(0x20, 0x7F), *range(0x20), *range(0x7F, 256)]
    row = machine.edges[state][order]
    _, first = np.unique(row, return_index=True)
    return tuple(order[i] for i in sorted(first.tolist()) if row[i])
