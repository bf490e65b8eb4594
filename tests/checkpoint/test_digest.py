"""Digests: of the file's content, computed once, and again when the file changes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from zllm_jax.checkpoint import digest


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    return path


def test_digest_of_one_file_is_its_sha256(weights: Path, zllm_home: Path) -> None:
    assert digest.digest_files([weights]) == hashlib.sha256(b"one").hexdigest()


def test_unchanged_file_is_not_read_again(weights: Path, zllm_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest.digest_file(weights)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)
        assert digest.digest_file(weights) == first
    weights.write_bytes(b"two")
    os.utime(weights, ns=(0, 0))
    assert digest.digest_file(weights) == hashlib.sha256(b"two").hexdigest()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"sha256": 5}'])
def test_a_damaged_sidecar_is_ignored(content: str, weights: Path, zllm_home: Path) -> None:
    first = digest.digest_file(weights)
    (sidecar,) = (zllm_home / "digests").iterdir()
    sidecar.write_text(content)
    assert digest.digest_file(weights) == first


def test_a_home_that_cannot_be_written(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZLLM_HOME", str(tmp_path / "file"))
    assert digest.digest_file(weights) == hashlib.sha256(b"one").hexdigest()


def test_several_files_count_with_their_names(tmp_path: Path, zllm_home: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"1")
    b.write_bytes(b"2")
    both = digest.digest_files([a, b])
    assert both == digest.digest_files([b, a])
    b.rename(tmp_path / "c")
    assert both != digest.digest_files([a, tmp_path / "c"])
