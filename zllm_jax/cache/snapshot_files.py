"""Where snapshots lie: a folder, or any other key-value store that TensorStore opens, behind the same few verbs.

Paths are `manifests/<id>` and `chunks/<name>`, below one namespace. Writes are atomic and, in a folder, on disk when
they are said to be done: TensorStore writes beside the target, fsyncs, renames, and fsyncs the file's directory. It
does not fsync the parents of directories that it makes, so `write` makes them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from zllm_jax.errors import CacheError, CorruptSnapshot, StoreUnavailable

MANIFESTS, CHUNKS = "manifests", "chunks"
QUARANTINE, LOCK = "quarantine", "lock"
MAX_QUARANTINED = 8
LOCK_WAIT_S = 20.0
LISTING_S = 1.0  # how long a listing of another store than a folder is believed
IOV_MAX = 1024

_OS_CODE = re.compile(r"os_error_code='(\d+)'")
_BROKEN = ("DATA_LOSS", "NOT_FOUND", "INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION")  # without an OS code
_BROKEN_OS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)
_ADVICE = {
    errno.ENOSPC: "free some space, or give the store a smaller quota",
    errno.EDQUOT: "free some space, or give the store a smaller quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EROFS: "choose a store on a file system that can be written",
    errno.EACCES: "make it accessible, or choose another store",
    errno.EPERM: "make it accessible, or choose another store",
    errno.ENOTDIR: "a part of the path is a file: choose another store",
    errno.EEXIST: "a part of the path is a file: choose another store",
}

Blocks = list[NDArray[np.uint8]]
"""C-contiguous memory, filled one after the other."""


@dataclass(frozen=True)
class Stat:
    """Size (-1: not a regular file) and time of a file; None where the store cannot tell."""

    nbytes: int | None
    changed_s: float | None


class Writing(Protocol):
    """A write under way."""

    def wait(self) -> None:
        """Return when it is durable. Raises StoreUnavailable."""


class Files(Protocol):
    """The verbs that a store of snapshots needs. All raise StoreUnavailable; those that read, CorruptSnapshot too."""

    where: str

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep other processes out of here meanwhile, where the store can; not other threads, nor twice in one."""

    def announce(self) -> None:
        """Say, while others are out, that manifests were written or deleted: `changes` becomes another value."""

    def changes(self) -> object:
        """A value that differs from what it was before any process announced something. Cheap."""

    def list(self, folder: str) -> dict[str, Stat]:
        """The files of a folder, by name."""

    def stat(self, path: str) -> Stat | None:
        """None for a file that is not there."""

    def read(self, path: str, max_bytes: int) -> bytes:
        """A small file. Raises CorruptSnapshot when it is missing, larger, or not a file."""

    def read_into(self, path: str, blocks: Blocks) -> None:
        """A file of exactly the blocks' size. Raises CorruptSnapshot when it is missing or has another one."""

    def write(self, path: str, data: bytes | bytearray) -> Writing:
        """Begin to write or replace a file; `data` is free for something else on return."""

    def delete(self, path: str) -> None:
        """Deleting what is not there does nothing."""

    def touch(self, path: str) -> None:
        """Remember that the file was used now, where the store can. Raises nothing."""

    def set_aside(self, paths: Sequence[str], label: str, reason: str) -> str:
        """Take files out of service, keep them for a look where that is possible; says where they went."""

    def drop_page_cache(self, path: str) -> bool:
        """Ask the operating system to forget the file's cached pages; False where it cannot be asked."""


def open_files(root: str | Path, namespace: str) -> Files:
    """`root` is a path, a `file://` URL, or a URL of another TensorStore kvstore such as `memory://` or `s3://b/p`."""
    text = os.fspath(root)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    elif "://" in text:
        return KeyValueFiles(text, namespace)
    return LocalFiles(Path(text).expanduser().absolute() / namespace)


@cache
def context() -> ts.Context:
    """One context for all stores of the process. docs/adr/0004 has the measurements behind the limits."""
    return ts.Context(
        {
            "file_io_concurrency": {"limit": 16},
            "data_copy_concurrency": {"limit": max(2, os.cpu_count() or 2)},
            "cache_pool": {"total_bytes_limit": 0},
        }
    )


@contextmanager
def store_errors(action: str, where: str, *, reading: bool = False) -> Iterator[None]:
    """Turn what the operating system and TensorStore raise into the cache's own errors."""
    try:
        yield
    except CacheError:
        raise
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        code = _os_code(error)
        broken = code in _BROKEN_OS if code is not None else str(error).startswith(_BROKEN)
        if reading and broken:
            raise CorruptSnapshot(f"{where}: {_first_line(error)}", path=where) from error
        advice = _ADVICE.get(code or 0, "check the disk, or switch the second tier off")
        raise StoreUnavailable(f"cannot {action} {where}: {_first_line(error)}; {advice}") from error


def _os_code(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = _OS_CODE.search(str(error))
    return int(found[1]) if found else None


def _first_line(error: Exception) -> str:
    """TensorStore appends whole specs and source locations to its messages: keep what a reader needs."""
    return str(error).split(" [", 1)[0].split("\n", 1)[0][:300] or type(error).__name__


@dataclass(frozen=True)
class _TensorStoreWriting:
    future: Any
    where: str

    def wait(self) -> None:
        with store_errors("write", self.where):
            self.future.result()


class LocalFiles:
    """A folder `root`, with the folders of the paths, `lock`, whose time is the count of changes, and `quarantine`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.where = str(root)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with store_errors("lock", self.where):
            _make_durable(self.root)
            descriptor = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            self._lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        until, pause_s = time.monotonic() + LOCK_WAIT_S, 0.001
        while True:
            with store_errors("lock", f"{self.root}/{LOCK}"), suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() > until:
                raise StoreUnavailable(
                    f"{self.root}/{LOCK} is held by another process for {LOCK_WAIT_S:.0f} s: end it, or wait"
                )
            time.sleep(pause_s)  # a lock of another process can only be waited for with no limit, or asked for again
            pause_s = min(2 * pause_s, 0.05)

    def announce(self) -> None:
        with store_errors("write", f"{self.root}/{LOCK}"):
            path = self.root / LOCK
            now = max(time.time_ns(), path.stat().st_mtime_ns + 1)
            os.utime(path, ns=(now, now))

    def changes(self) -> object:
        with store_errors("read", f"{self.root}/{LOCK}"):
            try:
                return os.stat(self.root / LOCK).st_mtime_ns
            except FileNotFoundError:
                return None

    def list(self, folder: str) -> dict[str, Stat]:
        found = {}
        with store_errors("list", f"{self.root}/{folder}"):
            try:
                with os.scandir(self.root / folder) as entries:
                    for entry in entries:
                        with suppress(FileNotFoundError):  # a file under way is renamed
                            found[entry.name] = _stat(entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                pass
        return found

    def stat(self, path: str) -> Stat | None:
        with store_errors("read", f"{self.root}/{path}"):
            try:
                return _stat(os.lstat(self.root / path))
            except FileNotFoundError:
                return None

    def read(self, path: str, max_bytes: int) -> bytes:
        where = f"{self.root}/{path}"
        with store_errors("read", where, reading=True), open_regular(where) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > max_bytes:
                raise CorruptSnapshot(f"{where} has {size} bytes, at most {max_bytes} are right", path=where)
            return os.pread(descriptor, size, 0)

    def read_into(self, path: str, blocks: Blocks) -> None:
        where, nbytes = f"{self.root}/{path}", sum(block.nbytes for block in blocks)
        with store_errors("read", where, reading=True), open_regular(where) as descriptor:
            size, done = os.fstat(descriptor).st_size, 0
            if size == nbytes:
                for first in range(0, len(blocks), IOV_MAX):
                    done += os.preadv(descriptor, [block.data for block in blocks[first : first + IOV_MAX]], done)
            if done != nbytes:
                raise CorruptSnapshot(f"{where} has {size} bytes, {done} were read of {nbytes}", path=where)

    def write(self, path: str, data: bytes | bytearray) -> Writing:
        folder, _, name = path.rpartition("/")
        with store_errors("write", f"{self.root}/{path}"):
            if not os.path.isdir(self.root / folder):
                _make_durable(self.root / folder)
            return _TensorStoreWriting(self._kvstore(folder).write(name, cast(bytes, data)), f"{self.root}/{path}")

    def _kvstore(self, folder: str) -> ts.KvStore:
        spec = {"driver": "file", "path": f"{self.root}/{folder}/"}
        return ts.KvStore.open(spec, context=context()).result()

    def delete(self, path: str) -> None:
        with store_errors("delete", f"{self.root}/{path}"):
            (self.root / path).unlink(missing_ok=True)

    def touch(self, path: str) -> None:
        with suppress(OSError):  # a store that can only be read still serves
            os.utime(self.root / path)

    def set_aside(self, paths: Sequence[str], label: str, reason: str) -> str:
        quarantine = self.root / QUARANTINE
        target = quarantine / f"{time.time_ns():020}-{label}"
        with store_errors("quarantine", self.where):
            if not any(os.path.lexists(self.root / path) for path in paths):
                return "already gone"
            target.mkdir(parents=True)
            (target / "reason").write_text(reason + "\n", encoding="utf-8")
            moved = 0
            for path in paths:
                with suppress(FileNotFoundError):
                    os.rename(self.root / path, target / path.replace("/", "-"))
                    moved += 1
            if not moved:
                shutil.rmtree(target)
                return "already gone"
            for old in sorted(quarantine.iterdir())[:-MAX_QUARANTINED]:
                shutil.rmtree(old, ignore_errors=True)
        return str(target)

    def drop_page_cache(self, path: str) -> bool:
        if not hasattr(os, "posix_fadvise"):
            return False
        with store_errors("read", f"{self.root}/{path}", reading=True), open_regular(self.root / path) as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return True


class KeyValueFiles:
    """Any other kvstore, with one writing process. It is trusted to be durable; it knows no sizes, times or locks."""

    def __init__(self, url: str, namespace: str) -> None:
        self.where = f"{url}{'' if url.endswith('/') else '/'}{namespace}"
        self._listing: tuple[float, object] = (-LISTING_S, None)
        with store_errors("open", self.where):
            self._kvstore = ts.KvStore.open(f"{self.where}/", context=context()).result()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        yield

    def announce(self) -> None:
        self._listing = (-LISTING_S, None)

    def changes(self) -> object:
        if time.monotonic() - self._listing[0] >= LISTING_S:
            self._listing = (time.monotonic(), frozenset(self.list(MANIFESTS)))
        return self._listing[1]

    def list(self, folder: str) -> dict[str, Stat]:
        with store_errors("list", f"{self.where}/{folder}"):
            within = ts.KvStore.KeyRange(f"{folder}/", f"{folder}0")  # '0' follows '/'
            keys = self._kvstore.list(within, strip_prefix_length=len(folder) + 1).result()
        return {key.decode(errors="replace"): Stat(None, None) for key in keys}

    def stat(self, path: str) -> Stat | None:
        with store_errors("read", f"{self.where}/{path}"):
            keys = self._kvstore.list(ts.KvStore.KeyRange(path, path + "\0")).result()
        return Stat(None, None) if keys else None

    def read(self, path: str, max_bytes: int) -> bytes:
        where = f"{self.where}/{path}"
        with store_errors("read", where, reading=True):
            found = self._kvstore.read(path).result()
        if found.state != "value" or len(found.value) > max_bytes:
            raise CorruptSnapshot(f"{where} is missing or larger than {max_bytes} bytes", path=where)
        return bytes(found.value)

    def read_into(self, path: str, blocks: Blocks) -> None:
        nbytes, done = sum(block.nbytes for block in blocks), 0
        data = np.frombuffer(self.read(path, nbytes), np.uint8)
        if len(data) != nbytes:
            where = f"{self.where}/{path}"
            raise CorruptSnapshot(f"{where} has {len(data)} bytes, {nbytes} are right", path=where)
        for block in blocks:
            block.reshape(-1)[...] = data[done : done + block.nbytes]
            done += block.nbytes

    def write(self, path: str, data: bytes | bytearray) -> Writing:
        with store_errors("write", f"{self.where}/{path}"):
            return _TensorStoreWriting(self._kvstore.write(path, cast(bytes, data)), f"{self.where}/{path}")

    def delete(self, path: str) -> None:
        with store_errors("delete", f"{self.where}/{path}"):
            self._kvstore.write(path, None).result()

    def touch(self, path: str) -> None:
        pass

    def set_aside(self, paths: Sequence[str], label: str, reason: str) -> str:
        for path in paths:
            self.delete(path)
        return "deleted"

    def drop_page_cache(self, path: str) -> bool:
        return False


@contextmanager
def open_regular(path: str | Path) -> Iterator[int]:
    """A descriptor of a regular file, for reading: no link is followed, no pipe waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptSnapshot(f"{path} is not a regular file", path=str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def _stat(found: os.stat_result) -> Stat:
    return Stat(found.st_size if stat.S_ISREG(found.st_mode) else -1, found.st_mtime)


def _make_durable(folder: Path) -> None:
    """Make `folder` and its parents; return when each new name is on disk."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        _fsync(new.parent)


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
