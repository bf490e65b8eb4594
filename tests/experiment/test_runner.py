"""The runner: results that survive, folders that cannot be written, prompts of prose."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zllm_jax.errors import ConfigError
from zllm_jax.experiment import load_results, read_experiment, rebuild_report, run_experiment
from zllm_jax.experiment.texts import PromptSource, packaged_text
from zllm_jax.testing import ByteTokenizer

Run = Callable[..., tuple[Any, Any]]
SMALL = (
    "settings.copy_bytes=65536",
    "settings.matrix_sizes=[64]",
    "settings.decode_tokens=24",
    "settings.snapshot_tokens=32",
)


def test_an_unwritable_folder_is_refused_before_anything_is_opened(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = read_experiment(repo / "experiments" / "ttft_restore.yaml")

    def never(*args: Any) -> Any:
        pytest.fail("the engine was opened")

    with pytest.raises(ConfigError, match=r"--out .* cannot be written"):
        run_experiment(config, never, out=tmp_path / "file" / "out", progress=lambda *a: None)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "give the folder of a finished run"),
        ("{", "is not the results of an experiment"),
        ("[]", "is not the results of an experiment"),
        ('{"checks": [], "rows": 3}', "is not the results of an experiment"),
    ],
)
def test_results_that_are_none_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_results(tmp_path)


def test_results_of_an_unknown_kind_are_refused(run: Run, tmp_path: Path) -> None:
    report, _ = run("decode_speed", *SMALL)
    path = report.folder / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"experiment": "gone"}))
    with pytest.raises(ConfigError, match="no such experiment kind; known: ttft_restore"):
        rebuild_report(report.folder)


def test_results_hold_no_path_of_this_machine(run: Run, repo: Path, tmp_path: Path) -> None:
    report, _ = run("decode_speed", *SMALL)
    text = (report.folder / "results.json").read_text().replace(str(tmp_path), "")  # asked for by the test's override
    assert str(repo) not in text
    assert str(Path.home()) + "/" not in text


def test_prompts_are_prose_and_turns_share_no_prefix() -> None:
    source = PromptSource(ByteTokenizer())
    text = packaged_text()
    first = bytes(source.slice(60, 0)).decode()
    assert text.startswith(first)
    starts = {tuple(source.slice(16, turn)) for turn in range(40)}
    assert len(starts) == 40
    assert len(source.slice(len(text.encode()), 3)) == len(text.encode())
    with pytest.raises(ConfigError, match="the packaged text has 3"):
        PromptSource(ByteTokenizer(), "abc").slice(4, 0)
