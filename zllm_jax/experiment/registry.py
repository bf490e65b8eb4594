"""The experiment kinds by name. A new kind is one file and one line here."""

from __future__ import annotations

from zllm_jax.experiment import cache_granularity, cache_trace, decode_speed, ttft_restore
from zllm_jax.experiment.kind import Kind

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (ttft_restore.KIND, decode_speed.KIND, cache_trace.KIND, cache_granularity.KIND)
}
