"""Timing for the benches. Rates are of this machine and this run; nothing here knows a device's data sheet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def median_s(call: Callable[[], Any], repetitions: int = 10) -> float:
    """Median seconds of a call to its finished result, after one call that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bytes_per_s(num_bytes: int = 1 << 28) -> float:
    """Measured rate of the device's memory: bytes read plus bytes written a second by `x + 1`."""
    x = jnp.zeros(num_bytes // 4, jnp.float32)
    add_one = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / median_s(lambda: add_one(x))
