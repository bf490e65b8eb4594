"""GGUF: every type, every refusal, and headers that lie."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint import writers
from zllm_jax.checkpoint import open_checkpoint, tensor_files
from zllm_jax.checkpoint.encodings import ENCODINGS
from zllm_jax.checkpoint.gguf_header import read_header
from zllm_jax.errors import BadCheckpoint

EMBED, FFN, VOCAB = 256, 512, 64
CONFIG = {
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "hidden_size": EMBED,
    "intermediate_size": FFN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}


def tensors() -> dict[str, tuple[int, ...]]:
    """Name -> shape as numpy sees it, of a llama of one layer."""
    return {
        "token_embd.weight": (VOCAB, EMBED),
        "output_norm.weight": (EMBED,),
        "blk.0.attn_norm.weight": (EMBED,),
        "blk.0.attn_q.weight": (EMBED, EMBED),
        "blk.0.attn_k.weight": (EMBED // 2, EMBED),
        "blk.0.attn_v.weight": (EMBED // 2, EMBED),
        "blk.0.attn_output.weight": (EMBED, EMBED),
        "blk.0.ffn_norm.weight": (EMBED,),
        "blk.0.ffn_gate.weight": (FFN, EMBED),
        "blk.0.ffn_up.weight": (FFN, EMBED),
        "blk.0.ffn_down.weight": (EMBED, FFN),
    }


def write(
    path: Path,
    shapes: dict[str, tuple[int, ...]] | None = None,
    *,
    arch: str = "llama",
    kind: str = "F16",
    metadata: dict[str, object] | None = None,
) -> dict[str, np.ndarray]:
    """A model of random blocks of type `kind` (norms: F32). Returns the raw bytes of each tensor."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, arch)
    writers.add_numbers(writer, CONFIG)
    for key, value in (metadata or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    raw = {}
    for name, shape in (shapes or tensors()).items():
        quantised = gguf.GGMLQuantizationType[kind if len(shape) > 1 else "F32"]
        values = rng.standard_normal(shape, np.float32)
        raw[name] = random_blocks(rng, shape, quantised) if quantised >= 10 else gguf.quants.quantize(values, quantised)
        writer.add_tensor(name, raw[name], raw_dtype=quantised)
    writers.finish(writer)
    return raw


def random_blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of a type that the package cannot write: random bytes, but finite scales."""
    if kind == gguf.GGMLQuantizationType.BF16:
        return gguf.quants.quantize(rng.standard_normal(shape, np.float32), kind)
    length, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // length, size), np.uint8)
    scale = rng.standard_normal((*blocks.shape[:-1], 1)).astype(np.float16).view(np.uint8)
    if kind == gguf.GGMLQuantizationType.Q4_K:
        blocks[..., 0:4] = np.concatenate([scale, scale], axis=-1)
    else:
        blocks[..., -2:] = scale
    return blocks.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("kind", ENCODINGS)
def test_every_type_is_what_the_package_decodes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_NUMBERS", 1000)  # three rows at a time: many blocks, the last one short
    raw = write(tmp_path / "model.gguf", kind=kind)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")

    def decoded(name: str) -> np.ndarray:
        return gguf.quants.dequantize(raw[name], gguf.GGMLQuantizationType[kind])

    np.testing.assert_array_equal(checkpoint.read("embed"), decoded("token_embd.weight"))
    np.testing.assert_array_equal(checkpoint.read("layers.0.w_down"), decoded("blk.0.ffn_down.weight").T)
    found = checkpoint.read("layers.0.wq").T  # interleaving it again gives what is stored
    np.testing.assert_array_equal(writers.interleave(found, 4), decoded("blk.0.attn_q.weight"))
    assert np.isfinite(checkpoint.read("layers.0.w_up")).all()
    assert np.ptp(checkpoint.read("layers.0.w_up")) > 0


def test_block_sizes_are_the_packages() -> None:
    for name, encoding in ENCODINGS.items():
        kind = gguf.GGMLQuantizationType[name]
        assert (encoding.block_len, encoding.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
        assert encoding.ggml_id == kind


def test_header_agrees_with_the_packages_reader(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, metadata={"a.text": "für", "a.flag": True, "a.list": [1, -2], "a.texts": ["x", ""]})
    theirs = gguf.GGUFReader(path)
    ours = read_header(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert {tensor.name: int(tensor.data_offset) for tensor in theirs.tensors} == {
        name: extent.offset for name, extent in ours.tensors.items()
    }


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", kind="Q2_K")
    with pytest.raises(BadCheckpoint, match=r"token_embd\.weight is of type Q2_K") as error:
        open_checkpoint(tmp_path / "model.gguf")
    assert error.value.tensor == "token_embd.weight"


@pytest.mark.parametrize("arch", ["mamba", "gemma2"])
def test_unknown_architecture(arch: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", arch=arch)
    with pytest.raises(BadCheckpoint, match=f"architecture '{arch}' is unknown; known are llama"):
        open_checkpoint(tmp_path / "model.gguf")


def test_wrong_shape_names_the_tensor(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", tensors() | {"blk.0.ffn_up.weight": (FFN, EMBED // 2)})
    with pytest.raises(BadCheckpoint, match=r"ffn_up\.weight has shape \[512, 128\].*\[512, 256\]") as error:
        open_checkpoint(tmp_path / "model.gguf")
    assert error.value.tensor == "blk.0.ffn_up.weight"


def test_missing_tensor(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", {name: shape for name, shape in tensors().items() if "ffn_gate" not in name})
    with pytest.raises(BadCheckpoint, match=r"blk\.0\.ffn_gate\.weight is missing"):
        open_checkpoint(tmp_path / "model.gguf")


def test_left_over_tensor(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", tensors() | {"blk.0.attn_sinks.weight": (EMBED,)})
    with pytest.raises(BadCheckpoint, match=r"blk\.0\.attn_sinks\.weight is not part"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "metadata, complaint",
    [
        ({"llama.expert_count": 8}, "expert_count is 8; it means a mixture of experts"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "must be none, linear or yarn"),
        ({"llama.attention.sliding_window": 4096}, "a sliding window in every layer"),
        ({"llama.rope.dimension_count": 32}, "must equal the head size 64"),
        ({"tokenizer.chat_template": 5}, "must be text"),
        ({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1]}, "1 entries for 2 tokens"),
        ({"tokenizer.ggml.tokens": ["a"] * 65}, "only 64 rows"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_refused_features(metadata: dict[str, object], complaint: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(BadCheckpoint, match=complaint):
        open_checkpoint(tmp_path / "model.gguf")


def test_rope_scaling(tmp_path: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 4096}
    write(tmp_path / "model.gguf", metadata={f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    rope = open_checkpoint(tmp_path / "model.gguf").config.rope
    assert (rope.kind, rope.factor, rope.original_max_tokens) == ("yarn", 4.0, 4096)


def test_llama3_factors_become_a_configuration(tmp_path: Path) -> None:
    rope = open_checkpoint(writers.write_tiny_gguf("llama3", tmp_path / "model.gguf")).config.rope
    assert (rope.kind, rope.factor, rope.original_max_tokens) == ("llama3", 8.0, 8192)


def test_foreign_frequency_factors_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", tensors() | {"rope_freqs.weight": (32,)})
    with pytest.raises(BadCheckpoint, match="not Llama 3's") as error:
        open_checkpoint(tmp_path / "model.gguf")
    assert error.value.tensor == "rope_freqs.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path, metadata={"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]})
    return path.read_bytes()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "broken.gguf"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_truncated_anywhere(data: st.DataObject, whole: bytes, broken: Path) -> None:
    header = data.draw(st.booleans())
    broken.write_bytes(whole[: data.draw(st.integers(0, 2000 if header else len(whole) - 1))])
    with pytest.raises(BadCheckpoint, match=r"truncated|not a GGUF"):
        open_checkpoint(broken)


@settings(max_examples=150, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(4, 1600), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_corrupt_header_never_crashes(changes: list[tuple[int, bytes]], whole: bytes, broken: Path) -> None:
    content = bytearray(whole)
    for position, patch in changes:
        content[position : position + len(patch)] = patch
    broken.write_bytes(content)
    tracemalloc.start()
    try:
        with writers.refused_or_fine(str(broken)):
            open_checkpoint(broken)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("count", [1 << 20, 1 << 40, (1 << 64) - 1])
def test_lengths_that_lie(count: int, broken: Path) -> None:
    """An array, a text and a tensor table that would need far more than the file has."""
    start = b"GGUF" + struct.pack("<IQQ", 3, count, 1) + struct.pack("<Q", 1) + b"k"
    for value in (struct.pack("<IIQ", 9, 10, count), struct.pack("<IIQ", 9, 8, count), struct.pack("<IQ", 8, count)):
        broken.write_bytes(start + value + bytes(64))
        with pytest.raises(BadCheckpoint, match=r"truncated|at most"):
            read_header(broken)


def test_big_endian_is_named(broken: Path) -> None:
    broken.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(BadCheckpoint, match="big-endian"):
        read_header(broken)


def test_a_file_cut_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path)
    checkpoint = open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(BadCheckpoint, match="became shorter"):
        checkpoint.read("layers.0.w_down")
