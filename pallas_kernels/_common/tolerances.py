"""One table of tolerances by kernel and dtype. Each entry names mutants, near misses that it must reject.

A tolerance that a wrong kernel can pass proves nothing: 0.15 absolute, as seen elsewhere for attention, lets through a
softmax scale 2 % off. tests/kernels runs every mutant against its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Inputs = Mapping[str, Any]
Mutant = Callable[[Inputs], Inputs]


@dataclass(frozen=True)
class Tolerance:
    """bound: largest error that passes, by the metric of the kernel. mutants: changes of the inputs it must reject."""

    bound: float
    mutants: Mapping[str, Mutant]


def row_error(actual: Any, expected: Any) -> float:
    """Worst relative L2 error of a row [..., H]: |actual - expected| / |expected|, absolute where expected is 0.

    Relative by row, because the average of many values is small and would hide in an absolute bound; NaN gives inf.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    norm = np.linalg.norm(expected, axis=-1)
    error = np.linalg.norm(actual - expected, axis=-1) / np.where(norm > 0, norm, 1.0)
    return float(np.max(np.where(np.isnan(error), np.inf, error)))


def largest_error(actual: Any, expected: Any) -> float:
    """Largest absolute error; equal infinities are no error, NaN is an infinite one."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(actual == expected, 0.0, np.abs(actual - expected))
    return float(np.max(np.where(np.isnan(error), np.inf, error)))


def _times(name: str, factor: float) -> Mutant:
    """The input `name` times a factor, rounded to its own dtype."""

    def mutate(inputs: Inputs) -> Inputs:
        value = inputs[name]
        return {**inputs, name: value * factor if isinstance(value, float) else (value * factor).astype(value.dtype)}

    return mutate


def _next_tokens_bits(inputs: Inputs) -> Inputs:
    """Every token takes the mask bit of the next one, words apart."""
    return {**inputs, "mask": inputs["mask"] >> np.uint32(1)}


ATTENTION_MUTANTS = {"scale 2 % off": _times("scale", 1.02), "values 10 % off": _times("v_pool", 1.1)}
SAMPLER_MUTANTS = {
    "temperature 0.1 % off": _times("temperature", 1.001),
    "mask one bit off": _next_tokens_bits,
}

# (kernel, dtype) -> by `row_error` for paged_attention, by `largest_error` of the log-probability for masked_sampler,
# which computes in float32 whatever the logits' dtype. bfloat16 attention rounds its weights and its output to 8 bits:
# 2^-9 = 0.2 % each.
TOLERANCES: Mapping[tuple[str, str], Tolerance] = {
    ("paged_attention", "float32"): Tolerance(5e-6, ATTENTION_MUTANTS),
    ("paged_attention", "bfloat16"): Tolerance(8e-3, ATTENTION_MUTANTS),
    ("masked_sampler", "float32"): Tolerance(2e-5, SAMPLER_MUTANTS),
    ("masked_sampler", "bfloat16"): Tolerance(2e-5, SAMPLER_MUTANTS),
}
