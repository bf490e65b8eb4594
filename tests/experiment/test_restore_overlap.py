"""restore_overlap on a tiny model: it measures what it says, and its checks can fail."""

from __future__ import annotations

import dataclasses

import pytest

from zllm_jax.experiment.restore_overlap import Settings, _checks
from zllm_jax.experiment.restore_overlap_show import percentile, summarise

SETTINGS = Settings(snapshot_tokens=100, itl_factor=2.0)


def rows() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for mode, ttft_s in (("staged", 0.2), ("blocking", 0.3)):
        for place in ("disk_warm", "disk_cold"):
            times = {"ttft_s": ttft_s, "restore_s": 0.1, "prefill_s": ttft_s - 0.1}
            found.append({"measured": mode, "where": place, **times, "tier": "disk", "cached_tokens": 100, "token": 5})
    for condition, gap in (("alone", 0.01), ("beside_restore", 0.02), ("beside_prefill", 0.11)):
        found.append({"measured": "stream", "where": condition, "intervals_s": [gap] * 10, "other_tier": "disk"})
    found[-1]["chunks_s"] = [0.08, 0.1]
    return found


def test_nearest_rank() -> None:
    assert [percentile([3.0, 1.0, 2.0], percent) for percent in (1, 34, 99)] == [1.0, 2.0, 3.0]


def test_the_summary_and_the_checks() -> None:
    summary = summarise(rows())
    assert summary["gain_disk_warm"] == pytest.approx(1 / 3)
    assert (summary["p99_beside_prefill_s"], summary["chunk_s"]) == (0.11, 0.1)
    assert all(check.ok for check in _checks(rows(), summary, SETTINGS))


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({"token": 6}, 0),
        ({"tier": "cold"}, 1),
        ({"cached_tokens": 50}, 1),
    ],
)
def test_a_wrong_restore_fails(changed: dict[str, object], failing: int) -> None:
    found = rows()
    found[0] |= changed
    summary = summarise(found)
    assert [check.ok for check in _checks(found, summary, SETTINGS)].index(False) == failing


def test_a_stalled_stream_fails() -> None:
    summary = summarise(rows())
    strict = dataclasses.replace(SETTINGS, itl_factor=0.5)
    assert [check.ok for check in _checks(rows(), summary, strict)] == [True, True, True, False]
