"""One layer's attention, whatever the layer keeps. A model says what its layers keep; it need not look again."""

from __future__ import annotations

import jax

from zllm_jax.runtime.attention import attend_pages, attend_ring, write_pages
from zllm_jax.runtime.batch import Batch
from zllm_jax.runtime.state import LayerState, Pages


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, kept: LayerState, batch: Batch, *, scale: float
) -> tuple[jax.Array, LayerState]:
    """q [B, T, N, H] over the layer's rows and the new ones k, v [B, T, K, H] -> the output, the layer's new state."""
    if isinstance(kept, Pages):
        kept = write_pages(kept, k, v, batch.table, batch.positions, batch.valid)
        return attend_pages(q, kept, batch.table, batch.positions, scale=scale), kept
    return attend_ring(q, k, v, kept, batch.rings, batch.positions, batch.valid, scale=scale)
