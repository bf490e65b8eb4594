"""The same model in every format gives the same parameters, and they mean what the reference computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint import forward, writers
from zllm_jax.checkpoint import open_checkpoint, parameter_shapes
from zllm_jax.errors import BadCheckpoint, UnknownModel


@pytest.mark.parametrize("name", writers.NAMES)
def test_canonical_parameters_give_the_reference_logits(name: str) -> None:
    checkpoint = open_checkpoint(writers.TINY / name)
    reference = np.load(writers.TINY / name / "reference.npz")
    for length in ("n40", "n200"):
        wanted = reference[f"{length}.logits"]
        found = forward.logits(checkpoint, reference[f"{length}.ids"])[-len(wanted) :]
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("name", writers.NAMES)
def test_gguf_and_hugging_face_agree(name: str, tmp_path: Path) -> None:
    directory = open_checkpoint(writers.TINY / name)
    single = open_checkpoint(writers.write_tiny_gguf(name, tmp_path / "model.gguf"))
    assert single.shapes == directory.shapes == parameter_shapes(directory.config)
    for parameter, shape in single.shapes.items():
        found = single.read(parameter)
        assert found.shape == shape
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, directory.read(parameter), err_msg=parameter)
    for number in ("num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size", "qk_norm", "attention_bias"):
        assert getattr(single.config, number) == getattr(directory.config, number), number
    assert single.config.tied_embeddings == directory.config.tied_embeddings
    assert single.config.rms_eps == pytest.approx(directory.config.rms_eps)
    if name == "gemma3":
        assert single.config.local_layers == directory.config.local_layers
        assert single.config.window == 32
        assert single.config.local_rope == directory.config.local_rope
        assert single.config.query_scale == pytest.approx(directory.config.query_scale)


def test_bfloat16_is_the_rounded_float32() -> None:
    checkpoint = open_checkpoint(writers.TINY / "llama3")
    exact = checkpoint.read("layers.0.wq").view(np.uint32).astype(np.uint64)
    rounded = ((exact + 0x7FFF + ((exact >> 16) & 1)) >> 16).astype(np.uint16)
    found = checkpoint.read("layers.0.wq", "bfloat16")
    assert found.dtype.name == "bfloat16"
    np.testing.assert_array_equal(found.view(np.uint16), rounded)


def test_unknown_parameter_is_a_key_error() -> None:
    with pytest.raises(KeyError, match=r"layers\.9\.wq"):
        open_checkpoint(writers.TINY / "llama3").read("layers.9.wq")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"must have a config\.json"):
        open_checkpoint(tmp_path)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a model, but longer than any header" * 3)
    with pytest.raises(BadCheckpoint, match="not a GGUF file"):
        open_checkpoint(tmp_path / "notes.txt")
