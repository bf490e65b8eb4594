"""Conversations on their way to disk: the device copies groups of pages, a thread writes them, memory stays bounded.

A conversation stays where it is, and can be hit, until the last of its rows is on disk. All that touches the store,
which may be slow or locked by another process, happens on the writing thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from zllm_jax.buffers import RowLayout, tokens_of
from zllm_jax.cache.residents import Resident
from zllm_jax.cache.snapshot import Base, SnapshotInfo, SnapshotStore, SnapshotWriter
from zllm_jax.errors import CacheError

if TYPE_CHECKING:
    from zllm_jax.runtime import Backend

log = logging.getLogger(__name__)

IN_FLIGHT_BYTES = 64 << 20  # copied out of the device and not yet given to the store
HANG_S = 30.0  # without any progress, memory is worth more than what could be saved
Meta = Mapping[str, Any]


@dataclass(frozen=True)
class Saved:
    """How the save of a conversation ended: `info`, or the error. unwanted: it was given up, too late perhaps."""

    one: Resident
    info: SnapshotInfo | None
    error: CacheError | None
    seconds: float
    bytes_written: int
    unwanted: bool


@dataclass(frozen=True)
class _Group:
    """Pages of one stage that hold rows which are not on disk yet; pages empty: the stage's fixed arrays."""

    stage: int
    start: int
    pages: Sequence[int]


@dataclass(eq=False)
class _Job:
    """One save. The writing thread opens `writer` and fills `todo`, from which the device's thread takes, and counts
    down `left`.
    """

    one: Resident
    base: Base | None
    writer: SnapshotWriter | None = None
    todo: deque[_Group] = field(default_factory=deque)
    left: int = 1  # the opening
    started: float = field(default_factory=time.perf_counter)
    info: SnapshotInfo | None = None
    error: CacheError | None = None
    unwanted: bool = False


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
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._finished: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._in_flight = 0
        self._events = 0
        self._given = 0  # pieces of work that the writing thread has not done yet
        self._moved = time.perf_counter()
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

    @property
    def hangs_at(self) -> float | None:
        """When (`time.perf_counter`) the store must be taken to hang if nothing happens until then; None when idle."""
        return self._moved + HANG_S if self._given else None

    @property
    def hangs(self) -> bool:
        at = self.hangs_at
        return at is not None and time.perf_counter() >= at

    def begin(self, one: Resident, meta: Meta) -> None:
        """Start to save a conversation."""
        job = self._jobs[one.id] = _Job(one, one.base)
        self._give(partial(self._open, job, meta))

    def advance(self) -> list[Saved]:
        """Let the device copy as much as memory allows; what has ended since the last call."""
        with self._changed:
            self._events = 0  # first: what happens from here on is for the next call
        for job in self._jobs.values():
            while job.todo and job.error is None and self._in_flight < self._budget:
                self._dispatch(job, job.todo[0])
            if job.error is not None and job.todo:
                self._give(partial(self._count, job, len(job.todo)))
                job.todo.clear()
        return self._collect()

    def wait(self) -> None:
        """Until the writing thread got further since the last `advance`, or the store hangs."""
        with self._changed:
            while not self._events:
                at = self.hangs_at
                if at is not None and at <= time.perf_counter():
                    return
                self._changed.wait(None if at is None else at - time.perf_counter())

    def give_up(self) -> None:
        """Nothing that is under way is wanted any more."""
        for job in self._jobs.values():
            job.unwanted, job.error = True, job.error or CacheError("it is not wanted any more")

    def close(self) -> None:
        """End the thread; saves under way are given up, and nothing of them stays, unless the store hangs."""
        self.give_up()
        self._queue.put(None)
        self._thread.join(HANG_S)
        if self._thread.is_alive():
            log.warning("%s takes nothing: what is half written there is collected at a later start", self._store.where)
            return
        for job in self._jobs.values():
            if job.writer is not None:
                job.writer.abort()

    def _give(self, work: Callable[[], None]) -> None:
        """To the writing thread."""
        with self._changed:
            if not self._given:
                self._moved = time.perf_counter()
            self._given += 1
        self._queue.put(work)

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
        if not job.one.here:  # its pages may be another's by now
            job.error = CacheError("it has left device memory")
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
        self._give(partial(self._take, job, group, rows, nbytes))

    def _read(self, one: Resident, group: _Group) -> dict[str, Any]:
        if group.pages:
            return dict(self._backend.read_pages(group.stage, group.pages))
        assert one.ring is not None
        return dict(self._backend.read_ring(group.stage, one.ring))

    def _collect(self) -> list[Saved]:
        with self._changed:
            finished = list(self._finished)
            self._finished.clear()
        out = []
        for job in finished:
            del self._jobs[job.one.id]
            seconds = time.perf_counter() - job.started
            written = job.writer.bytes_written if job.writer is not None else 0
            out.append(Saved(job.one, job.info, job.error, seconds, written, job.unwanted))
        return out

    # -- the writing thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # and the rows that it holds
            with self._changed:
                self._given -= 1
                self._moved = time.perf_counter()

    def _open(self, job: _Job, meta: Meta) -> None:
        with self._failure_ends(job):
            try:
                job.writer = self._writer(job, meta)
            except CacheError:
                raise
            except Exception as error:  # what belongs to it is no reason to lose it
                log.warning("conversation %s is saved without its turns: %s", job.one.id, error)
                job.writer = self._writer(job, {})
            groups = self._groups(job.one, job.writer.spans)
            with self._changed:
                job.left += len(groups)
            job.todo.extend(groups)
        self._count(job, 1)

    def _writer(self, job: _Job, meta: Meta) -> SnapshotWriter:
        return self._store.writer(job.one.tokens, self._layout, base=job.base, tenant=job.one.tenant, meta=meta)

    def _take(self, job: _Job, group: _Group, rows: dict[str, Any], nbytes: int) -> None:
        """Give a group of rows to the store."""
        if job.error is None:
            with self._failure_ends(job):
                self._put(job, group, rows)
        rows.clear()
        with self._changed:
            self._in_flight -= nbytes
        self._count(job, 1)

    @contextmanager
    def _failure_ends(self, job: _Job) -> Iterator[None]:
        """A failure is the job's error."""
        try:
            yield
        except CacheError as error:
            job.error = error
        except Exception as error:
            log.exception("a save failed")
            job.error = CacheError(f"{type(error).__name__}: {error}")

    def _put(self, job: _Job, group: _Group, rows: Mapping[str, Any]) -> None:
        assert job.writer is not None
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
        with self._failure_ends(job):
            if job.error is None:
                assert job.writer is not None
                job.info = job.writer.commit()
        if job.error is not None and job.writer is not None:
            job.writer.abort()
        with self._changed:
            self._finished.append(job)
