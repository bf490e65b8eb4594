"""Compiled fences on disk: found again by another compiler, never trusted when damaged, and kept small."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from zllm_jax.engine import fences
from zllm_jax.engine.fence_store import FenceStore
from zllm_jax.engine.fences import FenceCompiler
from zllm_jax.errors import InvalidRequest
from zllm_jax.fence import TokenTables, Vocabulary
from zllm_jax.values import Fence

VOCABULARY = Vocabulary([b"", *(bytes([byte]) for byte in range(256)), b"ab"], [0])
FENCE = Fence(schema={"type": "array", "uniqueItems": True}, relax=True)


def compiler(folder: Path, vocabulary: Vocabulary = VOCABULARY) -> FenceCompiler:
    return FenceCompiler(vocabulary, 4096, store=FenceStore(folder))


def digest(folder: Path) -> str:
    followed = compiler(folder).ready(FENCE).followed
    assert isinstance(followed, TokenTables)
    return followed.digest


def test_another_compiler_finds_what_one_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler(tmp_path).ready(FENCE)
    monkeypatch.setattr(fences, "compile_fence", None)
    again = compiler(tmp_path).ready(FENCE)
    assert isinstance(first.followed, TokenTables)
    assert isinstance(again.followed, TokenTables)
    assert again.followed.digest == first.followed.digest
    assert again.relaxed == first.relaxed != ()


def test_another_vocabulary_finds_nothing(tmp_path: Path) -> None:
    compiler(tmp_path).ready(FENCE)
    compiler(tmp_path, Vocabulary([*VOCABULARY.tokens, b"c"], [0])).ready(FENCE)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_file_is_a_miss_that_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = digest(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    with caplog.at_level(logging.WARNING):
        assert digest(tmp_path) == expected
    assert "damaged" in caplog.text
    caplog.clear()
    assert digest(tmp_path) == expected
    assert not caplog.text


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        digest(tmp_path / "file" / "folder")
    assert "is not kept" in caplog.text


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    store = FenceStore(tmp_path, max_bytes=1)
    for text in ("a", "b"):
        FenceCompiler(VOCABULARY, 4096, store=store).ready(Fence(regex=text))
    assert len(list(tmp_path.iterdir())) <= 1


def test_a_fence_beyond_the_room_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="there is room for 14: raise EngineConfig"):
        FenceCompiler(VOCABULARY, 16).ready(Fence(regex="[ab]{40}"))
