"""A store of files that fails on purpose: errors, short reads, flipped bits, slowness, at a chosen call of a verb."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from zllm_jax.cache.snapshot_files import Blocks, Files, Stat, Writing, store_errors
from zllm_jax.errors import CorruptSnapshot

VERBS = (
    "exclusive",
    "announce",
    "changes",
    "list",
    "stat",
    "read",
    "read_into",
    "write",
    "delete",
    "touch",
    "set_aside",
)


@dataclass(frozen=True)
class Fault:
    """What happens at call number `at` of `verb` (0 is the first after the fault was planted), and, if `on`, later.

    kind: the name of an errno ("EIO", "ENOSPC") is an error; "late" one that a write reports when it is waited for,
    after its file was written; "short" and "flip" spoil what is read; "slow" waits for `gate`.
    """

    verb: str
    kind: str
    at: int = 0
    on: bool = False


class FaultyFiles:
    """Any `Files`, with faults. calls: how often each verb was called since the last `plant`."""

    def __init__(self, files: Files, seed: int = 0) -> None:
        self._files = files
        self.where = files.where
        self._faults: tuple[Fault, ...] = ()
        self.calls = dict.fromkeys(VERBS, 0)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.gate = threading.Event()
        self.fired = 0

    def plant(self, *faults: Fault) -> None:
        self._faults, self.fired = faults, 0
        self.calls = dict.fromkeys(VERBS, 0)

    def _kind(self, verb: str) -> str:
        with self._lock:
            number = self.calls[verb]
            self.calls[verb] += 1
            for fault in self._faults:
                if fault.verb == verb and (number == fault.at or (fault.on and number > fault.at)):
                    self.fired += 1
                    return fault.kind
        return ""

    def _fail(self, verb: str, path: str) -> str:
        kind = self._kind(verb)
        if kind == "slow":
            assert self.gate.wait(60)
        elif kind not in ("", "short", "flip", "late"):
            code = getattr(errno, kind)
            with store_errors(verb, path):
                raise OSError(code, os.strerror(code))
        return kind

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self._fail("exclusive", self.where)
        with self._files.exclusive():
            yield

    def announce(self) -> None:
        self._fail("announce", self.where)
        self._files.announce()

    def changes(self) -> object:
        self._fail("changes", self.where)
        return self._files.changes()

    def list(self, folder: str) -> dict[str, Stat]:
        self._fail("list", folder)
        return self._files.list(folder)

    def stat(self, path: str) -> Stat | None:
        self._fail("stat", path)
        return self._files.stat(path)

    def read(self, path: str, max_bytes: int) -> bytes:
        kind = self._fail("read", path)
        data = self._files.read(path, max_bytes)
        if kind == "short":
            return data[: self._random.randrange(len(data))]
        if kind == "flip":
            flipped = bytearray(data)
            flipped[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            return bytes(flipped)
        return data

    def read_into(self, path: str, blocks: Blocks) -> None:
        kind = self._fail("read_into", path)
        self._files.read_into(path, blocks)
        if kind == "short":
            raise CorruptSnapshot(f"{path}: half of it was read", path=path)
        if kind == "flip":
            flat = self._random.choice(blocks).reshape(-1)
            flat[self._random.randrange(len(flat))] ^= np.uint8(1 << self._random.randrange(8))

    def write(self, path: str, data: bytes | bytearray) -> Writing:
        kind = self._fail("write", path)
        writing = self._files.write(path, data)
        return _Late(writing, path) if kind == "late" else writing

    def delete(self, path: str) -> None:
        self._fail("delete", path)
        self._files.delete(path)

    def touch(self, path: str) -> None:
        if not self._kind("touch"):
            self._files.touch(path)

    def set_aside(self, paths: Sequence[str], label: str, reason: str) -> str:
        self._fail("set_aside", label)
        return self._files.set_aside(paths, label, reason)

    def drop_page_cache(self, path: str) -> bool:
        return self._files.drop_page_cache(path)


@dataclass(frozen=True)
class _Late:
    """A write whose file is there, and whose directory could not be flushed."""

    writing: Writing
    where: str

    def wait(self) -> None:
        self.writing.wait()
        with store_errors("write", self.where):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def every_call(files: FaultyFiles, work: Callable[[], object]) -> list[tuple[str, int]]:
    """Do `work` without faults; each (verb, number of the call) that it made."""
    files.plant()
    work()
    return [(verb, number) for verb, count in files.calls.items() for number in range(count)]
