"""The two experiments without an engine, on traces of a few requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zllm_jax.errors import ConfigError
from zllm_jax.experiment import Report, read_experiment, rebuild_report, run_experiment
from zllm_jax.experiment.cache_granularity import Settings as Granularity
from zllm_jax.experiment.cache_sim import Costs
from zllm_jax.experiment.cache_trace import Settings, Target
from zllm_jax.experiment.traces import Agents

Replay = Callable[..., Report]
SMALL = "settings.agents=[{name: agents, requests: 120}]"
COSTS = Costs(prefill_token_s=1.0, prefill_position_s=0.0, restore_bytes_s=1.0, write_bytes_s=1.0, token_bytes=1)


@pytest.fixture
def replay(repo: Path, tmp_path: Path) -> Replay:
    def never(*args: Any) -> Any:
        pytest.fail("an engine was opened")

    def go(name: str, *overrides: str) -> Report:
        config = read_experiment(repo / "experiments" / f"{name}.yaml", overrides=[SMALL, *overrides], quick=True)
        return run_experiment(config, never, out=tmp_path / "out", progress=lambda what, done, total: None)

    return go


def test_policies_are_compared_on_every_trace_and_memory(replay: Replay, repo: Path) -> None:
    path = repo / "tests" / "data" / "traces" / "handmade.jsonl"
    report = replay("cache_trace", f"settings.files=[{{name: mine, path: {path}}}]", "settings.memory=[0.1, 1.0]")
    results = report.results
    assert results.ok, results.checks
    places = {(row["trace"], row["memory"], row["disk"], row["policy"]) for row in results.rows}
    assert len(places) == len(results.rows) == 2 * 2 * 2 * 3
    assert results.summary["share_agents_clairvoyant_100"] >= results.summary["share_agents_lru_100"]
    assert all(row["hit_rate_disk"] == 0 == row["restore_s"] for row in results.rows if not row["disk"])
    assert any(row["written_bytes_per_saved_token"] for row in results.rows)
    assert rebuild_report(report.folder).page.read_text() == report.page.read_text()
    assert (report.folder / "saved.svg").exists()


def test_a_file_that_is_not_there_is_left_out_and_named(replay: Replay, tmp_path: Path) -> None:
    report = replay("cache_trace", f"settings.files=[{{name: theirs, path: {tmp_path}/absent.jsonl}}]")
    assert {row["trace"] for row in report.results.rows} == {"agents"}
    assert any("Left out, because the file is not there: theirs" in note for note in report.results.notes)


@pytest.mark.parametrize("target, ok", [("-0.9", True), ("9.0", False)])
def test_a_target_is_a_check(replay: Replay, target: str, ok: bool) -> None:
    targets = f"settings.targets=[{{trace: agents, memory: 0.25, min_gain: {target}}}]"
    report = replay("cache_trace", targets)
    assert report.results.checks[0].ok is ok
    assert report.results.ok is ok


def test_a_target_that_was_not_replayed_fails(replay: Replay) -> None:
    report = replay("cache_trace", "settings.targets=[{trace: agents, memory: 0.33, min_gain: 0.1}]")
    assert (report.results.checks[0].ok, report.results.checks[0].detail) == (False, "that was not replayed")


def test_blocks_lose_more_the_larger_they_are(replay: Replay) -> None:
    report = replay("cache_granularity")
    summary = report.results.summary
    assert report.results.ok
    lost = [summary[f"lost_tokens_agents_{block}_unlimited"] for block in (16, 64, 256)]
    assert 0 < lost[0] < lost[1] < lost[2] < 256
    assert lost[0] < 16
    assert summary["prefill_agents_256_unlimited"] > 0
    json.loads((report.folder / "results.json").read_text())


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"agents": (), "files": ()}, "nothing to replay"),
        ({"memory": (0.5, 0.0)}, "must be positive shares"),
        ({"page_tokens": 0}, "page_tokens is 0, must be at least 1"),
        ({"agents": (Agents(name="x"), Agents(name="x"))}, "two traces have one name"),
    ],
)
def test_settings_that_cannot_be_replayed_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(costs=COSTS, **changed)


@pytest.mark.parametrize(
    "changed, message",
    [({"blocks": (16,)}, "must hold 1"), ({"blocks": (1, 0)}, "must be positive"), ({"seeds": ()}, "at least one")],
)
def test_granularities_that_cannot_be_compared_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Granularity(costs=COSTS, **changed)


def test_the_committed_target_is_the_one_that_was_promised(repo: Path) -> None:
    config = read_experiment(repo / "experiments" / "cache_trace.yaml")
    assert config.settings.targets == (Target(trace="fork-heavy", memory=0.25, min_gain=0.15),)
    assert len(config.settings.seeds) >= 3
