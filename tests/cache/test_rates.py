"""Predictions from what was measured here."""

from __future__ import annotations

import pytest

from zllm_jax.cache import Rates


def started() -> Rates:
    """The first measurements, with their compilations, are over."""
    rates = Rates()
    rates.restored(1, 1e6)
    rates.prefilled(0, 1, 1e6)
    return rates


def test_restoring_is_tried_until_both_are_measured() -> None:
    rates = started()
    assert rates.predict(1 << 40, 0, 1).restoring_wins
    rates.restored(1, 1.0)
    assert rates.predict(1 << 40, 0, 1).restoring_wins
    rates.prefilled(0, 1000, 1.0)
    assert not rates.predict(1 << 40, 0, 1).restoring_wins


def test_one_slow_restore_does_not_decide_for_ever() -> None:
    rates = started()
    rates.prefilled(0, 1000, 1.0)
    rates.restored(1000, 100.0)
    tries = []
    for _ in range(40):
        tries.append(rates.predict(1000, 0, 1000).restoring_wins)
        rates.doubt()
    assert tries[:10] == [False] * 10
    assert tries[-1]


def test_the_shorter_time_wins() -> None:
    rates = started()
    rates.restored(1000, 1.0)
    rates.prefilled(0, 10, 1.0)
    assert rates.predict(9_900, 0, 100).restoring_wins
    assert not rates.predict(10_100, 0, 100).restoring_wins


def test_long_measurements_count_more_and_new_ones_replace_old_ones() -> None:
    rates = started()
    rates.prefilled(0, 5000, 10.0)
    rates.prefilled(0, 1, 0.05)  # a tail of one token after a hit says little about 500 tokens/s
    assert rates.prefill_tokens_s == pytest.approx(500, rel=0.05)
    for _ in range(10):
        rates.prefilled(0, 1000, 1.0)
    assert rates.prefill_tokens_s == pytest.approx(1000, rel=0.15)


# -- positions -------------------------------------------------------------------------------------------------------

BASE, SLOPE = 1.8e-3, 7.5e-7  # seconds of a token, and what each token before it adds


def took(start: int, stop: int, base: float = BASE, slope: float = SLOPE) -> float:
    return base * (stop - start) + slope * (stop**2 - start**2) / 2


def learnt(*measured: tuple[int, int], **costs: float) -> Rates:
    rates = started()
    for start, stop in measured:
        rates.prefilled(start, stop, took(start, stop, **costs))
    return rates


VARIED = [(0, 300), (0, 2000), (1000, 6000), (0, 900), (0, 4000)]


@pytest.mark.parametrize("start, stop", [(0, 100), (0, 6000), (5000, 6000), (100, 200)])
def test_a_late_token_costs_more_than_an_early_one(start: int, stop: int) -> None:
    assert learnt(*VARIED).prefill_s(start, stop) == pytest.approx(took(start, stop))


def test_what_was_computed_late_is_worth_more_and_restored_rather() -> None:
    rates = learnt(*VARIED)
    rates.restored(1000, 1.0)
    early_s, late_s = took(0, 500), took(5500, 6000)
    between = int(1000 * (early_s + late_s) / 2)
    assert not rates.predict(between, 0, 500).restoring_wins
    assert rates.predict(between, 5500, 6000).restoring_wins
    assert rates.seconds_back(None, 5500, 6000) > 2 * rates.seconds_back(None, 0, 500)
    assert rates.seconds_back(between, 5500, 6000) == pytest.approx(between / 1000)


@pytest.mark.parametrize(
    "measured", [VARIED[:3], [(0, 1000 + i) for i in range(9)], [*VARIED[:2], *((4000 + i, 4020) for i in range(9))]]
)
def test_too_few_or_too_equal_positions_give_the_flat_rate(measured: list[tuple[int, int]]) -> None:
    """The last: tails of a few tokens, which tell what a call costs."""
    rates = learnt(*measured)
    assert rates.prefill_s(5000, 6000) == pytest.approx(1000 / rates.prefill_tokens_s)


def test_tails_do_not_pass_for_positions() -> None:
    """Each pays for a call, whatever its position."""
    rates = learnt(*VARIED)
    for i in range(100):
        rates.prefilled(5900, 5901 + i % 20, 0.5)
    assert rates.prefill_s(0, 6000) == pytest.approx(took(0, 6000))


@pytest.mark.parametrize("base, slope", [(0.0, 1e-6), (-1e-3, 4e-6), (2e-3, 0.0), (5e-3, -4e-7)])
def test_no_part_of_a_prompt_costs_less_than_nothing(base: float, slope: float) -> None:
    """What measurements seem to say, as when the short prompts came while others computed."""
    rates = started()
    for start, stop in VARIED:
        rates.prefilled(start, stop, max(1e-6, took(start, stop, base, slope)))
    parts = [rates.prefill_s(start, start + 500) for start in range(0, 20_000, 500)]
    assert all(part is not None and part >= 0 for part in parts)
    assert parts == sorted(parts)  # type: ignore[type-var]


def test_behind_what_was_measured_nothing_is_guessed() -> None:
    rates = learnt(*VARIED)
    assert rates.prefill_s(60_000, 61_000) == pytest.approx(1000 * (BASE + SLOPE * 6000))


def test_a_prediction_changes_nothing() -> None:
    rates = learnt(*VARIED)
    rates.restored(1000, 1.0)
    before = repr(rates)
    rates.predict(1000, 0, 6000), rates.seconds_back(1000, 0, 6000), rates.prefill_s(0, 6000)
    assert repr(rates) == before


def test_positions_are_learnt_anew_when_the_machine_changes() -> None:
    rates = learnt(*VARIED)
    for start, stop in VARIED * 8:
        rates.prefilled(start, stop, took(start, stop, BASE * 2, SLOPE * 2))
    assert rates.prefill_s(0, 6000) == pytest.approx(2 * took(0, 6000), rel=0.05)
