"""Conversations on their way to disk: the device copies groups of pages, a thread writes them, memory stays bounded.

A conversation stays where it is, and can be hit, until the last of its rows is on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from zllm_jax.buffers import RowLayout, tokens_of
from zllm_jax.cache.residents import Resident
from zllm_jax.cache.snapshot import SnapshotInfo, SnapshotStore, SnapshotWriter
from zllm_jax.errors import CacheError

if TYPE_CHECKING:
    from zllm_jax.runtime import Backend

log = logging.getLogger(__name__)

IN_FLIGHT_BYTES = 64 << 20  # copied out of the device and not yet given to the store
Meta = Mapping[str, Any]


@dataclass(frozen=True)
class Saved:
    """How the save of a conversation ended: `info`, or the error."""

    one: Resident
    info: SnapshotInfo | None
    error: CacheError | None
    seconds: float
    bytes_written: int


@dataclass(frozen=True)
class _Group:
    """Pages of one stage that hold rows which are not on disk yet; pages empty: the stage's fixed arrays."""

    stage: int
    start: int
    pages: Sequence[int]


@dataclass(eq=False)
class _Job:
    """One save. The device's thread takes from `todo`, the writing thread counts down `left`."""

    one: Resident
    meta: Meta
    writer: SnapshotWriter
    todo: deque[_Group]
    left: int
    started: float = field(default_factory=time.perf_counter)
    info: SnapshotInfo | None = None
    error: CacheError | None = None


class Saver:
    """Writes conversations in the background. `begin` and `advance` belong to the device's thread.

    wake: called from the writing thread when `advance` may get further.
    """

    def __init__(
        self, backend: Backend, store: SnapshotStore, wake: Callable[[], None], budget_bytes: int = IN_FLIGHT_BYTES
    ) -> None:
        self._backend, self._store, self._wake, self._budget = backend, store, wake, budget_bytes
        self._layout: RowLayout = backend.row_layout
        self._jobs: dict[str, _Job] = {}
        self._queue: SimpleQueue[tuple[_Job, _Group, Mapping[str, Any], int] | None] = SimpleQueue()
        self._finished: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._in_flight = 0
        self._events = 0
        self._thread = threading.Thread(target=self._run, name="zllm-saver", daemon=True)
        self._thread.start()

    def __contains__(self, one: Resident) -> bool:
        return one.id in self._jobs

    @property
    def pending(self) -> int:
        """Saves under way."""
        return len(self._jobs)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes copied out of the device that the store does not have yet."""
        return self._in_flight

    def begin(self, one: Resident, meta: Meta) -> None:
        """Start to save a conversation. Raises CacheError when the store does not take it."""
        writer = self._store.writer(one.tokens, self._layout, base=one.base, tenant=one.tenant, meta=meta)
        groups = deque(self._groups(one, writer.spans))
        job = self._jobs[one.id] = _Job(one, meta, writer, groups, max(1, len(groups)))
        if not groups:  # all of it is on disk already
            self._queue.put((job, _Group(0, 0, ()), {}, 0))

    def advance(self) -> list[Saved]:
        """Let the device copy as much as memory allows; what has ended since the last call."""
        for job in self._jobs.values():
            while job.todo and job.error is None and self._in_flight < self._budget:
                self._dispatch(job, job.todo[0])
            if job.error is not None and job.todo:
                given_up = len(job.todo)
                job.todo.clear()
                self._count(job, given_up)
        return self._collect()

    def wait(self) -> None:
        """Until the writing thread got further since the last `advance`."""
        with self._changed:
            self._changed.wait_for(lambda: self._events > 0)

    def close(self) -> None:
        """End the thread; saves under way are given up, and nothing of them stays."""
        self._queue.put(None)
        self._thread.join()
        for job in self._jobs.values():
            job.writer.abort()

    def _groups(self, one: Resident, spans: Sequence[tuple[int, int]]) -> list[_Group]:
        c = self._backend.capacity
        per_group = c.group_tokens // c.page_tokens
        wanted = sorted(
            {i for start, stop in spans for i in range(start // c.group_tokens, -(-stop // c.group_tokens))}
        )
        groups = [
            _Group(stage, i * c.group_tokens, one.pages[i * per_group : (i + 1) * per_group])
            for i in wanted
            for stage in range(c.num_stages)
        ]
        if any(spec.token_axis is None for spec in self._layout.values()):
            groups += [_Group(stage, 0, ()) for stage in range(c.num_stages)]
        return groups

    def _dispatch(self, job: _Job, group: _Group) -> None:
        if not job.one.here:  # a longer conversation took its place: its pages may be another's by now
            job.error = CacheError("a longer conversation took its place")
            return
        try:
            rows = self._read(job.one, group)
        except Exception as error:  # the save has failed; whoever uses the device next finds out for itself
            job.error = CacheError(f"its rows could not be read: {error}")
            return
        job.todo.popleft()
        nbytes = sum(int(array.nbytes) for array in rows.values())
        with self._changed:
            self._in_flight += nbytes
        self._queue.put((job, group, rows, nbytes))

    def _read(self, one: Resident, group: _Group) -> Mapping[str, Any]:
        if group.pages:
            return self._backend.read_pages(group.stage, group.pages)
        assert one.ring is not None
        return self._backend.read_ring(group.stage, one.ring)

    def _collect(self) -> list[Saved]:
        with self._changed:
            finished, self._events = list(self._finished), 0
            self._finished.clear()
        out = []
        for job in finished:
            del self._jobs[job.one.id]
            seconds = time.perf_counter() - job.started
            out.append(Saved(job.one, job.info, job.error, seconds, job.writer.bytes_written))
        return out

    # -- the writing thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            job, group, rows, nbytes = item
            if job.error is None:
                try:
                    self._put(job, group, rows)
                except CacheError as error:
                    job.error = error
                except Exception as error:
                    log.exception("a save failed")
                    job.error = CacheError(f"{type(error).__name__}: {error}")
            del item, rows
            with self._changed:
                self._in_flight -= nbytes
            self._count(job, 1)

    def _put(self, job: _Job, group: _Group, rows: Mapping[str, Any]) -> None:
        if not group.pages:
            if rows:
                job.writer.put_fixed(group.stage, {name: np.asarray(array) for name, array in rows.items()})
            return
        arrays = {name: np.asarray(array) for name, array in rows.items()}
        end = group.start + self._backend.capacity.group_tokens
        for start, stop in job.writer.spans:
            start, stop = max(start, group.start), min(stop, end)
            if start < stop:
                part = {
                    name: tokens_of(array, self._layout[name], start - group.start, stop - group.start)
                    for name, array in arrays.items()
                }
                job.writer.put(start, stop, group.stage, part)

    def _count(self, job: _Job, groups: int) -> None:
        """Note that so many groups are dealt with; after the last one commit, or undo."""
        with self._changed:
            job.left -= groups
            last = job.left == 0
        if last:
            self._end(job)
        with self._changed:
            self._events += 1
            self._changed.notify_all()
        self._wake()

    def _end(self, job: _Job) -> None:
        try:
            if job.error is None:
                job.info = job.writer.commit()
        except CacheError as error:
            job.error = error
        except Exception as error:
            log.exception("a save failed")
            job.error = CacheError(f"{type(error).__name__}: {error}")
        if job.error is not None:
            job.writer.abort()
        with self._changed:
            self._finished.append(job)
