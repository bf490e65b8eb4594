"""fence_overhead on a tiny model, and what it concludes from rows that are written down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from zllm_jax.config import EngineConfig
from zllm_jax.errors import ConfigError
from zllm_jax.experiment import Report, fence_bench, read_experiment, run_experiment
from zllm_jax.experiment.fence_bench import Bench
from zllm_jax.experiment.fence_overhead import Settings, checks, notes
from zllm_jax.experiment.fence_show import WORDS, overhead, summarise, tables
from zllm_jax.experiment.results import load_results
from zllm_jax.fence import Vocabulary
from zllm_jax.runtime import init_params
from zllm_jax.testing import ByteTokenizer, tiny_config

SETTINGS = Settings(batches=(1,), temperatures=(0.0,))
SMALL = ("settings.batches=[2]", "settings.repetitions=2", "settings.read_bytes=65536", "settings.table_states=4")
Replay = Callable[..., Report]


@pytest.fixture(scope="module")
def bench() -> Bench:
    tokenizer, cfg = ByteTokenizer(), tiny_config("llama")
    vocabulary = Vocabulary(tokenizer.vocabulary(), tokenizer.eos_ids)
    engine = EngineConfig(max_seq_tokens=256, decode_buckets=(2,), decode_steps=2, fence_states=128)
    return Bench(init_params(cfg, jax.random.key(0)), cfg, vocabulary, engine)


def test_every_way_is_timed_at_every_place(
    bench: Bench, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence_bench, "open_bench", lambda config, progress: bench)
    config = read_experiment(repo / "experiments" / "fence_overhead.yaml", overrides=SMALL, quick=True)
    report = run_experiment(config, lambda *_: pytest.fail("an engine"), out=tmp_path, progress=lambda *_: None)
    results = report.results
    assert results.ok, results.checks
    assert len(results.checks) == 2
    calls = {
        (row["way"], row["place"], row["batch"], row["temperature"], row["repetition"])
        for row in results.rows
        if row["measured"] == "step"
    }
    assert len(calls) == 2 * 2 * (2 + 2 * len(WORDS))
    assert results.summary["mask_bytes"] == 131_072 // 8
    assert results.summary["masks_bytes"] == 4 * 131_072 // 8
    assert all(results.summary[f"mask_{place}_2_s"] > 0 for place in WORDS)
    assert [table.rows for table in tables(load_results(tmp_path))] == [table.rows for table in report.tables]
    assert (tmp_path / "overhead.svg").exists()
    assert (tmp_path / "stages.svg").exists()


def test_the_ways_draw_the_same(bench: Bench) -> None:
    for place in WORDS:
        device, host = bench.decode(place, 2, 1.0, 2), bench.masked(place, 2, 1.0)
        assert [row[0] for row in device.tokens] == [row[0] for row in host.tokens]
        assert bench.legal(place, device)


def test_an_illegal_token_is_seen(bench: Bench) -> None:
    free = bench.decode("", 2, 1.0, 2)
    assert not bench.legal("value", free)


def test_a_vocabulary_without_single_bytes_is_refused(bench: Bench) -> None:
    blind = [b"" if token == b"A" else token for token in bench.vocabulary.tokens]
    with pytest.raises(ConfigError, match="b'A' are none"):
        Bench(bench.params, bench.cfg, Vocabulary(blind, bench.vocabulary.eos_ids), bench.engine)


def rows(**device: float) -> list[dict[str, Any]]:
    """A free step of 10 ms, one of 11 ms alone, 12 ms by the host; on the device as given, else 10.1 ms."""
    common = {"measured": "step", "batch": 1, "temperature": 0.0, "legal": True, "first": [7]}
    found = [common | {"way": way, "place": "", "step_s": step_s, "legal": None} for way, step_s in
             (("free", 0.01), ("free_single", 0.011))]  # fmt: skip
    parts = ("fetch", "advance", "mask", "put", "apply", "device_mask", "device_advance")
    for place in WORDS:
        found.append(common | {"way": "device", "place": place, "step_s": device.get(place, 0.0101)})
        found.append(common | {"way": "host", "place": place, "step_s": 0.012})
        stages = dict.fromkeys((f"{part}_s" for part in parts), 5e-5) | {"launch_s": 1e-5}
        found.append({"measured": "stages", "place": place, "batch": 1, **stages})
    return found


def test_costs_are_ratios_of_medians_and_launches_are_taken_off() -> None:
    summary = summarise(rows(name=0.0099))
    assert overhead(summary, "device", "text", 1, 0) == pytest.approx(0.01)
    assert overhead(summary, "device", "name", 1, 0) == pytest.approx(-0.01)
    assert overhead(summary, "host", "text", 1, 0) == pytest.approx(0.2)
    assert summary["host_added_text_1_0_s"] == pytest.approx(0.001)
    assert summary["mask_text_1_s"] == pytest.approx(5e-5)
    assert summary["put_text_1_s"] == summary["device_mask_text_1_s"] == pytest.approx(4e-5)
    assert "take 0.8% to 0.8% of a free step" in " ".join(notes(summary, SETTINGS))


@pytest.mark.parametrize(
    ("changed", "failing"),
    [({}, []), ({"legal": False}, [0]), ({"first": [8]}, [1])],
)
def test_a_wrong_token_fails(changed: dict[str, Any], failing: list[int]) -> None:
    found = rows()
    found[-2] |= changed
    verdicts = checks(found, summarise(found), SETTINGS)
    assert [i for i, check in enumerate(verdicts) if not check.ok] == failing


def test_a_cost_above_the_goal_is_noted_and_fails_where_enforced() -> None:
    found = rows(value=0.0105)
    summary = summarise(found)
    assert "met at 2 of 3 places. after a value, batch 1, temperature 0: +5.0%" in notes(summary, SETTINGS)[-1]
    assert all(check.ok for check in checks(found, summary, SETTINGS))
    strict = Settings(batches=(1,), temperatures=(0.0,), enforce_targets=True)
    assert [check.ok for check in checks(found, summary, strict)] == [True, True, False]


@pytest.mark.parametrize("wrong", [{"batches": ()}, {"batches": (0,)}, {"temperatures": ()}, {"repetitions": 0}])
def test_settings_that_measure_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"settings\."):
        Settings(**wrong)
