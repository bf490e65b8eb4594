"""The experiment kinds by name. A new kind is one file and one line here."""

from __future__ import annotations

from zllm_jax.experiment import (
    cache_granularity,
    cache_trace,
    decode_speed,
    fence_overhead,
    forced_runs,
    restore_overlap,
    soak,
    ttft_restore,
)
from zllm_jax.experiment.kind import Kind

_MODULES = (
    ttft_restore,
    decode_speed,
    restore_overlap,
    cache_trace,
    cache_granularity,
    fence_overhead,
    forced_runs,
    soak,
)

KINDS: dict[str, Kind] = {module.KIND.name: module.KIND for module in _MODULES}
