"""How a sequence ended, as its caller is told."""

from __future__ import annotations

from typing import Literal

from zllm_jax.cache import Lease
from zllm_jax.fence import HostMatcher
from zllm_jax.runtime import Capacity
from zllm_jax.scheduler.sequence import Outcome, Sequence, clock
from zllm_jax.values import Status, Telemetry, Tier


def outcome_of(
    one: Sequence,
    capacity: Capacity,
    status: Status,
    finish: str,
    generated: int,
    conversation: str | None,
    error: str | None,
    *,
    loops_broken: int = 0,
) -> Outcome:
    """The outcome of a sequence that ends now. generated: tokens of the output; conversation: its id in the cache."""
    ended = clock()
    saved = one.job.max_tokens - len(one.drawn)
    lease = one.lease
    return Outcome(
        status=status,
        usage=one.usage(generated),
        timing=one.timing(ended),
        telemetry=Telemetry(
            sampling=one.job.sampling,
            seed=one.job.seed,
            fence=_fence(one),
            finish=finish,
            bytes_read=lease.bytes_read if lease is not None else 0,
            bytes_copied=lease.bytes_copied if lease is not None else 0,
            deadline_exceeded=finish == "deadline",
            saved_steps=saved,
            saved_bytes=saved * capacity.page_bytes // capacity.page_tokens,
            forced_tokens=min(one.num_forced, generated),
            termination="fault" if status is Status.FAULTED else "ok",
            predicted_restore_s=_predicted(lease),
            near_miss=lease.near_miss if lease is not None else None,
            loops_broken=loops_broken,
        ),
        conversation=conversation,
        ended=ended,
        error=error,
    )


def _fence(one: Sequence) -> Literal["device", "host", ""]:
    """Where the masks came from."""
    if one.job.fence is None:
        return ""
    return "host" if isinstance(one.job.fence, HostMatcher) else "device"


def _predicted(lease: Lease | None) -> float | None:
    """What the restore was expected to take."""
    restored = lease is not None and lease.tier is Tier.DISK and lease.predicted is not None
    return lease.predicted.restore_s if restored else None  # type: ignore[union-attr]
