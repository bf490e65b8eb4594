"""A snapshot on its way into pages: stage by stage, read and verified by threads, copied by the device meanwhile.

Nothing here blocks the thread that owns the device. What a stage computes needs only that stage's own rows.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zllm_jax.buffers import ALIGNMENT, RowLayout, RowSpec, aligned_copy, aligned_empty
from zllm_jax.cache.snapshot_layout import stages_of
from zllm_jax.cache.snapshot_reader import Filling, SnapshotReader
from zllm_jax.errors import StoreStalled, StoreUnavailable

if TYPE_CHECKING:
    from zllm_jax.runtime import Backend, Copying

NUM_ROOMS = 4
STALL_S = 10.0  # without any progress, a prompt is better computed
Room = NDArray[np.uint8]


class Rooms:
    """Host memory that all restores share, each room for one group of tokens of any stage; allocated once."""

    def __init__(self, layout: RowLayout, group_tokens: int, count: int = NUM_ROOMS) -> None:
        self._group_tokens = group_tokens
        self._stages = stages_of(layout, group_tokens)
        self._free: list[Room] = []
        self._left = count
        self.in_use = 0  # rooms that restores hold; one that is being copied from is on its way home
        self.given_back = 0  # so often
        self._copying: list[tuple[Copying, Room]] = []
        self._lock = threading.Lock()

    def take(self, *, wait: bool = False) -> Room | None:
        """A room that nobody reads or writes, or None while there is none. wait: for a copy that is under way."""
        with self._lock:
            if wait and not self._free and not self._left and self._copying:
                self._copying[0][0].wait()
            busy = []
            for copying, room in self._copying:
                if copying.done():
                    self._free.append(room)
                else:
                    busy.append((copying, room))
            self._copying = busy
            if not self._free and self._left:
                self._free.append(self._room())
                self._left -= 1
            self.in_use += bool(self._free)
            return self._free.pop() if self._free else None

    def _room(self) -> Room:
        nbytes = max(map(self._nbytes, range(len(self._stages))))
        try:
            return aligned_empty([nbytes], np.uint8)
        except MemoryError as error:
            raise StoreUnavailable(f"no memory for the {nbytes} bytes that a restore reads into at a time") from error

    def give(self, room: Room, copying: Copying | None = None) -> None:
        """Return a room; it is free once the device has copied from it."""
        with self._lock:
            self.in_use -= 1
            self.given_back += 1
            if copying is None:
                self._free.append(room)
            else:
                self._copying.append((copying, room))

    def settle(self) -> None:
        """Wait for the copies under way."""
        with self._lock:
            for copying, _ in self._copying:
                copying.wait()

    def arrays(self, room: Room, stage: int) -> dict[str, NDArray[Any]]:
        """The stage's token arrays, a group of tokens each, in the room."""
        found, at = {}, 0
        for name, spec in self._stages[stage].paged:
            shape = self._shape(spec)
            nbytes = int(np.prod(shape)) * spec.dtype.itemsize
            found[name] = room[at : at + nbytes].view(spec.dtype).reshape(shape)
            at += _aligned(nbytes)
        return found

    def _shape(self, spec: RowSpec) -> list[int]:
        return [self._group_tokens if size is None else size for size in spec.shape]

    def _nbytes(self, stage: int) -> int:
        return sum(
            _aligned(int(np.prod(self._shape(one))) * one.dtype.itemsize) for _, one in self._stages[stage].paged
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class _Group:
    """Tokens [start, stop) of one stage and the pages they belong to."""

    stage: int
    start: int
    stop: int
    pages: Sequence[int]


class Restoring:
    """The rows of one snapshot under way to `pages` and `ring`. Only the device's thread calls it.

    open_reader: run on one of `threads`; opens and checks the snapshot. num_tokens: how many rows are wanted.
    wake: called from any thread when `advance` may get further. staged: stages are ready one by one, else all at once.
    bytes_copied: to the device.
    """

    def __init__(
        self,
        backend: Backend,
        rooms: Rooms,
        threads: ThreadPoolExecutor,
        open_reader: Callable[[], SnapshotReader],
        pages: Sequence[int],
        ring: int,
        num_tokens: int,
        wake: Callable[[], None],
        staged: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backend, self._rooms, self._threads, self._wake = backend, rooms, threads, wake
        self._staged = staged
        self._ring = ring
        self._todo = deque(_groups(backend, pages, num_tokens))
        self._left = [sum(group.stage == stage for group in self._todo) for stage in range(self.num_stages)]
        self._filling: deque[tuple[Filling, Room, _Group]] = deque()
        self._rings: deque[Future[Mapping[str, NDArray[Any]]]] = deque()
        self._reader: SnapshotReader | None = None
        self._stages_there = 0
        self.bytes_copied = 0
        self._clock, self._moved = clock, clock()
        self._came_to: tuple[int, ...] = ()
        self._closing: Future[None] | None = None
        self._opening = threads.submit(open_reader)
        self._opening.add_done_callback(lambda _: wake())

    @property
    def num_stages(self) -> int:
        return self._backend.capacity.num_stages

    @property
    def stages_ready(self) -> int:
        """So many stages have all their rows on the device, or on their way there before whatever is called next."""
        return self._stages_there if self._staged or self.done else 0

    @property
    def done(self) -> bool:
        return self._stages_there == self.num_stages

    @property
    def stalls_at(self) -> float:
        """When, by the clock, `advance` gives up if nothing happens until then."""
        return self._moved + STALL_S

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read if self._reader is not None else 0

    def advance(self, limit: int | None = None) -> None:
        """Hand what has been read to the device, at most `limit` groups, and read on.

        Raises CacheError when the snapshot cannot be restored: `close` it then, the pages hold anything.
        """
        self._advance(limit)
        before, self._came_to = self._came_to, self._progress()
        if self._came_to != before:
            self._moved = self._clock()
        elif not self.done and self._clock() >= self.stalls_at:
            raise StoreStalled(f"nothing of a snapshot could be read for {STALL_S:.0f} s: look at the disk")

    def _progress(self) -> tuple[int, ...]:
        """What differs once something has happened; to one that waits for rooms, also what others do with them."""
        others = 0 if self._filling or not self._todo else self._rooms.given_back
        return self._reader is not None, self._stages_there, sum(self._left), len(self._filling), others

    def _advance(self, limit: int | None) -> None:
        if self._reader is None:
            if not self._opening.done():
                return
            self._reader = self._opening.result()
            if self._backend.capacity.ring_bytes:
                self._rings.extend(self._fixed_of(self._reader, stage) for stage in range(self.num_stages))
        while self._filling and self._filling[0][0].done() and limit != 0:
            self._copy(*self._filling.popleft())
            limit = limit - 1 if limit is not None else None
        while not self.done and self._left[self._stages_there] == 0 and self._put_ring():
            self._stages_there += 1
        self._fill(self._reader)

    def close(self) -> None:
        """Stop, whatever is under way; threads end it. `wait_closed` says when nothing of it is left."""
        if self._closing is None:
            self._closing = self._threads.submit(self._end)

    def wait_closed(self) -> None:
        if self._closing is not None:
            self._closing.result()

    def _fixed_of(self, reader: SnapshotReader, stage: int) -> Future[Mapping[str, NDArray[Any]]]:
        future: Future[Mapping[str, NDArray[Any]]] = self._threads.submit(reader.fixed, stage)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _fill(self, reader: SnapshotReader) -> None:
        while self._todo and (room := self._rooms.take(wait=not self._filling)) is not None:
            group = self._todo.popleft()
            try:
                filling = reader.fill(group.stage, group.start, group.stop, self._rooms.arrays(room, group.stage))
            except BaseException:
                self._rooms.give(room)
                raise
            self._filling.append((filling, room, group))
            filling.on_done(self._wake)

    def _copy(self, filling: Filling, room: Room, group: _Group) -> None:
        try:
            filling.wait()
            copying = self._backend.write_pages(group.stage, self._rooms.arrays(room, group.stage), group.pages)
        except BaseException:
            self._rooms.give(room)
            raise
        self._rooms.give(room, copying)
        self._left[group.stage] -= 1
        self.bytes_copied += sum(array.nbytes for array in self._rooms.arrays(room, group.stage).values())

    def _put_ring(self) -> bool:
        """The fixed arrays of the next stage to the device; False while they are being read."""
        if not self._rings:
            return True
        if not self._rings[0].done():
            return False
        rows = {name: aligned_copy(array) for name, array in self._rings.popleft().result().items()}
        if rows:
            self._backend.write_ring(self._stages_there, rows, self._ring)
            self.bytes_copied += sum(array.nbytes for array in rows.values())
        return True

    def _end(self) -> None:
        with suppress(Exception):  # the failure, if any, has been raised by `advance`
            self._opening.result().close()
        while self._filling:
            self._rooms.give(self._filling.popleft()[1])
        self._wake()  # another restore may have waited for these rooms


def _groups(backend: Backend, pages: Sequence[int], num_tokens: int) -> list[_Group]:
    c = backend.capacity
    per_group = c.group_tokens // c.page_tokens
    return [
        _Group(
            stage,
            first * c.page_tokens,
            min(num_tokens, (first + per_group) * c.page_tokens),
            pages[first : first + per_group],
        )
        for stage in range(c.num_stages)
        for first in range(0, len(pages), per_group)
    ]
