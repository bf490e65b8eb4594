"""forced_runs over scripted times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from zllm_jax.errors import ConfigError
from zllm_jax.experiment.forced_runs import Settings, Signature, summarise
from zllm_jax.values import Envelope, Request, Status, Telemetry

Run = Callable[..., tuple[Any, Any]]
SLOW_S, FAST_S = 0.06, 0.01


@pytest.fixture
def timed(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appended calls are quick, drawn ones slow."""

    def generate(self: Any, request: Request) -> Envelope:
        time.sleep(FAST_S if self.appends else SLOW_S)
        forced = 3 if self.appends else 0
        return Envelope(
            request_id="r",
            status=Status.COMPLETED if request.max_tokens >= 6 else Status.TRUNCATED,
            tokens=(1,) * 6,
            text="abcdef",
            telemetry=Telemetry(forced_tokens=forced),
        )

    monkeypatch.setattr(scripted.ScriptedTimes, "generate", generate)


@pytest.mark.usefixtures("timed")
def test_the_modes_are_compared_pair_by_pair(run: Run) -> None:
    report, engine = run("forced_runs", "settings.batches=[1, 2]", "settings.enforce_targets=true")
    results = report.results
    assert results.ok
    assert engine.appends
    assert len(results.rows) == 2 * 2 * 2 * 2  # functions, batches, repetitions, modes
    assert 2 < results.summary["speedup_1"] <= SLOW_S / FAST_S + 0.5
    assert results.summary["forced_share_2"] == pytest.approx(0.5)
    assert [row[0] for row in report.tables[0].rows] == ["1 at a time", "2 at a time"]
    assert (report.folder / "rounds.svg").exists()


@pytest.mark.usefixtures("timed")
def test_a_target_that_is_missed_fails_only_when_enforced(run: Run) -> None:
    assert run("forced_runs", "settings.min_speedup=99")[0].results.ok
    assert not run("forced_runs", "settings.min_speedup=99", "settings.enforce_targets=true")[0].results.ok


@pytest.mark.usefixtures("timed")
def test_a_call_that_is_cut_is_told(run: Run) -> None:
    report, _ = run("forced_runs", "settings.max_tokens=4")
    assert [check.ok for check in report.results.checks] == [False]


def test_speed_by_byte_allows_for_texts_of_different_length() -> None:
    row = {"function": "f", "batch": 1, "repetition": 0, "completed": 1, "tokens": 10, "forced_tokens": 5}
    rows = [
        row | {"mode": "appended", "seconds": 1.0, "text_bytes": 10},
        row | {"mode": "drawn", "seconds": 6.0, "text_bytes": 20},
    ]
    summary = summarise(rows)
    assert (summary["speedup_1"], summary["speedup_per_byte_1"]) == (6.0, 3.0)


def test_settings_that_measure_nothing_are_refused() -> None:
    one = Signature(name="f", parameters={"type": "object"})
    with pytest.raises(ConfigError, match=r"settings\.functions"):
        Settings(functions=())
    with pytest.raises(ConfigError, match=r"settings\.batches"):
        Settings(functions=(one,), batches=(0,))
    with pytest.raises(ConfigError, match="repetitions is 0"):
        Settings(functions=(one,), repetitions=0)
