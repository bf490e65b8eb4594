"""Where snapshots lie: a folder, or any other key-value store that TensorStore opens, behind the same few verbs.

Paths are `<id>/<file>` or `<id>/<part>/<file>`, below one namespace. Writes are atomic and, in a folder, on disk when
they return: TensorStore writes beside the target, fsyncs, renames, and fsyncs the directory of the file. It does not
fsync the parents of directories; `prepare` and `settle` do.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import tensorstore as ts

from zllm_jax.cache.manifest import MANIFEST_FILE
from zllm_jax.errors import CacheError, CorruptSnapshot, StoreUnavailable

QUARANTINE = "quarantine"
MAX_QUARANTINED = 8

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


class Files(Protocol):
    """The verbs that a store of snapshots needs."""

    where: str
    local: Path | None

    def spec(self, path: str) -> dict[str, Any]:
        """The kvstore spec of a folder, for TensorStore drivers."""

    def ids(self) -> list[str]:
        """Every entry, whole or not."""

    def sizes(self, id: str) -> dict[str, int] | None:
        """File below the entry -> bytes on disk; None where the store cannot tell."""

    def size(self, path: str) -> int:
        """Bytes of one file."""

    def read(self, path: str, max_bytes: int) -> bytes:
        """One small file. Raises CorruptSnapshot when missing, larger, or not a file."""

    def prepare(self, id: str, parts: list[str]) -> None:
        """Make the folders of a new entry."""

    def settle(self, id: str) -> None:
        """Return when the entry's folders are on disk."""

    def write(self, path: str, data: bytes) -> int:
        """Write one small file atomically; the number of bytes written."""

    def remove(self, id: str) -> None:
        """Delete the entry, its manifest first."""

    def set_aside(self, id: str, reason: str) -> str:
        """Take the entry out of service, keep it for a look where that is possible; says where it went."""

    def committed(self, id: str) -> bool:
        """Whether the entry has a manifest."""

    def age_s(self, id: str) -> float:
        """Seconds since the entry was last written to (0 where the store cannot tell)."""

    def used_s(self, id: str) -> float | None:
        """When the entry was last used, as far as the store remembers."""

    def mark_used(self, id: str) -> None:
        """Remember that the entry was used now."""


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


class LocalFiles:
    """A folder `root` with one folder an entry, and `root/quarantine`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.local: Path | None = root
        self.where = str(root)

    def spec(self, path: str) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self.root}/{path}/"}

    def ids(self) -> list[str]:
        with store_errors("list", self.where):
            try:
                return sorted(entry.name for entry in os.scandir(self.root) if entry.name != QUARANTINE)
            except FileNotFoundError:
                return []

    def sizes(self, id: str) -> dict[str, int] | None:
        found: dict[str, int] = {}
        with store_errors("list", f"{self.root}/{id}", reading=True):
            _scan(self.root / id, "", found)
        return found

    def size(self, path: str) -> int:
        with store_errors("read", f"{self.root}/{path}"):
            return os.lstat(self.root / path).st_size

    def read(self, path: str, max_bytes: int) -> bytes:
        where = f"{self.root}/{path}"
        with store_errors("read", where, reading=True), open_regular(where) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > max_bytes:
                raise CorruptSnapshot(f"{where} has {size} bytes, at most {max_bytes} are right", path=where)
            return os.pread(descriptor, size, 0)

    def prepare(self, id: str, parts: list[str]) -> None:
        with store_errors("write below", self.where):
            _make_durable(self.root)
            os.mkdir(self.root / id)
            for part in parts:
                os.mkdir(self.root / id / part)

    def settle(self, id: str) -> None:
        with store_errors("write below", self.where):
            _fsync(self.root / id)
            _fsync(self.root)

    def write(self, path: str, data: bytes) -> int:
        with store_errors("write", f"{self.root}/{path}"):
            kvstore = ts.KvStore.open(self.spec(os.path.dirname(path)), context=context()).result()
            kvstore.write(os.path.basename(path), data).result()
        return len(data)

    def remove(self, id: str) -> None:
        folder = self.root / id
        with store_errors("delete", str(folder)):
            try:
                (folder / MANIFEST_FILE).unlink(missing_ok=True)
                shutil.rmtree(folder)
            except FileNotFoundError:
                return  # another process was faster
            except NotADirectoryError:
                if folder.is_file():
                    folder.unlink()

    def set_aside(self, id: str, reason: str) -> str:
        quarantine = self.root / QUARANTINE
        target = quarantine / f"{id}-{time.time_ns():x}"
        with store_errors("quarantine", f"{self.root}/{id}"):
            quarantine.mkdir(parents=True, exist_ok=True)
            try:
                os.rename(self.root / id, target)
            except FileNotFoundError:
                return "already gone"
            Path(f"{target}.reason").write_text(reason + "\n", encoding="utf-8")
            for old in sorted(quarantine.glob("*.reason"), key=lambda path: path.stat().st_mtime)[:-MAX_QUARANTINED]:
                shutil.rmtree(old.with_suffix(""), ignore_errors=True)
                old.unlink(missing_ok=True)
        return str(target)

    def committed(self, id: str) -> bool:
        return os.path.lexists(self.root / id / MANIFEST_FILE)

    def age_s(self, id: str) -> float:
        newest = 0.0
        for folder, _, names in os.walk(self.root / id):
            for name in (".", *names):
                with suppress(OSError):  # a file under way is renamed
                    newest = max(newest, os.lstat(os.path.join(folder, name)).st_mtime)
        return time.time() - newest if newest else 0.0

    def used_s(self, id: str) -> float | None:
        try:
            return os.lstat(self.root / id / MANIFEST_FILE).st_mtime
        except OSError:
            return None

    def mark_used(self, id: str) -> None:
        with suppress(OSError):  # a store that can only be read still serves
            os.utime(self.root / id / MANIFEST_FILE)


class KeyValueFiles:
    """Any other kvstore. It is trusted to be durable; it cannot tell sizes or ages, nor keep a quarantine."""

    def __init__(self, url: str, namespace: str) -> None:
        self.local: Path | None = None
        self.where = f"{url}{'' if url.endswith('/') else '/'}{namespace}"
        with store_errors("open", self.where):
            self._kvstore = ts.KvStore.open(f"{self.where}/", context=context()).result()

    def spec(self, path: str) -> dict[str, Any]:
        spec: Mapping[str, Any] = self._kvstore.spec().to_json()
        return {**spec, "path": f"{spec['path']}{path}/"}

    def ids(self) -> list[str]:
        with store_errors("list", self.where):
            return sorted({key.decode(errors="replace").split("/", 1)[0] for key in self._kvstore.list().result()})

    def sizes(self, id: str) -> dict[str, int] | None:
        return None

    def size(self, path: str) -> int:
        with store_errors("read", f"{self.where}/{path}"):
            return len(self._kvstore[path])

    def read(self, path: str, max_bytes: int) -> bytes:
        where = f"{self.where}/{path}"
        with store_errors("read", where, reading=True):
            found = self._kvstore.read(path).result()
        if found.state != "value" or len(found.value) > max_bytes:
            raise CorruptSnapshot(f"{where} is missing or larger than {max_bytes} bytes", path=where)
        return found.value

    def prepare(self, id: str, parts: list[str]) -> None:
        pass

    def settle(self, id: str) -> None:
        pass

    def write(self, path: str, data: bytes) -> int:
        with store_errors("write", f"{self.where}/{path}"):
            self._kvstore.write(path, data).result()
        return len(data)

    def remove(self, id: str) -> None:
        with store_errors("delete", f"{self.where}/{id}"):
            self._kvstore.write(f"{id}/{MANIFEST_FILE}", None).result()
            self._kvstore.delete_range(ts.KvStore.KeyRange(f"{id}/", f"{id}0")).result()  # '0' follows '/'

    def set_aside(self, id: str, reason: str) -> str:
        self.remove(id)
        return "deleted"

    def committed(self, id: str) -> bool:
        with store_errors("read", f"{self.where}/{id}"):
            return self._kvstore.read(f"{id}/{MANIFEST_FILE}").result().state == "value"

    def age_s(self, id: str) -> float:
        return 0.0

    def used_s(self, id: str) -> float | None:
        return None

    def mark_used(self, id: str) -> None:
        pass


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


def _scan(folder: Path, prefix: str, found: dict[str, int]) -> None:
    """Sizes of the files at most two levels deep; whatever else is there counts as a file that should not be."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not prefix:
                _scan(folder / entry.name, f"{entry.name}/", found)
            else:
                regular = entry.is_file(follow_symlinks=False)
                found[prefix + entry.name] = entry.stat(follow_symlinks=False).st_size if regular else -1


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
