"""Sequences by hand: what the scheduler does with a cache and a device, one call after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zllm_jax.cache import Lease, PrefixCache, SnapshotStore
from zllm_jax.runtime import Chunk, Row
from zllm_jax.testing import ScriptedBackend, chained_token
from zllm_jax.values import Sampling, Tier

GREEDY = Sampling(temperature=0.0)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Tokens that no other seed's prompt begins with."""
    return [seed % 256, *np.random.default_rng(seed).integers(0, 256, num_tokens - 1).tolist()]


def continuation(tokens: Sequence[int], num_tokens: int) -> list[int]:
    """What a scripted device answers, computed without one."""
    history = list(tokens)
    for _ in range(num_tokens):
        history.append(chained_token(history, GREEDY, 0))
    return history[len(tokens) :]


def open_store(root: Path, **options: Any) -> SnapshotStore:
    return SnapshotStore(root, **{"namespace": "scripted", "chunk_tokens": 8, **options})


@dataclass
class Turn:
    """One sequence under way, prompt computed and its first token drawn."""

    prompt: list[int]
    lease: Lease
    max_tokens: int
    output: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        """The tokens whose rows the state holds: the last drawn one was not fed."""
        return [*self.prompt, *self.output[:-1]]


class Driver:
    """A cache over a scripted device; its `start`, `step` and `finish` are a scheduler's, without the waiting."""

    def __init__(self, backend: ScriptedBackend, store: SnapshotStore | None = None) -> None:
        self.backend, self.cache = backend, PrefixCache(backend, store)

    def start(self, tokens: Sequence[int], max_tokens: int = 8, *, look_up: bool = True) -> Turn | None:
        lease = self.cache.acquire(np.array(tokens, np.int32), max_tokens, look_up=look_up)
        if lease is None:
            return None
        turn = Turn(list(tokens), lease, max_tokens)
        largest = self.backend.capacity.chunk_sizes[-1]
        for start in range(lease.cached_tokens, len(tokens), largest):
            drawn = self.backend.prefill(
                Chunk(
                    tokens=turn.prompt[start : start + largest],
                    start=start,
                    pages=lease.pages,
                    ring=lease.ring,
                    slot=0,
                    sampling=GREEDY,
                    seed=0,
                    last=start + largest >= len(tokens),
                )
            )
        assert drawn is not None
        turn.output.append(drawn.token)
        return turn

    def step(self, turn: Turn, num_tokens: int) -> None:
        row = Row(
            token=turn.output[-1],
            position=len(turn.rows),
            pages=turn.lease.pages,
            ring=turn.lease.ring,
            slot=0,
            sampling=GREEDY,
            seed=0,
            budget=turn.max_tokens - len(turn.output),
            stop_ids=(),
        )
        (drawn,) = self.backend.decode([row], num_tokens)
        turn.output += [one.token for one in drawn]

    def finish(self, turn: Turn) -> str | None:
        return self.cache.finish(turn.lease, np.array(turn.rows, np.int32))

    def run(self, tokens: Sequence[int], num_tokens: int = 8, **options: Any) -> Turn:
        """A whole turn, whose output is that of a device which never cached anything."""
        turn = self.start(tokens, num_tokens, **options)
        assert turn is not None
        self.step(turn, num_tokens)
        assert turn.output == continuation(tokens, num_tokens)
        self.finish(turn)
        return turn

    def hit(self, tokens: Sequence[int]) -> tuple[Tier, int]:
        """From where, and how much of a prompt comes from the cache; nothing of the turn is kept."""
        turn = self.start(tokens)
        assert turn is not None
        assert turn.output == continuation(tokens, 1)
        self.cache.abort(turn.lease)
        return turn.lease.tier, turn.lease.cached_tokens

    def assert_all_home(self) -> None:
        """Without residents and leases, everything is free."""
        self.cache.forget()
        report = self.cache.report()
        assert report["pages"]["free"] == report["pages"]["total"] == self.backend.capacity.num_pages
        assert report["rings"]["free"] == report["rings"]["total"]
        assert report["device_bytes"] == 0
