"""Runs of the real kinds over an engine whose times are written down."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zllm_jax.config import EngineConfig
from zllm_jax.experiment import Progress, Report, read_experiment, run_experiment

Run = Callable[..., tuple[Report, Any]]


@pytest.fixture(scope="session")
def scripted() -> ModuleType:
    """The module beside this file; tests are no package, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location("scripted_times", Path(__file__).with_name("scripted.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(repo: Path, tmp_path: Path, scripted: ModuleType) -> Run:
    """run(name, *overrides, **engine options) -> the report and the engine that was driven."""

    def go(name: str, *overrides: str, **options: Any) -> tuple[Report, Any]:
        drops = options.pop("drops", True)
        opened = []

        def open_engine(model: str, config: EngineConfig, progress: Progress) -> Any:
            engine = scripted.ScriptedTimes(config, **options)
            engine.drops = drops
            opened.append(engine)
            return engine

        config = read_experiment(
            repo / "experiments" / f"{name}.yaml", overrides=[f"engine.store={tmp_path}", *overrides], quick=True
        )
        report = run_experiment(config, open_engine, out=tmp_path / "out", progress=lambda what, done, total: None)
        return report, opened[0]

    return go
