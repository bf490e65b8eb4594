"""Hugging Face directories: config.json, (sharded) safetensors, tokenizer files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zllm_jax.checkpoint.base import TokenizerFiles
from zllm_jax.checkpoint.encodings import Extent
from zllm_jax.checkpoint.hf_config import hf_config
from zllm_jax.checkpoint.jsonfile import read_json
from zllm_jax.checkpoint.safetensors_header import read_tensors
from zllm_jax.checkpoint.tensor_files import Source, TensorFiles, match_tensors
from zllm_jax.config import ModelConfig
from zllm_jax.errors import BadCheckpoint

INDEX = "model.safetensors.index.json"
_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "bo": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
}
_GEMMA_LAYER = _LAYER | {
    "post_attn_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "post_ffn_norm": "post_feedforward_layernorm.weight",
}
# Where the text model stands: alone, or beside a vision tower (newer and older transformers).
_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")
_NOT_TEXT = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|.*\.rotary_emb\.inv_freq$")


def open_hf_directory(folder: Path) -> TensorFiles:
    """The checkpoint in `folder`. Raises `BadCheckpoint`."""
    where = str(folder / "config.json")
    raw = read_json(folder / "config.json")
    generation = _optional(folder / "generation_config.json")
    config = hf_config(where, raw, generation)
    tensors, files = _tensors(folder)
    matched = match_tensors(
        str(folder),
        config,
        tensors,
        _stored_names(folder, config, tensors),
        ignored=[name for name in tensors if _NOT_TEXT.match(name) or (config.tied_embeddings and "lm_head." in name)],
    )
    sources = {}
    for name, extent in matched.items():
        part = name.rpartition(".")[2]
        unit_offset = config.arch == "gemma3" and part.endswith("norm")
        sources[name] = Source(extent, transposed=part.startswith("w"), unit_offset=unit_offset)
    settings = _optional(folder / "tokenizer_config.json")
    return TensorFiles(
        folder,
        config,
        sources,
        hashed=[folder / "config.json", *files],
        tokenizer=_tokenizer(folder, settings, config),
        chat_template=_chat_template(folder, settings),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _tensors(folder: Path) -> tuple[dict[str, Extent], list[Path]]:
    """Every tensor of the folder, from one file or from the shards that the index names."""
    if not (folder / INDEX).is_file():
        path = folder / "model.safetensors"
        return read_tensors(path), [path]
    where = folder / INDEX
    places = read_json(where).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise BadCheckpoint(f"{where}: weight_map must map tensor names to file names")
    names = sorted(set(places.values()))
    if unsafe := [name for name in names if Path(name).name != name]:
        raise BadCheckpoint(f"{where}: shard {unsafe[0]!r} must be a plain file name")
    shards = {name: read_tensors(folder / name) for name in names}
    tensors = {}
    for tensor, shard in places.items():
        if tensor not in shards[shard]:
            raise BadCheckpoint(f"{folder / shard}: tensor {tensor} is missing; {INDEX} says it is here", tensor=tensor)
        tensors[tensor] = shards[shard][tensor]
    return tensors, [folder / name for name in names]


def _stored_names(folder: Path, config: ModelConfig, tensors: Mapping[str, Extent]) -> Callable[[str], str]:
    embeddings = [name for prefix in _PREFIXES if (name := f"{prefix}embed_tokens.weight") in tensors]
    if len(embeddings) != 1:
        found = ", ".join(embeddings) or "none"
        raise BadCheckpoint(f"{folder}: one embed_tokens.weight is needed, found {found}", tensor="embed_tokens.weight")
    prefix = embeddings[0].removesuffix("embed_tokens.weight")
    layers = _GEMMA_LAYER if config.arch == "gemma3" else _LAYER
    head = next((name for name in tensors if name.endswith("lm_head.weight")), "lm_head.weight")
    top = {"embed": f"{prefix}embed_tokens.weight", "final_norm": f"{prefix}norm.weight", "head": head}

    def stored(name: str) -> str:
        if name in top:
            return top[name]
        _, layer, part = name.split(".")
        return f"{prefix}layers.{layer}.{layers[part]}"

    return stored


def _tokenizer(folder: Path, settings: Mapping[str, Any], config: ModelConfig) -> TokenizerFiles | None:
    json_file, model_file = (folder / name for name in ("tokenizer.json", "tokenizer.model"))
    if not json_file.is_file() and not model_file.is_file():
        return None
    return TokenizerFiles(
        tokenizer_json=json_file if json_file.is_file() else None,
        sentencepiece=model_file if model_file.is_file() and not json_file.is_file() else None,
        settings=settings,
        bos_id=config.bos_id,
        eos_ids=config.eos_ids,
    )


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """A file of its own wins over the setting, which may be one text or a list of named ones."""
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    template = _optional(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
