"""Run an experiment file, or rebuild its report from the results it left."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from zllm_jax.errors import ConfigError
from zllm_jax.experiment.config import ExperimentConfig, load_config, to_mapping
from zllm_jax.experiment.environment import describe_environment
from zllm_jax.experiment.kind import Kind, OpenEngine, Progress, Table
from zllm_jax.experiment.registry import KINDS
from zllm_jax.experiment.report import write_report
from zllm_jax.experiment.results import Results, load_results

EXPERIMENTS = Path("experiments")
RESULTS = Path("results")


@dataclass(frozen=True)
class Report:
    """A finished run: its results, the tables that say them, and where the pages lie."""

    results: Results
    tables: Sequence[Table]
    folder: Path
    page: Path


def read_experiment(path: str | Path, *, overrides: Sequence[str] = (), quick: bool = False) -> ExperimentConfig:
    """The experiment in a YAML file, or of that name in `experiments/`. Raises `ConfigError`."""
    path = Path(path)
    if not path.suffix and not path.exists():
        path = EXPERIMENTS / f"{path}.yaml"
    settings_types = {name: kind.settings for name, kind in KINDS.items()}
    return load_config(path, settings_types, overrides=overrides, quick=quick)


def list_experiments(folder: str | Path = EXPERIMENTS) -> list[tuple[Path, ExperimentConfig]]:
    """The experiment files of a folder, by name. Raises ConfigError when there is no such folder."""
    if not Path(folder).is_dir():
        raise ConfigError(f"there is no folder {folder}: run where the experiments lie, or name their folder")
    return [(path, read_experiment(path)) for path in sorted(Path(folder).glob("*.yaml"))]


def run_experiment(
    config: ExperimentConfig, open_engine: OpenEngine, *, out: str | Path | None = None, progress: Progress
) -> Report:
    """Measure and write `out` (None: `results/NAME`): results.json first, then the pages made from it.

    open_engine: (model, engine config, progress) -> engine; the engine is closed at the end, whatever happened. A kind
    that needs none opens none and is given the configuration.
    """
    kind = KINDS[config.experiment]
    folder = Path(out) if out is not None else RESULTS / config.experiment
    _check_writable(folder)
    opened = open_engine(config.model, config.engine, progress) if kind.needs_engine else nullcontext(config)
    with opened as engine:
        outcome = kind.run(engine, config.settings, progress)
        environment = describe_environment()
    results = Results(
        experiment=config.experiment,
        title=config.title,
        claim=" ".join(config.claim.split()),
        config={k: v for k, v in to_mapping(config).items() if k not in ("experiment", "title", "claim")},
        environment=environment,
        rows=outcome.rows,
        summary=outcome.summary,
        checks=tuple(outcome.checks),
        notes=tuple(outcome.notes),
    )
    results.save(folder)
    return _report(results, kind, folder)


def rebuild_report(folder: str | Path) -> Report:
    """Write the pages again from `folder/results.json`."""
    results = load_results(folder)
    if results.experiment not in KINDS:
        raise ConfigError(f"results of {results.experiment!r}: no such experiment kind; known: {', '.join(KINDS)}")
    return _report(results, KINDS[results.experiment], Path(folder))


def _report(results: Results, kind: Kind, folder: Path) -> Report:
    return Report(results, kind.tables(results), folder, write_report(results, kind, folder))


def _check_writable(folder: Path) -> None:
    """Before minutes of measuring rather than after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written ({error.strerror}); give another folder") from None
