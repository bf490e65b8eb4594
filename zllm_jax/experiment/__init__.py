"""Claims and how they are measured: experiment files, the runner, results and reports.

Knows an engine's public calls and this machine's measured ceilings; must not know how the engine is put together,
nor any protocol or socket. The files themselves stand in `experiments/`, one a claim.
"""

from __future__ import annotations

from zllm_jax.experiment.config import ExperimentConfig
from zllm_jax.experiment.kind import Engine, Kind, OpenEngine, Outcome, Progress, Table
from zllm_jax.experiment.registry import KINDS
from zllm_jax.experiment.results import Check, Results, load_results
from zllm_jax.experiment.runner import Report, list_experiments, read_experiment, rebuild_report, run_experiment

__all__ = [
    "KINDS",
    "Check",
    "Engine",
    "ExperimentConfig",
    "Kind",
    "OpenEngine",
    "Outcome",
    "Progress",
    "Report",
    "Results",
    "Table",
    "list_experiments",
    "load_results",
    "read_experiment",
    "rebuild_report",
    "run_experiment",
]
