"""Sequences by hand: what the scheduler does with a cache and a device, one call after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zllm_jax.buffers import tokens_of
from zllm_jax.cache import Lease, PrefixCache, SnapshotStore
from zllm_jax.errors import CacheError
from zllm_jax.runtime import Chunk, Row
from zllm_jax.testing import ScriptedBackend, chained_token
from zllm_jax.values import Sampling, Tier

GREEDY = Sampling(temperature=0.0)
PATIENCE_S = 20.0


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


def rows_of(backend: ScriptedBackend, pages: Sequence[int], ring: int, num_tokens: int) -> dict[str, np.ndarray]:
    """A state as logical rows on the host: the first tokens of its arrays, and its fixed ones."""
    c, layout = backend.capacity, backend.row_layout
    per_group = c.group_tokens // c.page_tokens
    parts: dict[str, list[np.ndarray]] = {}
    for first in range(0, len(pages), per_group):
        group = list(pages[first : first + per_group])
        for stage in range(c.num_stages):
            for name, array in backend.read_pages(stage, group).items():
                parts.setdefault(name, []).append(tokens_of(array, layout[name], 0, len(group) * c.page_tokens))
    found = {name: np.concatenate(arrays, layout[name].token_axis) for name, arrays in parts.items()}
    found = {name: tokens_of(array, layout[name], 0, num_tokens) for name, array in found.items()}
    for stage in range(c.num_stages):
        found |= backend.read_ring(stage, ring)
    return found


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

    def __init__(self, backend: ScriptedBackend, store: SnapshotStore | None = None, **options: Any) -> None:
        self.backend, self.cache = backend, PrefixCache(backend, store, **options)
        self._woken = threading.Event()
        self.cache.wake = self._woken.set

    def acquire(self, tokens: Sequence[int], max_tokens: int = 8, **options: Any) -> Lease | None:
        """A lease whose rows are all there; a snapshot that fails is looked up again. None: others hold the memory."""
        while True:
            self._woken.clear()
            self.cache.advance()
            lease = self.cache.acquire(np.array(tokens, np.int32), max_tokens, **options)
            if lease is None and not self.cache.report()["saving"]:
                return None
            if lease is not None and self._restored(lease):
                return lease
            if lease is None:
                assert self._woken.wait(PATIENCE_S), "nothing got further"

    def _restored(self, lease: Lease) -> bool:
        while lease.restoring is not None:
            self._woken.clear()
            try:
                lease.restoring.advance()
            except CacheError as error:
                self.cache.failed(lease, error)
                return False
            except BaseException:
                self.cache.abort(lease)
                raise
            if lease.restoring.done:
                self.cache.restored(lease)
                self.cache.measured(lease, 1e-3)
            else:
                assert self._woken.wait(PATIENCE_S), "the restore got no further"
        return True

    def start(self, tokens: Sequence[int], max_tokens: int = 8, **options: Any) -> Turn | None:
        lease = self.acquire(tokens, max_tokens, **options)
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

    def rows(self, lease: Lease, num_tokens: int) -> dict[str, np.ndarray]:
        """The first rows of a lease, and its ring, as the device holds them."""
        used = -(-num_tokens // self.backend.capacity.page_tokens)
        return rows_of(self.backend, lease.pages[:used], lease.ring, num_tokens)

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

    def spoil(self) -> None:
        """What is free on the device may hold anything."""
        for stage in self.backend._stages:
            stage.pages[:] = -7
            stage.rings[:] = -7

    def settle(self) -> None:
        """Wait until what was taken out of the second tier is gone from the disk."""
        if self.cache._snapshots is not None:
            self.cache._snapshots.settle()

    def close(self) -> None:
        self.cache.close()

    def assert_all_home(self) -> None:
        """Without residents and leases, everything is free."""
        self.cache.forget()
        report = self.cache.report()
        assert report["pages"]["free"] == report["pages"]["total"] == self.backend.capacity.num_pages
        assert report["rings"]["free"] == report["rings"]["total"]
        assert report["device_bytes"] == 0
