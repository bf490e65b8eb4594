"""GGUF metadata -> `ModelConfig`."""

from __future__ import annotations

from typing import Any

import numpy as np

from zllm_jax.checkpoint.encodings import Extent
from zllm_jax.checkpoint.fields import Fields, model_config, repeating_local_layers
from zllm_jax.checkpoint.gguf_header import GgufHeader
from zllm_jax.config import ModelConfig, RopeConfig
from zllm_jax.errors import BadCheckpoint

LLAMA_LIKE = ("llama", "qwen2", "qwen3")
GEMMA = "gemma3"
GEMMA_PERIOD, GEMMA_WINDOW, GEMMA_LOCAL_THETA = 6, 512, 10_000.0
_UNSUPPORTED = {
    "expert_count": "a mixture of experts",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
}
_LLAMA3_CONTEXT = 8192  # of the pre-training of every model with such factors
_GEMMA_27B_LAYERS = 62


def gguf_config(where: str, header: GgufHeader) -> ModelConfig:
    """The configuration of a GGUF file. Raises `BadCheckpoint` for an architecture or feature that is not known."""
    arch = header.metadata.get("general.architecture")
    if arch not in (*LLAMA_LIKE, GEMMA):
        known = ", ".join((*LLAMA_LIKE, GEMMA))
        raise BadCheckpoint(f"{where}: architecture {arch!r} is unknown; known are {known}")
    prefix = f"{arch}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    fields = Fields(where, own, {})
    for key, feature in _UNSUPPORTED.items():
        fields.refuse(key, feature)
    if not fields.flag("attention.causal", True):
        raise fields.bad("attention.causal", "must be true: only causal attention is supported")
    num_layers = fields.layers("block_count")
    num_heads = fields.integer("attention.head_count")
    embed_dim = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", embed_dim // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.bad(key, f"must equal the head size {head_dim}")
    tokens = Fields(where, header.metadata, {})
    numbers: dict[str, Any] = {
        "num_layers": num_layers,
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "ffn_dim": fields.integer("feed_forward_length"),
        "vocab_size": _tensor(where, header, "token_embd.weight").shape[0],
        "max_context_tokens": fields.integer("context_length"),
        "rms_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope": _rope(fields, header.tensors.get("rope_freqs.weight"), head_dim),
        "tied_embeddings": "output.weight" not in header.tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "output_bias": "blk.0.attn_output.bias" in header.tensors,
        "eos_ids": end_ids(tokens),
        "bos_id": tokens.token("tokenizer.ggml.bos_token_id"),
    }
    if arch == GEMMA:
        return model_config(where, arch="gemma3", **numbers, **_gemma(fields, numbers))
    fields.refuse("attention.sliding_window", "a sliding window in every layer")
    return model_config(where, arch="llama", **numbers)


def end_ids(tokens: Fields) -> tuple[int, ...]:
    """End of text, end of turn and end of message, where the file has them."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return tuple(dict.fromkeys(id for key in keys for id in tokens.tokens(key)))


def _gemma(fields: Fields, numbers: dict[str, Any]) -> dict[str, Any]:
    """Windows, second rope and query scale. The file may leave them out: llama.cpp then takes what is written here."""
    num_layers, head_dim = numbers["num_layers"], numbers["head_dim"]
    pattern = fields.get("attention.sliding_window_pattern", GEMMA_PERIOD)
    if isinstance(pattern, list):
        local = tuple(map(bool, pattern))
        if len(local) != num_layers:
            raise fields.bad("attention.sliding_window_pattern", f"must have one entry for each of {num_layers} layers")
    else:
        local = repeating_local_layers(num_layers, fields.integer("attention.sliding_window_pattern", GEMMA_PERIOD))
    scaled_dim = numbers["embed_dim"] / numbers["num_heads"] if num_layers == _GEMMA_27B_LAYERS else head_dim
    return {
        "window": fields.integer("attention.sliding_window", GEMMA_WINDOW),
        "local_layers": local,
        "local_rope": RopeConfig(theta=fields.number("rope.freq_base_swa", GEMMA_LOCAL_THETA)),
        "query_scale": fields.number("attention.scale", scaled_dim**-0.5),
    }


def _tensor(where: str, header: GgufHeader, name: str) -> Extent:
    if name not in header.tensors:
        raise BadCheckpoint(f"{where}: tensor {name} is missing", tensor=name)
    return header.tensors[name]


def _rope(fields: Fields, factors: Extent | None, head_dim: int) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10_000.0)
    if factors is not None:
        return _llama3_rope(fields.where, theta, factors, head_dim)
    kind = fields.get("rope.scaling.type", "linear" if fields.get("rope.scale_linear") else "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = fields.number("rope.scaling.factor", fields.get("rope.scale_linear"))
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        raise fields.bad("rope.scaling.type", "must be none, linear or yarn")
    fields.refuse("rope.scaling.attn_factor", "a changed attention scale", allowed=(1.0,))
    fields.refuse("rope.scaling.yarn_attn_factor", "a changed attention scale", allowed=(1.0,))
    fields.refuse("rope.scaling.yarn_log_multiplier", "a changed attention scale")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_tokens=fields.integer("rope.scaling.original_context_length"),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _llama3_rope(where: str, theta: float, tensor: Extent, head_dim: int) -> RopeConfig:
    """GGUF stores Llama 3.1's blend as one divisor a frequency: find the blend that has these divisors."""
    if tensor.shape != (head_dim // 2,) or tensor.encoding.name != "F32":
        raise BadCheckpoint(
            f"{where}: {tensor.name} is {tensor.encoding.name}{list(tensor.shape)}, must be F32[{head_dim // 2}]",
            tensor=tensor.name,
        )
    found = tensor.read_rows(0, 1)[0]
    rope = RopeConfig(theta=theta, kind="llama3", factor=float(found.max()), original_max_tokens=_LLAMA3_CONTEXT)
    if not np.allclose(found, llama3_divisors(rope, head_dim), rtol=1e-3):
        raise BadCheckpoint(
            f"{where}: {tensor.name} holds frequency factors that are not Llama 3's; they are not supported",
            tensor=tensor.name,
        )
    return rope


def llama3_divisors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """By what Llama 3.1 divides each of the head_dim / 2 frequencies: 1 for fast ones, `factor` for slow ones.

    Between wavelengths of original / high_freq_factor and original / low_freq_factor the frequency (not the divisor)
    is blended linearly.
    """
    wavelength = 2 * np.pi * rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope.original_max_tokens / wavelength
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    divisors: np.ndarray = 1 / (kept + (1 - kept) / rope.factor)
    return divisors
