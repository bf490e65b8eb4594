"""Rotary frequencies against the formulas of their papers, written out one dimension at a time in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from zllm_jax.config import ContextExtension, RopeConfig
from zllm_jax.runtime import extend_context
from zllm_jax.runtime.rope import inverse_frequencies, rotate, rotation
from zllm_jax.testing import tiny_config

H = 64


def plain(i: int, theta: float) -> float:
    return theta ** (-2 * i / H)


def linear(i: int, rope: RopeConfig) -> float:
    """A position p turns as p / s did."""
    return plain(i, rope.theta) / rope.factor


def ntk(i: int, rope: RopeConfig) -> float:
    """The last dimension turns s times slower, the first as ever, geometric between."""
    return plain(i, rope.theta) * rope.factor ** (-2 * i / (H - 2))


def llama3(i: int, rope: RopeConfig) -> float:
    """Short wavelengths stay, long ones are stretched by s, a blend between (Llama 3.1)."""
    f = plain(i, rope.theta)
    wavelength = 2 * math.pi / f
    if wavelength < rope.original_max_tokens / rope.high_freq_factor:
        return f
    if wavelength > rope.original_max_tokens / rope.low_freq_factor:
        return f / rope.factor
    share = (rope.original_max_tokens / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - share) * f / rope.factor + share * f


def yarn(i: int, rope: RopeConfig) -> float:
    """Stretched by a ramp over the dimensions between beta_fast and beta_slow turns (arXiv 2309.00071, eq. 17-23)."""

    def dimension(turns: float) -> float:
        return H * math.log(rope.original_max_tokens / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    low, high = math.floor(dimension(rope.beta_fast)), math.ceil(dimension(rope.beta_slow))
    stretched = min(max((i - low) / (high - low), 0.0), 1.0)
    f = plain(i, rope.theta)
    return stretched * f / rope.factor + (1 - stretched) * f


ROPES = {
    "default": (RopeConfig(theta=500_000.0), lambda i, rope: plain(i, rope.theta)),
    "linear": (RopeConfig(kind="linear", factor=8.0), linear),
    "ntk": (RopeConfig(kind="ntk", factor=4.0), ntk),
    "llama3": (RopeConfig(theta=500_000.0, kind="llama3", factor=8.0, original_max_tokens=8192), llama3),
    "yarn": (RopeConfig(theta=100_000.0, kind="yarn", factor=4.0, original_max_tokens=4096), yarn),
}


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies(kind: str) -> None:
    rope, formula = ROPES[kind]
    found, scale = inverse_frequencies(rope, H)
    np.testing.assert_allclose(found, [formula(i, rope) for i in range(H // 2)], rtol=2e-6)
    assert scale == pytest.approx(0.1 * math.log(4.0) + 1 if kind == "yarn" else 1.0)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_blend_reaches_both_ends(kind: str) -> None:
    """The cases above tell the kinds apart: some dimensions stay, some are stretched, some lie between."""
    rope, _ = ROPES[kind]
    ratio = inverse_frequencies(replace(rope, kind="default"), H)[0] / inverse_frequencies(rope, H)[0]
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(rope.factor)
    assert ((ratio > 1.01) & (ratio < rope.factor - 0.01)).any()


def test_rotation_turns_pairs_by_their_angle() -> None:
    """Halves of a head are the real and imaginary parts of H/2 numbers, each turned by position times frequency."""
    rope = RopeConfig()
    x = np.random.default_rng(0).standard_normal((2, 3, 4, H)).astype(np.float32)
    positions = np.array([[0, 1, 2], [7, 8, 4000]], np.int32)
    found = np.asarray(rotate(jnp.asarray(x), *rotation(rope, H, jnp.asarray(positions))), np.float64)
    angle = positions[..., None, None] * np.array([plain(i, rope.theta) for i in range(H // 2)])
    wanted = (x[..., : H // 2] + 1j * x[..., H // 2 :].astype(np.float64)) * np.exp(1j * angle)
    np.testing.assert_allclose(found[..., : H // 2], wanted.real, atol=2e-3)
    np.testing.assert_allclose(found[..., H // 2 :], wanted.imag, atol=2e-3)
    np.testing.assert_allclose(found[0], np.concatenate([wanted.real, wanted.imag], -1)[0], atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn"])
def test_extending_the_context(kind: str) -> None:
    cfg = tiny_config("gemma3")
    longer = extend_context(cfg, ContextExtension(kind=kind, factor=2.5))
    assert longer.max_context_tokens == 1280
    assert (longer.rope.kind, longer.rope.factor, longer.rope.original_max_tokens) == (kind, 2.5, 512)
    assert longer.local_rope == cfg.local_rope


def test_no_extension_changes_nothing() -> None:
    cfg = tiny_config("llama")
    assert extend_context(cfg, None) is cfg
    assert extend_context(cfg, ContextExtension(factor=1.0)) is cfg


def test_a_scaled_model_is_not_extended_again() -> None:
    longer = extend_context(tiny_config("llama"), ContextExtension())
    with pytest.raises(ValueError, match=r"already scaled \(yarn\)"):
        extend_context(longer, ContextExtension())
