"""decode_speed over scripted times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zllm_jax.errors import ConfigError
from zllm_jax.experiment.decode_speed import step_seconds, summarise
from zllm_jax.roofline import decode_step_bytes, prefill_flops
from zllm_jax.testing import tiny_config

Run = Callable[..., tuple[Any, Any]]
SMALL = (
    "settings.copy_bytes=65536",
    "settings.matrix_sizes=[64]",
    "settings.decode_tokens=24",
    "settings.snapshot_tokens=32",
)


def test_rows_are_measured_and_tables_say_them(run: Run) -> None:
    report, engine = run("decode_speed", *SMALL)
    results = report.results
    assert engine.closed
    assert results.ok
    assert [(row["phase"], row.get("batch", row.get("prompt_tokens"))) for row in results.rows] == [
        ("decode", 1),
        ("decode", 8),
        ("prefill", 512),
    ] * 2 + [("snapshot", None)]
    decode, _, prefill = results.rows[:3]
    assert decode["step_bytes"] == decode_step_bytes(
        tiny_config("llama"), batch=1, context_tokens=76, weight_itemsize=4, kv_itemsize=4
    )
    assert prefill["prefill_flop"] == prefill_flops(tiny_config("llama"), 512)
    assert [row[0] for row in report.tables[0].rows] == [
        "decode, batch 1",
        "decode, batch 8",
        "prefill, 512 tokens",
        "snapshot write, fsynced",
        "snapshot read, verified",
    ]
    cfg = tiny_config("llama")
    assert results.rows[-1]["state_bytes"] == 2 * cfg.num_layers * cfg.num_kv_heads * 32 * cfg.head_dim * 4
    assert 0 < results.summary["load_share_of_plain"] < 10
    assert (report.folder / "share_of_bound.svg").exists()


def test_a_step_is_timed_while_every_row_decodes() -> None:
    early = [(0.0, 1), (1.0, 4), (3.0, 4), (5.0, 4)]  # a step takes half a second
    late = [(1.0, 1), (3.0, 4), (5.0, 4), (6.0, 4)]  # alone at the end, twice as fast
    assert step_seconds([early]) == pytest.approx(5.0 / 12)
    assert step_seconds([early, late]) == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="never decoded together"):
        step_seconds([[(0.0, 1), (1.0, 4)], [(2.0, 1), (3.0, 4)]])


def test_a_share_is_of_the_ceiling_of_its_own_repetition() -> None:
    ceilings = {"copy_bytes_s": 10.0, "read_bytes_s": 20.0, "matrix_flop_s": 100.0}
    decode = {"phase": "decode", "batch": 1, "step_s": 2.0, "step_bytes": 10, "tokens_s": 0.5}
    prefill = {"phase": "prefill", "prompt_tokens": 4, "prefill_s": 1.0, "prefill_flop": 65, "tokens_s": 4.0}
    rows = [decode | ceilings, prefill | ceilings]
    summary = summarise([*rows, *[row | {"copy_bytes_s": 5.0} for row in rows]])
    assert summary["decode_1_share_of_copy"] == pytest.approx((0.5 + 1.0) / 2)
    assert summary["decode_1_share_of_read"] == pytest.approx(0.25)
    assert summary["prefill_4_share_of_matrix"] == pytest.approx(0.65)


def test_targets_fail_the_run_only_when_enforced(run: Run) -> None:
    high = ("settings.min_batch_gain=1e9",)
    assert run("decode_speed", *SMALL, *high)[0].results.ok
    report, _ = run("decode_speed", *SMALL, *high, "settings.enforce_targets=true")
    assert not report.results.ok
    assert any("batch 8 gives" in check.detail for check in report.results.checks)


def test_a_run_that_stops_early_fails(run: Run, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scripted.ScriptedTimes.generate
    monkeypatch.setattr(
        scripted.ScriptedTimes,
        "generate",
        lambda self, request: whole(self, type(request)(request.tokens, max_tokens=max(1, request.max_tokens - 1))),
    )
    report, _ = run("decode_speed", *SMALL)
    assert [check.ok for check in report.results.checks] == [False]
