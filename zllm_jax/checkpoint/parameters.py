"""The canonical parameters of a model: names and shapes that every format is brought to and the runtime relies on."""

from __future__ import annotations

from zllm_jax.config import ModelConfig


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape, outermost first. Products are `x @ W`; norms multiply; rotary halves are [first, second].

    `embed [V, D]`, `final_norm [D]`, `head [V, D]` (untied only); below `layers.<i>.`: `attn_norm [D]`, `wq [D, N*H]`,
    `wk`, `wv [D, K*H]`, `wo [N*H, D]`, biases `bq`, `bk`, `bv`, `bo`, `q_norm`, `k_norm [H]`, `ffn_norm [D]`,
    `w_gate`, `w_up [D, F]`, `w_down [F, D]`, and for Gemma `post_attn_norm`, `post_ffn_norm [D]`.
    """
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, config.embed_dim)}
    layer = _layer_shapes(config)
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["final_norm"] = (config.embed_dim,)
    if not config.tied_embeddings:
        shapes["head"] = (config.vocab_size, config.embed_dim)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    embed, head, ffn = config.embed_dim, config.head_dim, config.ffn_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (embed,),
        "wq": (embed, queries),
        "wk": (embed, keys),
        "wv": (embed, keys),
        "wo": (queries, embed),
        "ffn_norm": (embed,),
        "w_gate": (embed, ffn),
        "w_up": (embed, ffn),
        "w_down": (ffn, embed),
    }
    if config.attention_bias:
        shapes |= {"bq": (queries,), "bk": (keys,), "bv": (keys,)}
    if config.output_bias:
        shapes["bo"] = (embed,)
    if config.qk_norm:
        shapes |= {"q_norm": (head,), "k_norm": (head,)}
    if config.arch == "gemma3":
        shapes |= {"post_attn_norm": (embed,), "post_ffn_norm": (embed,)}
    return shapes
