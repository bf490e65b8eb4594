"""What to run next: a pure function of the sequences. No device, no clock, no locks.

Continuous batching with chunked prefill: every round runs at most one chunk of one prompt and one decode call for all
sequences that have a token to feed, so that a long prompt delays running streams by one chunk at most.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from zllm_jax.scheduler.sequence import Sequence


@dataclass(frozen=True)
class Plan:
    """One round: a chunk of `prefill` (tokens start .. stop of its prompt), then `steps` decode steps of `decode`."""

    prefill: Sequence | None
    start: int
    stop: int
    decode: tuple[Sequence, ...]
    steps: int


def plan(running: Sequences[Sequence], chunk_sizes: Sequences[int], decode_steps: int, waiting: bool) -> Plan:
    """The next round. With requests `waiting` or a prompt unfinished, decode goes one step at a time."""
    unfinished = [one for one in running if one.prefilling]
    decode = tuple(one for one in running if not one.prefilling and one.left > 0)
    single = waiting or bool(unfinished) or any(one.job.single_step for one in decode)
    steps = 1 if single else decode_steps
    if not unfinished:
        return Plan(None, 0, 0, decode, steps)
    first = unfinished[0]
    size = chunk_size(first.prompt_tokens - first.computed, chunk_sizes)
    return Plan(first, first.computed, first.computed + size, decode, steps)


def chunk_size(remaining: int, sizes: Sequences[int]) -> int:
    """How many of `remaining` tokens the next chunk takes.

    The smallest size that holds them all, unless smaller chunks would compute at most half as many padded rows.
    With sizes 32, 128, 512: 40 -> 32 (then 8 more), 100 -> 100 in a chunk of 128, 700 -> 512.
    """
    larger = [size for size in sizes if size >= remaining]
    if not larger:
        return sizes[-1]
    smaller = [size for size in sizes if size < larger[0]]
    if smaller and 2 * _rounded_up(remaining, smaller[-1]) <= larger[0]:
        return smaller[-1]
    return remaining


def _rounded_up(count: int, size: int) -> int:
    return -(-count // size) * size
