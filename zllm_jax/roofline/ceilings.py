"""Measured ceilings of this machine: memory copy and one plain file's write and read. Medians; no jax."""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zllm_jax.errors import StoreUnavailable

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DiskRates:
    """Bytes a second of one plain file. `cold_read` is None where the page cache could not be dropped."""

    write_bytes_s: float
    read_bytes_s: float
    cold_read_bytes_s: float | None
    file_bytes: int


def copy_rate(num_bytes: int = 256 * MIB, *, threads: int | None = None, repeats: int = 5) -> float:
    """Bytes copied a second, each byte counted once, with one numpy copy a thread over halves of one buffer.

    num_bytes must exceed the last-level cache. threads: None tries one and one a core, and takes the better median.
    """
    source = np.ones(num_bytes, np.uint8)
    target = np.zeros(num_bytes, np.uint8)  # both written once: first-touch faults are not part of a copy
    counts = (threads,) if threads else tuple(sorted({1, os.cpu_count() or 1}))

    def rate(count: int) -> float:
        borders = [num_bytes * i // count for i in range(count + 1)]
        parts = list(itertools.pairwise(borders))

        def copy(part: tuple[int, int]) -> None:
            np.copyto(target[part[0] : part[1]], source[part[0] : part[1]])

        with ThreadPoolExecutor(count) as pool:
            return num_bytes / median_seconds(lambda: list(pool.map(copy, parts)), repeats)

    return max(rate(count) for count in counts)


def disk_rates(folder: str | Path, num_bytes: int = 128 * MIB, *, repeats: int = 3) -> DiskRates:
    """Write one plain file (data and folder fsynced), read it back warm, and read it after dropping its pages.

    The file lies in `folder` (made if absent) and is removed. Raises `StoreUnavailable` naming the folder.
    """
    folder = Path(folder)
    payload = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)  # random: no disk compresses it away
    buffer = np.empty(num_bytes, np.uint8)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".rate-") as scratch:
            path = Path(scratch) / "plain"

            def write() -> None:
                with open(path, "wb", buffering=0) as file:
                    _write_all(file.fileno(), payload.data)
                    os.fsync(file.fileno())
                _sync_folder(path.parent)

            def read() -> None:
                with open(path, "rb", buffering=0) as file:
                    view = buffer.data
                    while view and (count := file.readinto(view)):
                        view = view[count:]

            write_s = median_seconds(write, repeats)
            read_s = median_seconds(read, repeats)
            dropped = drop_page_cache(path)
            cold_s = median_seconds(read, repeats, before=lambda: drop_page_cache(path)) if dropped else None
    except OSError as error:
        raise StoreUnavailable(f"{folder}: its disk rates cannot be measured ({error.strerror or error})") from error
    return DiskRates(
        write_bytes_s=num_bytes / write_s,
        read_bytes_s=num_bytes / read_s,
        cold_read_bytes_s=num_bytes / cold_s if cold_s else None,
        file_bytes=num_bytes,
    )


def drop_page_cache(path: str | Path) -> bool:
    """Ask the system to forget a file's cached pages. False where it has no such call or refuses."""
    if not hasattr(os, "posix_fadvise"):
        return False
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages are not dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def median_seconds(run: Callable[[], object], repeats: int, *, before: Callable[[], object] | None = None) -> float:
    """Median wall seconds of `run`, after one run that is not counted; `before` runs ahead of each, untimed."""
    times = []
    for _ in range(repeats + 1):
        if before:
            before()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
