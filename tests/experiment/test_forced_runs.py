"""forced_runs over scripted times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from zllm_jax.errors import ConfigError
from zllm_jax.experiment.forced_runs import Function, Settings, summarise
from zllm_jax.values import Envelope, Request, Status, Telemetry, ToolCall

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
            calls=(ToolCall("c", request.tool_choice.name, {}),),
            telemetry=Telemetry(forced_tokens=forced),
        )

    monkeypatch.setattr(scripted.ScriptedTimes, "generate", generate)


@pytest.mark.usefixtures("timed")
def test_the_modes_are_compared_pair_by_pair(run: Run) -> None:
    options = ("settings.batches=[1, 2]", "settings.dialects=[chatml, glm]", "settings.enforce_targets=true")
    report, engine = run("forced_runs", *options)
    results = report.results
    assert results.ok
    assert engine.appends
    assert len(results.rows) == 2 * 2 * 2 * 2 * 2  # dialects, functions, batches, repetitions, modes
    assert 2 < results.summary["glm_1_speedup"] <= SLOW_S / FAST_S + 0.5
    assert results.summary["chatml_2_forced_share"] == pytest.approx(0.5)
    assert [row[0] for row in report.tables[0].rows] == [
        f"{dialect}, {batch} at a time" for dialect in ("chatml", "glm") for batch in (1, 2)
    ]
    assert (report.folder / "rounds.svg").exists()


@pytest.mark.usefixtures("timed")
def test_a_target_that_is_missed_fails_only_when_enforced(run: Run) -> None:
    assert run("forced_runs", "settings.min_speedup=99")[0].results.ok
    assert not run("forced_runs", "settings.min_speedup=99", "settings.enforce_targets=true")[0].results.ok


@pytest.mark.usefixtures("timed")
def test_a_call_that_is_cut_is_told(run: Run) -> None:
    report, _ = run("forced_runs", "settings.max_tokens=4")
    assert [check.ok for check in report.results.checks] == [False]


def test_speed_by_token_allows_for_outputs_of_different_length() -> None:
    row = {"dialect": "d", "function": "f", "batch": 1, "repetition": 0, "called": 1, "forced_tokens": 5}
    rows = [
        row | {"mode": "appended", "seconds": 1.0, "tokens": 10},
        row | {"mode": "drawn", "seconds": 6.0, "tokens": 20},
    ]
    summary = summarise(rows)
    assert (summary["d_1_speedup"], summary["d_1_speedup_per_token"]) == (6.0, 3.0)


def test_settings_that_measure_nothing_are_refused() -> None:
    one = Function(name="f", parameters={"type": "object"})
    for nothing in ({"functions": ()}, {"dialects": ()}, {"batches": ()}, {"batches": (0,)}):
        with pytest.raises(ConfigError, match=r"settings\.functions, dialects and batches"):
            Settings(**{"functions": (one,), **nothing})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="repetitions is 0"):
        Settings(functions=(one,), repetitions=0)
