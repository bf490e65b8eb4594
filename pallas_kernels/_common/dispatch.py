"""Choice of an implementation: a named one runs or raises, only `auto` chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

IMPLEMENTATIONS = ("auto", "reference", "tpu")


def dispatch(
    implementation: str,
    *operands: Any,
    reference: Callable[..., Any],
    tpu: Callable[..., Any],
    tpu_refuses: str | None,
) -> Any:
    """Call `reference` or `tpu` on the operands.

    `auto` takes the kernel where the program is lowered for a TPU, which need not be the platform that traces it, and
    the reference everywhere else. tpu_refuses: why the kernel can't take these shapes, or None; then `auto` takes the
    reference on a TPU too. Raises ValueError for an unknown name, or for `tpu` on shapes that it refuses.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation is {implementation!r}, must be one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "tpu" and tpu_refuses:
        raise ValueError(f"implementation 'tpu' can't take these arguments: {tpu_refuses}; 'auto' would")
    if implementation == "reference" or tpu_refuses:
        return reference(*operands)
    if implementation == "tpu":
        return tpu(*operands)
    return jax.lax.platform_dependent(*operands, tpu=tpu, default=reference)
