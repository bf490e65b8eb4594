"""Costs against the arrays that a model really has, and against a count by hand."""

from __future__ import annotations

import dataclasses

from zllm_jax.config import ModelConfig
from zllm_jax.roofline import decode_step_bytes, kv_bytes_per_token, layer_params, prefill_flops
from zllm_jax.testing import tiny_config

LLAMA3_70B = ModelConfig(
    arch="llama",
    num_layers=80,
    embed_dim=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    ffn_dim=28672,
    vocab_size=128_256,
    max_context_tokens=131_072,
    tied_embeddings=False,
)


def test_llama_3_70b() -> None:
    assert kv_bytes_per_token(LLAMA3_70B, 2) == 327_680
    params = 80 * layer_params(LLAMA3_70B) + 2 * 128_256 * 8192
    assert abs(params / 70.55e9 - 1) < 2e-3


def test_a_decode_step_reads_weights_once_and_each_row_s_state() -> None:
    cfg = tiny_config("llama")

    def read(batch: int, context: int) -> int:
        return decode_step_bytes(cfg, batch=batch, context_tokens=context, weight_itemsize=4, kv_itemsize=2)

    weights = 4 * (2 * layer_params(cfg) + cfg.vocab_size * cfg.embed_dim)
    assert read(0, 100) == weights
    assert read(3, 100) == weights + 3 * 100 * kv_bytes_per_token(cfg, 2)


def test_window_layers_read_their_window_only() -> None:
    cfg = tiny_config("gemma3")  # two of three layers see 16 tokens
    plain = dataclasses.replace(cfg, local_layers=())
    sizes = [
        decode_step_bytes(c, batch=1, context_tokens=100, weight_itemsize=4, kv_itemsize=4)
        - decode_step_bytes(c, batch=0, context_tokens=100, weight_itemsize=4, kv_itemsize=4)
        for c in (cfg, plain)
    ]
    row = 2 * cfg.num_kv_heads * cfg.head_dim * 4
    assert sizes == [(16 + 16 + 100) * row, 300 * row]


def test_prefill_counts_what_the_masks_leave() -> None:
    cfg = tiny_config("gemma3")
    pairs = 0
    for layer in range(cfg.num_layers):
        for query in range(40):
            pairs += sum(1 for key in range(query + 1) if not cfg.is_local(layer) or query - key < cfg.window)
    expected = 2 * 40 * 3 * layer_params(cfg) + 4 * 4 * 16 * pairs + 2 * cfg.vocab_size * cfg.embed_dim
    assert prefill_flops(cfg, 40) == expected
