"""What a machine can do and what a call must cost. Knows bytes, FLOPs and files; no jax, no engine, no model code."""

from __future__ import annotations

from zllm_jax.roofline.ceilings import DiskRates, copy_rate, disk_rates, drop_page_cache, median_seconds
from zllm_jax.roofline.cost import decode_step_bytes, kv_bytes_per_token, layer_params, prefill_flops

__all__ = [
    "DiskRates",
    "copy_rate",
    "decode_step_bytes",
    "disk_rates",
    "drop_page_cache",
    "kv_bytes_per_token",
    "layer_params",
    "median_seconds",
    "prefill_flops",
]
