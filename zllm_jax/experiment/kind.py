"""What an experiment kind is, and the small part of an engine that it drives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from zllm_jax.config import EngineConfig, ModelConfig
from zllm_jax.experiment.plots import Figure
from zllm_jax.experiment.results import Check, Results
from zllm_jax.values import Delta, Envelope, Request

Row = Mapping[str, Any]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Ticket(Protocol):
    """A submitted request: its deltas in order; the last one carries the envelope."""

    def __iter__(self) -> Iterator[Delta]: ...
    def cancel(self) -> None: ...


class Engine(Protocol):
    """What experiments need of an engine; the composition root hands one in."""

    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def warmup(self, *, progress: Progress | None = None) -> None: ...
    def generate(self, request: Request) -> Envelope: ...
    def submit(self, request: Request) -> Ticket: ...
    def evict(self) -> int: ...
    def forget(self, *, keep_disk: bool = False) -> None: ...
    def stage_restores(self, on: bool) -> None: ...
    def append_runs(self, on: bool) -> None: ...
    def report(self) -> Mapping[str, Any]: ...
    def drop_page_cache(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


OpenEngine = Callable[[str, EngineConfig, Progress], Engine]


@dataclass(frozen=True)
class Table:
    """Cells as texts; the first column is left-aligned, the others right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Outcome:
    """What a kind measured. `notes`: sentences a reader of the report must know."""

    rows: Sequence[Row]
    summary: Mapping[str, Any]
    checks: Sequence[Check] = field(default_factory=tuple)
    notes: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class Kind:
    """One experiment: the type of its settings, how to measure, and how to show what was measured.

    run: (open engine, settings, progress) -> Outcome. tables, figures: from results only, so that a report can be
    rebuilt from its results.json. needs_engine: a kind that does without is given the experiment's configuration.
    """

    name: str
    settings: type
    run: Callable[[Any, Any, Progress], Outcome]
    tables: Callable[[Results], Sequence[Table]]
    figures: Callable[[Results], Sequence[Figure]]
    needs_engine: bool = True
