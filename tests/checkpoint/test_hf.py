"""Hugging Face directories: both forms of the configuration, shards, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint import writers
from zllm_jax.checkpoint import open_checkpoint
from zllm_jax.checkpoint.hf_config import hf_config
from zllm_jax.checkpoint.hf_directory import INDEX
from zllm_jax.config import RopeConfig
from zllm_jax.errors import BadCheckpoint


def raw(name: str, **changes: Any) -> dict[str, Any]:
    config = json.loads((writers.TINY / name / "config.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not ...}


def test_older_form_of_llama3_rope() -> None:
    new = raw("llama3")
    scaling = new.pop("rope_parameters")
    theta = scaling.pop("rope_theta")
    assert hf_config("", new | {"rope_theta": theta, "rope_scaling": scaling}, {}) == hf_config("", raw("llama3"), {})


def test_older_form_of_gemma() -> None:
    """Gemma 3 as first published: two bases, a pattern, scaling of the global layers only."""
    old = raw("gemma3", rope_parameters=..., layer_types=..., _sliding_window_pattern=..., num_hidden_layers=7)
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    assert hf_config("", old, {}) == hf_config("", raw("gemma3"), {})
    scaled = hf_config("", old | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, {})
    assert (scaled.rope.kind, scaled.rope.factor) == ("linear", 8.0)
    assert scaled.local_rope == RopeConfig(theta=1e4)


def test_gemma_with_a_vision_tower_leaves_out_defaults() -> None:
    """google/gemma-3-4b's text_config holds these keys only."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = hf_config("", {"model_type": "gemma3", "text_config": text | {"model_type": "gemma3_text"}}, {})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.local_layers[:7] == (True, True, True, True, True, False, True)
    assert (config.rope.theta, config.query_scale, config.tied_embeddings) == (1e6, 1 / 16, True)


@pytest.mark.parametrize(
    "scaling, wanted",
    [
        ({"type": "linear", "factor": 2.0}, RopeConfig(kind="linear", factor=2.0, original_max_tokens=4096)),
        ({"type": "dynamic", "factor": 2.0}, RopeConfig()),
        ({"rope_type": "yarn", "factor": 4.0}, RopeConfig(kind="yarn", factor=4.0, original_max_tokens=4096)),
        (None, RopeConfig()),
    ],
)
def test_rope_kinds(scaling: dict[str, Any] | None, wanted: RopeConfig) -> None:
    assert hf_config("", raw("llama3", rope_parameters=None, rope_scaling=scaling), {}).rope == wanted


def test_yarn_widens_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert hf_config("", raw("qwen2", rope_parameters=None, rope_scaling=scaling), {}).max_context_tokens == 16384


@pytest.mark.parametrize(
    "name, changes, complaint",
    [
        ("llama3", {"model_type": "falcon"}, "model_type 'falcon' is unknown; known are gemma3, llama"),
        ("llama3", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
        ("llama3", {"rope_parameters": {"type": "su", "factor": 2.0}}, "type is 'su'"),
        ("llama3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "attention scale"),
        ("llama3", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ("llama3", {"partial_rotary_factor": 0.5}, "a part of each head"),
        ("llama3", {"hidden_act": "relu"}, "hidden_act is 'relu'; it must be silu"),
        ("llama3", {"mlp_bias": True}, "biases in the feed-forward part"),
        ("llama3", {"quantization_config": {"bits": 4}}, "quantised weights"),
        ("llama3", {"num_key_value_heads": 3}, "must be a multiple of num_kv_heads"),
        ("llama3", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("llama3", {"hidden_size": "64"}, "hidden_size is '64'; it must be one positive integer"),
        ("llama3", {"rms_norm_eps": -1}, "must be a positive number"),
        ("llama3", {"tie_word_embeddings": "yes"}, "must be true or false"),
        ("llama3", {"eos_token_id": -3}, "must be a token id"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 512}, "a sliding window in every layer"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "soft-capped attention"),
        ("gemma3", {"layer_types": ["full_attention"]}, "must have one of full_attention, sliding_attention"),
    ],
)
def test_refused(name: str, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadCheckpoint, match=complaint):
        hf_config("config.json", raw(name, **changes), {})


def test_generation_config_decides_the_end(tmp_path: Path) -> None:
    folder = writers.copy_tiny("qwen2", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert open_checkpoint(folder).config.eos_ids == (7, 2)


def shard(folder: Path, name: str = "llama3") -> dict[str, str]:
    """Split the weights of `folder` in two files with an index."""
    tensors = writers.tiny_tensors(name)
    writers.copy_tiny(name, folder)
    (folder / "model.safetensors").unlink()
    places = {}
    for number, half in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        writers.save_tiny({key: tensors[key] for key in half}, folder)
        (folder / "model.safetensors").rename(folder / f"part-{number}.safetensors")
        places |= dict.fromkeys(half, f"part-{number}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return places


def test_shards_are_one_model(tmp_path: Path) -> None:
    shard(tmp_path)
    whole, sharded = open_checkpoint(writers.TINY / "llama3"), open_checkpoint(tmp_path)
    for name in whole.shapes:
        np.testing.assert_array_equal(whole.read(name), sharded.read(name))
    assert whole.digest != sharded.digest


def test_a_tensor_that_is_not_in_its_shard(tmp_path: Path) -> None:
    places = shard(tmp_path)
    places["lm_head.weight"] = next(file for file in places.values() if file != places["lm_head.weight"])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight is missing"):
        open_checkpoint(tmp_path)


def test_shards_stay_in_the_folder(tmp_path: Path) -> None:
    places = shard(tmp_path) | {"lm_head.weight": "../other.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(BadCheckpoint, match="must be a plain file name"):
        open_checkpoint(tmp_path)


def test_vision_tower_is_left_out(tmp_path: Path) -> None:
    tensors = {f"language_model.{name}": value for name, value in writers.tiny_tensors("gemma3").items()}
    writers.copy_tiny("gemma3", tmp_path)
    writers.save_tiny(tensors | {"vision_tower.encoder.weight": np.zeros((3, 3), np.float32)}, tmp_path)
    alone = open_checkpoint(writers.TINY / "gemma3").read("layers.6.w_up")
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("layers.6.w_up"), alone)


@pytest.mark.parametrize("change", ["missing", "left over", "shape", "dtype"])
def test_tensors_must_fit(change: str, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = writers.tiny_tensors("llama3")
    if change == "missing":
        tensors.pop(name)
    elif change == "left over":
        name = "model.layers.1.self_attn.k_proj.bias"
        tensors[name] = np.zeros(32, np.float32)
    elif change == "shape":
        tensors[name] = tensors[name][:-1]
    else:
        tensors[name] = tensors[name].astype(np.int8)
    writers.copy_tiny("llama3", tmp_path)
    writers.save_tiny(tensors, tmp_path)
    with pytest.raises(BadCheckpoint, match=name) as error:
        open_checkpoint(tmp_path)
    assert error.value.tensor == name


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return writers.copy_tiny("llama3", tmp_path_factory.mktemp("hf") / "broken")


@settings(max_examples=40, deadline=None)
@given(length=st.one_of(st.integers(0, 4000), st.integers(0, 475_383)))
def test_truncated_anywhere(length: int, broken: Path) -> None:
    content = (writers.TINY / "llama3" / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[:length])
    with pytest.raises(BadCheckpoint, match=r"truncated|header"):
        open_checkpoint(broken)


@settings(max_examples=100, deadline=None)
@given(position=st.integers(0, 2400), patch=st.binary(min_size=1, max_size=8))
def test_corrupt_header_never_crashes(position: int, patch: bytes, broken: Path) -> None:
    content = bytearray((writers.TINY / "llama3" / "model.safetensors").read_bytes())
    content[position : position + len(patch)] = patch
    (broken / "model.safetensors").write_bytes(content)
    with writers.refused_or_fine(str(broken)):
        open_checkpoint(broken)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"model_type": ["llama"]}'])
def test_broken_configuration(content: bytes, tmp_path: Path) -> None:
    writers.copy_tiny("llama3", tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        open_checkpoint(tmp_path)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=3)
)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_junk_in_the_configuration_never_crashes(data: st.DataObject) -> None:
    config = raw(data.draw(st.sampled_from(writers.NAMES)))
    target = config
    while isinstance(target, dict):
        parent, key = target, data.draw(st.sampled_from(sorted(target)))
        target = target[key]
    parent[key] = data.draw(st.one_of(JUNK, st.dictionaries(st.text(max_size=3), JUNK, max_size=2)))
    with writers.refused_or_fine("config.json"):
        hf_config("config.json", config, {})


@pytest.mark.parametrize(
    "files, wanted",
    [
        ({"tokenizer_config.json": '{"chat_template": "one"}'}, "one"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "two"}]}'}, "two"),
        ({"tokenizer_config.json": '{"chat_template": "one"}', "chat_template.jinja": "three"}, "three"),
        ({"chat_template.json": '{"chat_template": "four"}'}, "four"),
        ({}, None),
    ],
)
def test_chat_template_places(files: dict[str, str], wanted: str | None, tmp_path: Path) -> None:
    writers.copy_tiny("llama3", tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert open_checkpoint(tmp_path).chat_template == wanted
