"""What a call must move and compute, from a model's numbers alone. Letters as in docs/glossary.md."""

from __future__ import annotations

from zllm_jax.config import ModelConfig


def layer_params(cfg: ModelConfig) -> int:
    """Weights of one layer's products: 2DNH + 2DKH + 3DF. Norms and biases are left out (below 0.1 %)."""
    attention = 2 * cfg.embed_dim * cfg.head_dim * (cfg.num_heads + cfg.num_kv_heads)
    return attention + 3 * cfg.embed_dim * cfg.ffn_dim


def kv_bytes_per_token(cfg: ModelConfig, itemsize: int) -> int:
    """2 L K H b."""
    return 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * itemsize


def decode_step_bytes(
    cfg: ModelConfig, *, batch: int, context_tokens: int, weight_itemsize: int, kv_itemsize: int
) -> int:
    """Bytes one decode step must read: every product's weights once, the head once, each row's keys and values.

    Sliding-window layers read at most their window.
    """
    weights = (cfg.num_layers * layer_params(cfg) + cfg.vocab_size * cfg.embed_dim) * weight_itemsize
    row_tokens = sum(_span(cfg, layer, context_tokens) for layer in range(cfg.num_layers))
    return weights + batch * row_tokens * 2 * cfg.num_kv_heads * cfg.head_dim * kv_itemsize


def prefill_flops(cfg: ModelConfig, num_tokens: int) -> int:
    """Multiplies and adds of a prompt of T tokens: 2 T P for the products, 4 N H for each pair of query and key
    that the causal mask (and a layer's window) leaves, and the head for the last token only.
    """
    products = 2 * num_tokens * cfg.num_layers * layer_params(cfg)
    pairs = 0
    for layer in range(cfg.num_layers):
        span = _span(cfg, layer, num_tokens)
        pairs += span * (span + 1) // 2 + (num_tokens - span) * span
    return products + 4 * cfg.num_heads * cfg.head_dim * pairs + 2 * cfg.vocab_size * cfg.embed_dim


def _span(cfg: ModelConfig, layer: int, num_tokens: int) -> int:
    return min(num_tokens, cfg.window) if cfg.is_local(layer) else num_tokens
