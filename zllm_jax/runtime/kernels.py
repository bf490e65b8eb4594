"""Which implementation a step runs of each operation that has a kernel of ours, and why: for people to read."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class KernelChoice:
    """One operation, what computes it on this machine's default platform, and the reason."""

    operation: str
    implementation: str
    reason: str


def kernel_choices() -> tuple[KernelChoice, ...]:
    """The choices for the default platform. Starts jax's backend."""
    platform = jax.default_backend()
    if platform == "tpu":
        reason = "the Pallas kernel stands beside it and is tried on its own; the steps do not call it yet"
    else:
        reason = f"the Pallas kernel is written for TPU, this machine's platform is {platform}"
    return (
        KernelChoice("paged attention", "reference (XLA)", reason),
        KernelChoice("sampling", "reference (XLA)", reason),
    )
