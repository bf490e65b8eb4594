"""Ceilings that need a device: how fast jax reads memory and multiplies matrices here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from zllm_jax.roofline import median_seconds

_sum_of_squares = jax.jit(lambda x: jnp.dot(x, x))
_product = jax.jit(lambda a, b: jnp.dot(a, b))


def read_rate(num_bytes: int = 256 << 20, *, repeats: int = 5) -> float:
    """Bytes a second that one reduction reads from device memory."""
    x = jnp.ones(num_bytes // 4, jnp.float32)  # f32[n]
    return num_bytes / _median(lambda: _sum_of_squares(x), repeats)


def matrix_rate(dtype: str, *, sizes: Sequence[int] = (512, 1024, 2048), repeats: int = 5) -> float:
    """FLOP/s of one square product [size, size] @ [size, size] in `dtype`, of the size that is fastest."""

    def rate(size: int) -> float:
        a = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
        return 2 * size**3 / _median(lambda: _product(a, a), repeats)

    return max(map(rate, sizes))


def _median(run: Callable[[], jax.Array], repeats: int) -> float:
    return median_seconds(lambda: run().block_until_ready(), repeats)
