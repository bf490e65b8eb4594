"""An experiment file is read whole or refused with the key's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from zllm_jax.config import EngineConfig
from zllm_jax.errors import ConfigError
from zllm_jax.experiment import KINDS, list_experiments, read_experiment
from zllm_jax.experiment.config import from_mapping, parse_override, to_mapping
from zllm_jax.experiment.ttft_restore import Settings, Target

FILE = """
experiment: ttft_restore
title: A title
claim: A claim
engine: {max_batch: 2}
settings:
  repetitions: 7
  targets: [{mode: disk_warm, prompt_tokens: 64, min_speedup: 2}]
quick:
  settings: {prompt_tokens: [64]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.yaml"
    path.write_text(FILE)
    return path


def test_a_file_becomes_frozen_values(file: Path) -> None:
    config = read_experiment(file)
    assert config.engine == EngineConfig(max_batch=2)
    assert config.settings.repetitions == 7
    assert config.settings.targets == (Target(mode="disk_warm", prompt_tokens=64, min_speedup=2.0),)
    assert config.settings.prompt_tokens == Settings().prompt_tokens
    with pytest.raises(AttributeError):
        config.settings.repetitions = 8


def test_quick_lies_over_the_file_and_set_over_both(file: Path) -> None:
    quick = read_experiment(file, quick=True)
    assert (quick.settings.prompt_tokens, quick.settings.repetitions, quick.quick) == ((64,), 7, True)
    changed = read_experiment(
        file, quick=True, overrides=["settings.prompt_tokens=[32, 48]", "model=other", "settings.parts_tolerance=1e-3"]
    )
    assert (changed.settings.prompt_tokens, changed.model) == ((32, 48), "other")
    assert changed.settings.parts_tolerance == 0.001


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("repetitions: 7", "repetition: 7", r"settings\.repetition: unknown key \(did you mean repetitions\?\)"),
        ("{max_batch: 2}", "{max_batches: 2}", r"engine\.max_batches: unknown key \(did you mean max_batch\?\)"),
        ("min_speedup: 2", "min_sped: 2", r"settings\.targets\[0\]\.min_sped: unknown key \(did you mean min_speedup"),
        (", min_speedup: 2", "", r"settings\.targets\[0\]\.min_speedup: is missing"),
        ("title: A title", "", r"title: is missing"),
        ("experiment: ttft_restore", "experiment: ttft", r"must be one of .*ttft_restore.*did you mean ttft_restore"),
        ("repetitions: 7", "repetitions: many", r"settings\.repetitions is 'many', must be an integer"),
        ("min_speedup: 2", "min_speedup: fast", r"settings\.targets\[0\]\.min_speedup is 'fast', must be a number"),
        ("repetitions: 7", "repetitions: true", r"settings\.repetitions is True, must be an integer"),
        ("repetitions: 7", "repetitions: 0", r"settings\.repetitions is 0, must be at least 1"),
        ("repetitions: 7", "modes: [resident]", r"settings\.modes must hold 'cold'"),
        ("repetitions: 7", "modes: [frozen]", r"settings\.modes\[0\] is 'frozen', must be one of cold, resident"),
        ("repetitions: 7", "prompt_tokens: 5", r"settings\.prompt_tokens is 5, must be a list"),
        ("{max_batch: 2}", "{max_batch: 0}", r"max_batch is 0, must be positive"),
        ("settings:", "settings: [", r"is not YAML"),
    ],
)
def test_a_wrong_key_or_value_is_named(file: Path, old: str, new: str, message: str) -> None:
    assert old in FILE
    file.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read_experiment(file)


@pytest.mark.parametrize("text", ["settings.repetitions", "=3", "a..b=3", "a b=3", "a=[1,"])
def test_a_malformed_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_override(text)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        read_experiment(tmp_path / "nowhere.yaml")


def test_mapping_round_trips(file: Path) -> None:
    settings = read_experiment(file).settings
    assert from_mapping(Settings, to_mapping(settings), "settings") == settings


def test_committed_experiments_are_readable_and_start_with_claim_and_command(repo: Path) -> None:
    found = list_experiments(repo / "experiments")
    assert {config.experiment for _, config in found} == set(KINDS)
    for path, config in found:
        head = path.read_text("utf-8")
        assert head.startswith("# Claim: ")
        assert f"zllm experiment run experiments/{path.name}" in head
        assert read_experiment(path, quick=True).settings != config.settings
