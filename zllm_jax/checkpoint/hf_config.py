"""Hugging Face's `config.json` -> `ModelConfig`, in its older and its newer (`rope_parameters`) form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zllm_jax.checkpoint.fields import Fields, model_config, repeating_local_layers
from zllm_jax.config import ModelConfig, RopeConfig
from zllm_jax.errors import BadCheckpoint

# config.json leaves out what equals the default of transformers' class.
_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "vocab_size": 32000, "hidden_act": "silu"}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"max_position_embeddings": 2048},
    "mistral": _COMMON | {"num_key_value_heads": 8, "sliding_window": None},
    "qwen2": _COMMON | {"num_key_value_heads": 32, "vocab_size": 151936},
    "qwen3": _COMMON | {"num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936},
    "gemma3_text": _COMMON
    | {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
}
_UNSUPPORTED = {
    "quantization_config": "quantised weights",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "mlp_bias": "biases in the feed-forward part",
    "use_bidirectional_attention": "attention that is not causal",
}


def hf_config(where: str, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The configuration in `config.json` (`raw`); `generation_config.json` overrides the end-of-text ids.

    Raises `BadCheckpoint` for a model type, rope or feature that is not known.
    """
    model_type = str(raw.get("model_type"))
    if model_type == "gemma3":  # with a vision tower: the text model's part is nested
        raw, model_type = raw.get("text_config") or {}, "gemma3_text"
    if model_type not in _DEFAULTS:
        known = ", ".join(("gemma3", *_DEFAULTS))
        raise BadCheckpoint(f"{where}: model_type {model_type!r} is unknown; known are {known}")
    if not isinstance(raw, Mapping):
        raise BadCheckpoint(f"{where}: text_config must be an object")
    gemma = model_type == "gemma3_text"
    fields = Fields(where, raw, _DEFAULTS[model_type])
    for key, feature in _UNSUPPORTED.items():
        fields.refuse(key, feature)
    activation = "hidden_activation" if gemma and fields.get("hidden_activation") else "hidden_act"
    if fields.get(activation) != _DEFAULTS[model_type]["hidden_act"]:
        raise fields.bad(activation, f"must be {_DEFAULTS[model_type]['hidden_act']}")
    num_heads = fields.integer("num_attention_heads")
    embed_dim = fields.integer("hidden_size")
    attention_bias = fields.flag("attention_bias", False)
    numbers: dict[str, Any] = {
        "num_layers": fields.layers("num_hidden_layers"),
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", num_heads),
        "head_dim": fields.integer("head_dim", embed_dim // num_heads),
        "ffn_dim": fields.integer("intermediate_size"),
        "vocab_size": fields.integer("vocab_size"),
        "max_context_tokens": fields.integer("max_position_embeddings"),
        "rms_eps": fields.number("rms_norm_eps"),
        "tied_embeddings": fields.flag("tie_word_embeddings", False),
        "qk_norm": model_type in ("qwen3", "gemma3_text"),
        "attention_bias": attention_bias or model_type == "qwen2",
        "output_bias": attention_bias and model_type != "qwen2",
        "eos_ids": Fields(where, generation, raw).tokens("eos_token_id") or fields.tokens("eos_token_id"),
        "bos_id": fields.token("bos_token_id"),
    }
    if gemma:
        return model_config(where, arch="gemma3", **numbers, **_gemma(fields, numbers["num_layers"]))
    if model_type == "mistral" or fields.get("use_sliding_window"):
        fields.refuse("sliding_window", "a sliding window in every layer")
    rope = _rope(fields, _rope_parameters(fields, "full_attention", "rope_theta"))
    if rope.kind == "yarn":
        extended = int(rope.factor * rope.original_max_tokens)
        numbers["max_context_tokens"] = max(numbers["max_context_tokens"], extended)
    return model_config(where, arch="llama", **numbers, rope=rope)


def _gemma(fields: Fields, num_layers: int) -> dict[str, Any]:
    kinds = fields.get("layer_types")
    if kinds is None:
        key = "_sliding_window_pattern" if "_sliding_window_pattern" in fields.values else "sliding_window_pattern"
        local = repeating_local_layers(num_layers, fields.integer(key))
    else:
        names = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in names for kind in kinds):
            raise fields.bad("layer_types", f"must have one of {', '.join(names)} for each of {num_layers} layers")
        local = tuple(kind == "sliding_attention" for kind in kinds)
    local_rope = _rope_parameters(fields, "sliding_attention", "rope_local_base_freq")
    if "rope_parameters" not in fields.values:
        local_rope = {"rope_theta": local_rope["rope_theta"]}  # the older rope_scaling is for global layers only
    return {
        "window": fields.integer("sliding_window"),
        "local_layers": local,
        "rope": _rope(fields, _rope_parameters(fields, "full_attention", "rope_theta")),
        "local_rope": _rope(fields, local_rope),
        "query_scale": fields.number("query_pre_attn_scalar") ** -0.5,
    }


def _rope_parameters(fields: Fields, layer_type: str, theta_key: str) -> dict[str, Any]:
    """The rope of one kind of layer with its `rope_theta`, from whichever of the two forms the file has."""
    parameters = _object(fields, "rope_parameters") or _object(fields, "rope_scaling")
    if layer_type in parameters:
        parameters = parameters[layer_type]
        if not isinstance(parameters, dict):
            raise fields.bad("rope_parameters", f"must have an object as its {layer_type}")
    return {"rope_theta": fields.get(theta_key, 10_000.0)} | parameters


def _object(fields: Fields, key: str) -> dict[str, Any]:
    value = fields.get(key, {})
    if not isinstance(value, dict):
        raise fields.bad(key, "must be an object")
    return value


def _rope(fields: Fields, parameters: Mapping[str, Any]) -> RopeConfig:
    rope = Fields(f"{fields.where} (rope)", parameters, {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = rope.number("rope_theta")
    rope.refuse("partial_rotary_factor", "rotation of a part of each head", allowed=(1, 1.0))
    fields.refuse("partial_rotary_factor", "rotation of a part of each head", allowed=(1, 1.0))
    trained = fields.integer("max_position_embeddings")
    if kind in ("default", "dynamic"):
        # "dynamic" scales only beyond max_position_embeddings, which is all that such a model is given here.
        return RopeConfig(theta=theta)
    if kind in ("linear", "ntk"):
        return RopeConfig(theta=theta, kind=kind, factor=rope.number("factor"), original_max_tokens=trained)
    if kind == "yarn":
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            rope.refuse(key, "a changed attention scale")
        if rope.get("truncate") is False:
            raise rope.bad("truncate", "must be true")
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=rope.number("factor"),
            original_max_tokens=rope.integer("original_max_position_embeddings", trained),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
        )
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=rope.number("factor"),
            original_max_tokens=rope.integer("original_max_position_embeddings"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    key = "rope_type" if rope.get("rope_type") else "type"
    raise rope.bad(key, "must be default, linear, dynamic, ntk, yarn or llama3")
