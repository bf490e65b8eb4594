"""The experiment kinds by name. A new kind is one file and one line here."""

from __future__ import annotations

from zllm_jax.experiment import decode_speed, restore_overlap, soak, ttft_restore
from zllm_jax.experiment.kind import Kind

KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (ttft_restore.KIND, decode_speed.KIND, restore_overlap.KIND, soak.KIND)
}
