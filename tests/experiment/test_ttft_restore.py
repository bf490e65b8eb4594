"""ttft_restore over scripted times: what it measures, what it concludes, and that its checks can fail."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from zllm_jax.experiment import rebuild_report
from zllm_jax.experiment.results import FILE_NAME
from zllm_jax.experiment.ttft_restore import compare
from zllm_jax.experiment.ttft_show import break_even, missed_targets, seconds
from zllm_jax.values import Envelope, Status, Tier, TokenLogprob

Run = Callable[..., tuple[Any, Any]]
SMALL = (
    "settings.prompt_tokens=[40, 400]",
    "settings.disk_bytes=65536",
    "settings.copy_bytes=65536",
    "settings.parts_slack_s=0.05",
)
MODES = {"cold", "resident", "disk_warm", "disk_cold"}


def test_rows_summary_and_checks(run: Run, scripted: ModuleType) -> None:
    report, engine = run("ttft_restore", *SMALL)
    results = report.results
    assert engine.closed
    assert results.ok, results.checks
    cells = {(row["mode"], row["prompt_tokens"], row["repetition"]) for row in results.rows}
    assert cells == {(mode, length, rep) for mode in MODES for length in (40, 400) for rep in (0, 1)}
    for row in results.rows:
        whole = row["prompt_tokens"] + 8
        hit = row["mode"] != "cold"
        disk = row["mode"].startswith("disk")
        assert row["followup_tokens"] == whole + 30
        assert row["cached_tokens"] == (whole - 1 if hit else 0)
        assert row["restore_s"] == (scripted.RESTORE_S if disk else 0.0)
        assert row["bytes_read"] == (scripted.BYTES_PER_TOKEN * (whole - 1) if disk else 0)
        assert ("page_cache_dropped" in row) == (row["mode"] == "disk_cold")
    summary = results.summary
    cold_s = scripted.COLD_S_PER_TOKEN * 438
    assert summary["ttft_cold_400_s"] == pytest.approx(cold_s)
    assert summary["speedup_resident_400"] == pytest.approx(cold_s / scripted.RESIDENT_S)
    assert summary["speedup_disk_warm_40"] == pytest.approx(78e-5 / 1.1e-3)
    assert 40 < summary["break_even_disk_warm_tokens"] < 400
    assert summary["break_even_resident_tokens"] == "< 40"


def test_modes_are_interleaved_and_their_order_is_shuffled_by_the_seed(run: Run) -> None:
    def order(seed: int) -> list[str]:
        overrides = (*SMALL, f"settings.seed={seed}", "settings.prompt_tokens=[40]", "settings.repetitions=4")
        return [row["mode"] for row in run("ttft_restore", *overrides)[0].results.rows]

    first = order(1)
    rounds = [first[i : i + 4] for i in range(0, 16, 4)]
    assert all(set(each) == MODES for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert first == order(1) != order(2)


@pytest.mark.parametrize(
    "options, overrides, failing",
    [
        ({"flip": Tier.DISK}, (), "Every mode gives the cold run's tokens"),
        ({"skew": 0.01}, (), "First-token log-probabilities agree with the cold run within 0.002"),
        ({}, ("settings.modes=[cold, disk_warm]", "engine.disk_cache=false"), "The hit is as long"),
        ({}, ("settings.parts_tolerance=-1.0", "settings.parts_slack_s=-1.0"), "The parts of the time add up"),
        ({}, ("settings.enforce_targets=true",), "Speed targets"),
    ],
)
def test_each_check_can_fail(
    run: Run, monkeypatch: pytest.MonkeyPatch, scripted: ModuleType, options: Any, overrides: Any, failing: str
) -> None:
    if "disk_cache" in str(overrides):
        monkeypatch.setattr(scripted.ScriptedTimes, "evict", lambda self: self.forget() or 0)
    targets = "settings.targets=[{mode: resident, prompt_tokens: 40, min_speedup: 1000000}]"
    report, _ = run("ttft_restore", *SMALL, targets, *overrides, **options)
    failed = [check for check in report.results.checks if not check.ok]
    assert [check.name for check in failed if not check.name.startswith(failing)] == []
    assert failed
    assert not report.results.ok


def test_a_page_cache_that_stays_is_said(run: Run) -> None:
    report, _ = run("ttft_restore", *SMALL, drops=False)
    assert any("could not be dropped" in note for note in report.results.notes)
    (row, *_) = [row for row in report.results.rows if row["mode"] == "disk_cold"]
    assert row["page_cache_dropped"] is False


def test_report_is_whole_and_rebuilt_the_same_from_its_results(run: Run) -> None:
    report, _ = run("ttft_restore", *SMALL)
    folder = report.folder
    names = {path.name for path in folder.iterdir()}
    assert names == {FILE_NAME, "report.html", "report.md", "ttft.png", "ttft.svg", "parts.png", "parts.svg"}
    data = json.loads((folder / FILE_NAME).read_text())
    assert {"experiment", "claim", "config", "environment", "rows", "summary", "checks"} <= data.keys()
    assert {"zllm", "commit", "jax", "devices", "cpu", "python", "date"} <= data["environment"].keys()
    page = (folder / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "$" not in page
    text = (folder / "report.md").read_text()
    for table in report.tables:
        for row in table.rows:
            assert "| " + " | ".join(row) + " |" in text
    ET.parse(folder / "ttft.svg")
    before = {name: (folder / name).read_bytes() for name in names}
    rebuild_report(folder)
    assert {name: (folder / name).read_bytes() for name in names} == before


def test_main_table_has_a_line_a_length(run: Run) -> None:
    report, _ = run("ttft_restore", *SMALL)
    main = report.tables[0]
    assert [row[0] for row in main.rows] == ["40", "400"]
    assert all(len(row) == len(main.columns) for table in report.tables for row in table.rows for main in [table])
    assert main.rows[1][1] == "4.38 ms"
    assert main.rows[1][-1] == "0.10 ms (43.8x)"


@pytest.mark.parametrize(
    "other, expected",
    [
        ([1.0, 2.0, 3.0], "> 400"),
        ([0.01, 0.01, 0.01], "< 100"),
        ([0.4, 0.1, 0.1], 141.4),  # twice as slow at 100, twice as fast at 200: half way, in logarithms
    ],
)
def test_break_even(other: list[float], expected: float | str) -> None:
    found = break_even([100, 200, 400], [0.2, 0.2, 0.4], other)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert found == pytest.approx(expected, rel=1e-3)


def test_break_even_takes_the_last_crossing() -> None:
    assert break_even([1, 2, 4, 8], [1.0, 1.0, 1.0, 1.0], [0.5, 2.0, 2.0, 0.5]) == pytest.approx(5.7, abs=0.05)


def test_missed_targets_name_place_and_figure() -> None:
    summary = {"speedup_disk_warm_2000": 12.0, "ttft_disk_warm_2000_s": 0.3}
    target = {"mode": "disk_warm", "prompt_tokens": 2000, "min_speedup": 20, "max_ttft_s": 0.2}
    assert missed_targets(summary, [target]) == [
        "disk_warm_2000 is 12.0 times faster than cold, target 20",
        "disk_warm_2000 takes 300 ms, target 200 ms",
    ]
    assert missed_targets(summary, [target | {"min_speedup": 12, "max_ttft_s": 0.3}]) == []
    assert missed_targets({}, [target]) == []


def envelope(tokens: tuple[int, ...], tops: list[tuple[tuple[int, float], ...]]) -> Envelope:
    logprobs = tuple(TokenLogprob(token=t, logprob=-1.0, top=top) for t, top in zip(tokens, tops, strict=True))
    return Envelope(request_id="r", status=Status.TRUNCATED, tokens=tokens, logprobs=logprobs)


def test_compare_names_the_first_difference_and_its_margin() -> None:
    cold = envelope((1, 2), [((1, -0.5), (7, -1.0)), ((2, -0.70), (3, -0.71))])
    same = compare(cold, cold)
    assert (same["tokens_equal"], same["max_logprob_difference"]) == (True, 0.0)
    other = envelope((1, 3), [((1, -0.6), (9, -1.0)), ((3, -0.70), (2, -0.71))])
    found = compare(cold, other)
    assert (found["tokens_equal"], found["first_difference"]) == (False, 1)
    assert found["margin_at_difference"] == pytest.approx(0.01)
    assert found["max_logprob_difference"] == pytest.approx(0.1)  # over the ids that both list
    assert compare(cold, envelope((1,), [((1, -0.5),)]))["first_difference"] == 1


@pytest.mark.parametrize(
    "value, text", [(4.312, "4.31 s"), (0.1523, "152 ms"), (0.00042, "0.42 ms"), (0.0, "0"), (float("nan"), "-")]
)
def test_seconds_read_well(value: float, text: str) -> None:
    assert seconds(value) == text
