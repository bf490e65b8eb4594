"""GGUF files: tensor names and vocabulary brought to the canonical form."""

from __future__ import annotations

from pathlib import Path

from zllm_jax.checkpoint.base import TokenizerFiles, Vocabulary
from zllm_jax.checkpoint.fields import Fields
from zllm_jax.checkpoint.gguf_config import end_ids, gguf_config
from zllm_jax.checkpoint.gguf_header import GgufHeader, read_header
from zllm_jax.checkpoint.tensor_files import Source, TensorFiles, match_tensors
from zllm_jax.config import ModelConfig
from zllm_jax.errors import BadCheckpoint

_TOP = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER = {
    "attn_norm": "attn_norm.weight",
    "wq": "attn_q.weight",
    "wk": "attn_k.weight",
    "wv": "attn_v.weight",
    "wo": "attn_output.weight",
    "bq": "attn_q.bias",
    "bk": "attn_k.bias",
    "bv": "attn_v.bias",
    "bo": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "w_gate": "ffn_gate.weight",
    "w_up": "ffn_up.weight",
    "w_down": "ffn_down.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "post_ffn_norm": "post_ffw_norm.weight",
}


def open_gguf(path: Path) -> TensorFiles:
    """The checkpoint in one GGUF file. Raises `BadCheckpoint`."""
    header = read_header(path)
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise BadCheckpoint(f"{path} is one of {header.metadata['split.count']} parts: merge them (gguf-split --merge)")
    config = gguf_config(str(path), header)
    tensors = match_tensors(str(path), config, header.tensors, _stored_name, ignored=("rope_freqs.weight",))
    # llama.cpp reorders the heads of this architecture only, for its interleaved rotation.
    interleaved = header.metadata["general.architecture"] == "llama"
    heads = {"wq": config.num_heads, "bq": config.num_heads, "wk": config.num_kv_heads, "bk": config.num_kv_heads}
    sources = {}
    for name, extent in tensors.items():
        part = name.rpartition(".")[2]
        sources[name] = Source(
            extent, transposed=part.startswith("w"), interleaved_heads=heads.get(part, 0) if interleaved else 0
        )
    return TensorFiles(
        path,
        config,
        sources,
        hashed=[path],
        tokenizer=_tokenizer(str(path), header, config),
        chat_template=_chat_template(str(path), header),
    )


def _stored_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{_LAYER[part]}"


def _chat_template(where: str, header: GgufHeader) -> str | None:
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise BadCheckpoint(f"{where}: tokenizer.chat_template must be text, got {type(template).__name__}")
    return template


def _tokenizer(where: str, header: GgufHeader, config: ModelConfig) -> TokenizerFiles | None:
    prefix = "tokenizer.ggml."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    if "tokens" not in own:
        return None
    fields = Fields(where, own, {})
    tokens = own["tokens"]
    lists: dict[str, list[object]] = {key: own.get(key, []) for key in ("tokens", "token_type", "scores", "merges")}
    wanted = {"tokens": str, "token_type": int, "scores": float, "merges": str}
    for key, values in lists.items():
        if not isinstance(values, list) or (values and type(values[0]) is not wanted[key]):
            raise BadCheckpoint(f"{where}: {prefix}{key} must be a list of {wanted[key].__name__}")
        if values and key in ("token_type", "scores") and len(values) != len(tokens):
            raise BadCheckpoint(f"{where}: {prefix}{key} has {len(values)} entries for {len(tokens)} tokens")
    if len(tokens) > config.vocab_size:
        raise BadCheckpoint(f"{where}: {len(tokens)} tokens, but the embedding has only {config.vocab_size} rows")
    vocabulary = Vocabulary(
        kind=str(own.get("model")),
        pre=str(own.get("pre", "default")),
        tokens=tuple(tokens),
        types=tuple(own.get("token_type") or [1] * len(tokens)),
        scores=tuple(own.get("scores", ())),
        merges=tuple(own.get("merges", ())),
        add_bos=fields.flag("add_bos_token", False) if "add_bos_token" in own else None,
        add_space_prefix=fields.flag("add_space_prefix", True),
        unknown_id=fields.token("unknown_token_id"),
    )
    bos = fields.token("bos_token_id")
    return TokenizerFiles(vocabulary=vocabulary, bos_id=bos, eos_ids=end_ids(Fields(where, header.metadata, {})))
