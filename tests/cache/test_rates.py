"""Predictions from what was measured here."""

from __future__ import annotations

import pytest

from zllm_jax.cache import Rates


def started() -> Rates:
    """The first measurements, with their compilations, are over."""
    rates = Rates()
    rates.restored(1, 1e6)
    rates.prefilled(1, 1e6)
    return rates


def test_restoring_is_tried_until_both_are_measured() -> None:
    rates = started()
    assert rates.predict(1 << 40, 1).restoring_wins
    rates.restored(1, 1.0)
    assert rates.predict(1 << 40, 1).restoring_wins
    rates.prefilled(1000, 1.0)
    assert not rates.predict(1 << 40, 1).restoring_wins


def test_one_slow_restore_does_not_decide_for_ever() -> None:
    rates = started()
    rates.prefilled(1000, 1.0)
    rates.restored(1000, 100.0)
    tries = []
    for _ in range(40):
        tries.append(rates.predict(1000, 1000).restoring_wins)
        rates.doubt()
    assert tries[:10] == [False] * 10
    assert tries[-1]


def test_the_shorter_time_wins() -> None:
    rates = started()
    rates.restored(1000, 1.0)
    rates.prefilled(10, 1.0)
    assert rates.predict(9_900, 100).restoring_wins
    assert not rates.predict(10_100, 100).restoring_wins


def test_long_measurements_count_more_and_new_ones_replace_old_ones() -> None:
    rates = started()
    rates.prefilled(5000, 10.0)
    rates.prefilled(1, 0.05)  # a tail of one token after a hit says little about 500 tokens/s
    assert rates.prefill_tokens_s == pytest.approx(500, rel=0.05)
    for _ in range(10):
        rates.prefilled(1000, 1.0)
    assert rates.prefill_tokens_s == pytest.approx(1000, rel=0.15)
