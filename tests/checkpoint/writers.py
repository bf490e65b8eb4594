"""Small checkpoints on disk, written by the packages that define the formats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from zllm_jax.errors import BadCheckpoint

TINY = Path(__file__).parent.parent / "data" / "tiny"
NAMES = ("llama3", "qwen2", "qwen3", "gemma3")
_GGUF_ARCH = {"llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}

Tensors = dict[str, np.ndarray]


@contextmanager
def refused_or_fine(where: str) -> Iterator[None]:
    """The block succeeds, or is refused with a message that names `where`; anything else is a crash."""
    try:
        yield
    except BadCheckpoint as error:
        if where not in str(error):
            raise AssertionError(f"the message does not name {where}") from error


def tiny_tensors(name: str) -> Tensors:
    """The reference model's tensors under their Hugging Face names."""
    return load_file(TINY / name / "model.safetensors")


def copy_tiny(name: str, folder: Path, **changes: Any) -> Path:
    """The reference model `name` in `folder`, its config.json changed (None removes a key)."""
    shutil.copytree(TINY / name, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def save_tiny(tensors: Tensors, folder: Path) -> None:
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors")


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_PARTS = _GGUF_PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_tiny_gguf(name: str, path: Path) -> Path:
    """The reference model as llama.cpp's converter writes it: heads permuted for llama, 1 + w stored for Gemma."""
    config = json.loads((TINY / name / "config.json").read_text())
    arch = _GGUF_ARCH[name]
    writer = gguf.GGUFWriter(path, arch)
    add_numbers(writer, config)
    if name == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    for stored, value in tiny_tensors(name).items():
        if arch == "llama" and ".q_proj" in stored:
            value = interleave(value, config["num_attention_heads"])
        if arch == "llama" and ".k_proj" in stored:
            value = interleave(value, config["num_key_value_heads"])
        if name == "gemma3" and stored.endswith("norm.weight"):
            value = value + 1
        writer.add_tensor(_gguf_name(stored, name), np.ascontiguousarray(value))
    if name == "llama3":
        writer.add_tensor("rope_freqs.weight", llama31_factors(config))
    return finish(writer)


def add_numbers(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rope = config.get("rope_parameters", {})
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 10_000.0))


def finish(writer: gguf.GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's permutation of query and key rows (`LlamaModel.permute`)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def llama31_factors(config: dict[str, Any], original: int = 8192) -> np.ndarray:
    """The factors that llama.cpp's converter stores, in its own words (`generate_extra_tensors`)."""
    rope = config["rope_parameters"]
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    dim = config["head_dim"]
    factors = []
    for frequency in 1.0 / (rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def _gguf_name(stored: str, name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = stored.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{(_GEMMA_PARTS if name == 'gemma3' else _GGUF_PARTS)[part]}.{kind}"
