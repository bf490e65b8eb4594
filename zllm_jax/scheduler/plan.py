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
    """One round: a chunk of `prefill`, its tokens start .. stop, then `steps` decode steps of `decode`.

    Of the chunk, stages first_stage .. last_stage.
    """

    prefill: Sequence | None
    start: int
    stop: int
    first_stage: int
    last_stage: int
    decode: tuple[Sequence, ...]
    steps: int

    @property
    def idle(self) -> bool:
        return self.prefill is None and not self.decode


def plan(
    running: Sequences[Sequence],
    chunk_sizes: Sequences[int],
    *,
    num_stages: int,
    decode_steps: int,
    waiting: bool,
    stride: int = 0,
) -> Plan:
    """The next round, `running` in the order of their turns.

    A stage of a prompt's first chunk can run once its restored rows are there. What is forced in a running stream goes
    before all prompts. With requests `waiting` or a chunk to come, decode goes one step at a time. stride: chunks end
    at its multiples, where states are kept (0: none).
    """
    unfinished = sorted((one for one in running if one.prefilling), key=lambda one: not one.drawn)
    decode = tuple(one for one in running if not one.prefilling and one.left > 0)
    single = waiting or bool(unfinished) or any(one.job.single_step for one in decode)
    steps = 1 if single else decode_steps
    for one in unfinished:
        ready = one.stages_ready(num_stages)
        if ready > one.stage:
            left = one.known_tokens - one.computed
            size = chunk_size(min(left, stride - one.computed % stride) if stride else left, chunk_sizes)
            return Plan(one, one.computed, one.computed + size, one.stage, ready, decode, steps)
    return Plan(None, 0, 0, 0, 0, decode, steps)


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
