"""The responses that clients may continue or ask for again: SQLite, one transaction a turn.

Only protocol items are kept here, and the key by which the cache finds the conversation: whether its state is still
there, and where, is the engine's business.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from zllm_jax.errors import ConfigError, HistoryUnavailable

Json = dict[str, Any]
T = TypeVar("T")

MAX_RESPONSES = 100_000
MAX_CHAIN = 4096  # turns of one conversation
_VERSION = 1
_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    previous TEXT,
    conversation TEXT,
    response TEXT NOT NULL,
    items TEXT NOT NULL
)
"""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A response and the input items of its own turn. previous: the response that it continues."""

    response: Json
    items: tuple[Json, ...]
    previous: str | None = None
    conversation: str | None = None


class History:
    """Of all tenants; each sees its own. path: the file, or None to keep nothing beyond this process.

    The newest `max_responses` are kept. All access is in one thread of its own. Raises `ConfigError` when the file
    cannot be used, `HistoryUnavailable` later.
    """

    def __init__(self, path: Path | None, *, max_responses: int = MAX_RESPONSES) -> None:
        self._max = max_responses
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="history")
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)  # conversations are their owner's
            self._db = self._thread.submit(_open, path).result()
        except (sqlite3.Error, OSError) as error:
            self._thread.shutdown()
            raise ConfigError(f"the history of responses {path} cannot be used: {error}; move it away") from error
        self._closing = weakref.finalize(self, self._db.close)

    async def keep(self, tenant: str, turn: Turn) -> None:
        """Durable once this returns."""
        row = (
            turn.response["id"],
            tenant,
            turn.previous,
            turn.conversation,
            json.dumps(turn.response),
            json.dumps(turn.items),
        )

        def write() -> None:
            with self._db:
                self._db.execute(
                    "INSERT OR REPLACE INTO responses (id, tenant, previous, conversation, response, items)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    row,
                )
                self._db.execute(
                    "DELETE FROM responses WHERE number <= (SELECT MAX(number) FROM responses) - ?", (self._max,)
                )

        await self._run(write)

    async def get(self, tenant: str, id: str) -> Turn | None:
        return await self._run(lambda: self._get(tenant, id))

    async def chain(self, tenant: str, id: str) -> list[Turn]:
        """The turns up to `id`, oldest first; empty where one of them is not there."""

        def walk() -> list[Turn]:
            turns, wanted = list[Turn](), id
            while len(turns) < MAX_CHAIN:
                turn = self._get(tenant, wanted)
                if turn is None:
                    return []
                turns.append(turn)
                if turn.previous is None:
                    return turns[::-1]
                wanted = turn.previous
            return []

        return await self._run(walk)

    async def delete(self, tenant: str, id: str) -> bool:
        """Whether it was there."""

        def erase() -> bool:
            with self._db:
                found = self._db.execute("DELETE FROM responses WHERE id = ? AND tenant = ?", (id, tenant))
            return found.rowcount > 0

        return await self._run(erase)

    def close(self) -> None:
        """Nothing is lost without it."""
        self._thread.shutdown()
        self._closing()

    def _get(self, tenant: str, id: str) -> Turn | None:
        query = "SELECT response, items, previous, conversation FROM responses WHERE id = ? AND tenant = ?"
        row = self._db.execute(query, (id, tenant)).fetchone()
        if row is None:
            return None
        response, items, previous, conversation = row
        return Turn(
            response=json.loads(response),
            items=tuple(json.loads(items)),
            previous=previous,
            conversation=conversation,
        )

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise HistoryUnavailable(f"the history of responses cannot be used: {error}") from error


def _open(path: Path | None) -> sqlite3.Connection:
    db = sqlite3.connect(":memory:" if path is None else path, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"its layout is {version}, this version reads {_VERSION}")
        with db:
            db.execute(_TABLE)
            db.execute(f"PRAGMA user_version = {_VERSION}")
    except BaseException:
        db.close()
        raise
    return db
