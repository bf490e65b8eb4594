"""Timing for the benches. Rates are of this machine and this run; nothing here knows a device's data sheet."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

COPY_BYTES = 1 << 28  # larger than any cache between the cores and the memory


class Case(Protocol):
    """What a kernel's cases have in common."""

    @property
    def name(self) -> str: ...
    @property
    def bytes_moved(self) -> int: ...
    def inputs(self, seed: int = 0) -> dict[str, Any]: ...


def median_s(call: Callable[[], Any], repetitions: int = 10) -> float:
    """Median seconds of a call to its finished result, after one call that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bytes_per_s() -> float:
    """Measured rate of the device's memory: bytes read plus bytes written a second by `x + 1`."""
    x = jnp.zeros(COPY_BYTES // 4, jnp.float32)
    add_one = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / median_s(lambda: add_one(x))


def bench(kernel: Callable[..., Any], cases: Iterable[Case]) -> None:
    """Print a line a case: time, least bytes, rate, and its share of this device's copy rate in the same run."""
    copy_rate = copy_bytes_per_s()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: copies at {copy_rate / 1e9:.1f} GB/s")
    for case in cases:
        inputs = case.inputs()
        arrays = {name: jnp.asarray(value) for name, value in inputs.items() if isinstance(value, np.ndarray)}
        static = {name: value for name, value in inputs.items() if name not in arrays}
        step = jax.jit(functools.partial(kernel, **static))
        seconds = median_s(functools.partial(step, **arrays))
        rate = case.bytes_moved / seconds
        print(
            f"{case.name:28} {seconds * 1e6:10.0f} us {case.bytes_moved / 1e6:8.2f} MB {rate / 1e9:8.2f} GB/s "
            f"{rate / copy_rate:6.1%} of copying"
        )
