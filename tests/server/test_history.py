"""What is kept of responses: whole turns, each tenant's own, the newest."""

from __future__ import annotations

import asyncio
import gc
import stat
from pathlib import Path

import pytest

from zllm_jax.errors import ConfigError, HistoryUnavailable
from zllm_jax.server.history import History, Turn


def turn(id: str, previous: str | None = None) -> Turn:
    return Turn(response={"id": id, "output": []}, items=({"id": f"of {id}"},), previous=previous, conversation="c")


def test_a_chain_is_read_back_oldest_first_and_by_its_tenant_alone(tmp_path: Path) -> None:
    history = History(tmp_path / "below" / "responses.sqlite")

    async def scenario() -> None:
        for id, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
            await history.keep("one", turn(id, previous))
        assert await history.chain("one", "c") == [turn("a"), turn("b", "a"), turn("c", "b")]
        assert await history.chain("two", "c") == []
        assert await history.get("two", "a") is None
        assert not await history.delete("two", "a")
        assert await history.delete("one", "a")
        assert await history.chain("one", "c") == []
        assert await history.get("one", "c") == turn("c", "b")

    asyncio.run(scenario())
    history.close()
    assert stat.S_IMODE((tmp_path / "below" / "responses.sqlite").stat().st_mode) == 0o600


def test_the_newest_are_kept() -> None:
    history = History(None, max_responses=3)

    async def scenario() -> list[bool]:
        for number in range(5):
            await history.keep("", turn(str(number)))
        return [await history.get("", str(number)) is not None for number in range(5)]

    assert asyncio.run(scenario()) == [False, False, True, True, True]


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match=r"responses\.sqlite.*move it away"):
        History(path)


def test_a_file_that_breaks_is_an_error_and_no_end(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite"
    history = History(path)
    asyncio.run(history.keep("", turn("a")))
    history._db.execute("DROP TABLE responses")
    with pytest.raises(HistoryUnavailable, match="no such table"):
        asyncio.run(history.get("", "a"))
    del history
    gc.collect()
