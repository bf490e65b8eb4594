"""Compiled fences on disk: a cache that may be lost, damaged or shared by processes at any time."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from zllm_jax import dialect, fence
from zllm_jax.errors import CacheError
from zllm_jax.fence import TokenTables, Vocabulary, tables_from_bytes, tables_to_bytes

log = logging.getLogger(__name__)
MAX_BYTES = 256 * 2**20


@lru_cache(maxsize=1)
def _compilers() -> str:
    """A digest of the source that makes tables: what another version made is not read."""
    state = hashlib.sha256()
    for room in (fence, dialect):
        for path in sorted(Path(str(room.__file__)).parent.rglob("*.py")):
            state.update(path.read_bytes())
    return state.hexdigest()


class FenceStore:
    """Tables below `folder`, the least recently used removed beyond `max_bytes`. Failures are logged misses."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    def get(self, key: str, vocabulary: Vocabulary) -> tuple[TokenTables, tuple[str, ...]] | None:
        """The tables of a demand and what they leave out; None where they are not there whole."""
        path = self._path(key, vocabulary)
        try:
            tables, note = tables_from_bytes(path.read_bytes(), vocabulary)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, CacheError) as error:
            log.warning("the compiled fence %s is not used: %s", path.name, error)
            return None
        return tables, tuple(note["relaxed"])

    def put(self, key: str, tables: TokenTables, relaxed: tuple[str, ...]) -> None:
        path = self._path(key, tables.vocabulary)
        temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(tables_to_bytes(tables, {"relaxed": relaxed}))
            temporary.replace(path)
            self._prune()
        except OSError as error:
            log.warning("the compiled fence %s is not kept: %s", path.name, error)
            with suppress(OSError):
                temporary.unlink()

    def _path(self, key: str, vocabulary: Vocabulary) -> Path:
        name = hashlib.sha256("\0".join((_compilers(), vocabulary.digest, key)).encode()).hexdigest()
        return self._folder / f"{name}.fence"

    def _prune(self) -> None:
        used = 0
        aged = [(path, path.stat()) for path in self._folder.iterdir()]
        for path, stat in sorted(aged, key=lambda one: -one[1].st_mtime):
            used += stat.st_size
            if used > self._max_bytes:
                path.unlink(missing_ok=True)
