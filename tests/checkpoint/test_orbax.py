"""`convert` and what it leaves: whole or nothing, equal to the bit, restored where the shardings say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.checkpoint import writers
from zllm_jax.checkpoint import OrbaxDirectory, TokenizerFiles, Vocabulary, convert, open_checkpoint
from zllm_jax.errors import BadCheckpoint, ConfigError


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(open_checkpoint(writers.TINY / "gemma3"), tmp_path_factory.mktemp("orbax") / "gemma3")


def opened(path: Path) -> OrbaxDirectory:
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, OrbaxDirectory)
    return checkpoint


def test_equal_to_the_bit(converted: Path) -> None:
    source, found = open_checkpoint(writers.TINY / "gemma3"), opened(converted)
    assert found.config == source.config
    assert found.shapes == source.shapes
    for name in source.shapes:
        np.testing.assert_array_equal(found.read(name), source.read(name), err_msg=name)
    assert found.read("embed", "bfloat16").dtype.name == "bfloat16"


def test_restored_where_the_shardings_say(converted: Path) -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    checkpoint = opened(converted)
    targets = {
        name: jax.ShapeDtypeStruct(checkpoint.shapes[name], "bfloat16", sharding=sharding)
        for name in ("embed", "layers.3.wq", "layers.3.attn_norm")
    }
    arrays = checkpoint.restore_sharded(targets)
    assert arrays.keys() == targets.keys()
    for name, array in arrays.items():
        assert array.sharding == sharding
        np.testing.assert_array_equal(np.asarray(array), checkpoint.read(name, "bfloat16"))


def test_restoring_a_wrong_shape_names_the_parameter(converted: Path) -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(BadCheckpoint, match="embed has shape"):
        opened(converted).restore_sharded({"embed": jax.ShapeDtypeStruct((3, 3), "float32", sharding=sharding)})


def test_bfloat16_reports_its_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = open_checkpoint(writers.TINY / "qwen2")
    path = convert(source, tmp_path / "new" / "qwen2", "bfloat16", lambda done, total: seen.append((done, total)))
    total = sum(int(np.prod(shape)) for shape in source.shapes.values()) * 2
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    np.testing.assert_array_equal(opened(path).read("layers.0.bq", "bfloat16"), source.read("layers.0.bq", "bfloat16"))


def test_an_existing_folder_is_kept(converted: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        convert(open_checkpoint(writers.TINY / "qwen2"), converted)


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    folder = writers.copy_tiny("qwen2", tmp_path / "source")
    source = open_checkpoint(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(300_000)
    with pytest.raises(BadCheckpoint, match="became shorter"):
        convert(source, tmp_path / "target" / "model")
    assert list((tmp_path / "target").iterdir()) == []


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(ConfigError, match="the disk has 5 free"):
        convert(open_checkpoint(writers.TINY / "qwen2"), tmp_path / "model")


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"format_version": 99}, "format_version is 99; this version reads 1"),
        ({"config": {"arch": "llama"}}, "is not what convert writes"),
        ({"parameters": {"embed": [3, 3]}}, r"embed has shape \(3, 3\)"),
    ],
)
def test_manifests_that_do_not_fit(change: dict[str, object], complaint: str, converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted, tmp_path / "copy")
    manifest = tmp_path / "copy" / "zllm_checkpoint.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(BadCheckpoint, match=complaint):
        open_checkpoint(tmp_path / "copy")


def test_a_missing_layer_is_found_at_once(converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "weights" / "layers.2")
    with pytest.raises(BadCheckpoint, match=r"layers\.2\.\w+ is missing"):
        open_checkpoint(tmp_path / "copy")


def test_a_damaged_layer_names_its_folder(converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted, tmp_path / "copy")
    for path in (tmp_path / "copy" / "weights" / "layers.2").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"layers\.2 cannot be read"):
        opened(tmp_path / "copy").read("layers.2.wq")


def test_tokenizer_files_travel(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    vocabulary = Vocabulary(kind="llama", pre="default", tokens=("a", "▁"), types=(1, 6), scores=(0.5, -1.0))
    files = TokenizerFiles(
        tokenizer_json=tmp_path / "tokenizer.json", vocabulary=vocabulary, settings={"a": 1}, bos_id=0, eos_ids=(1, 2)
    )
    files.save(tmp_path / "saved")
    loaded = TokenizerFiles.load(tmp_path / "saved")
    assert loaded.vocabulary == vocabulary
    assert (loaded.settings, loaded.bos_id, loaded.eos_ids) == (files.settings, 0, (1, 2))
    assert loaded.tokenizer_json is not None
    assert loaded.tokenizer_json.read_text() == "{}"
