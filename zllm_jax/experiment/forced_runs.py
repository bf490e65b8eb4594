"""Calls with long literals: what a fence forces appended at once, against the same drawn token by token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zllm_jax.errors import ConfigError
from zllm_jax.experiment import plots
from zllm_jax.experiment.kind import Engine, Kind, Outcome, Progress, Row, Table
from zllm_jax.experiment.plots import Figure
from zllm_jax.experiment.results import Check, Results
from zllm_jax.values import NamedTool, Request, Sampling, Status

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

MODES = ("appended", "drawn")


@dataclass(frozen=True, kw_only=True)
class Function:
    """A tool that is called: its parameters as a JSON Schema."""

    name: str
    parameters: Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """functions: what is on offer; each request must call one that it names. dialects: in which it is called.

    batches: requests at a time. min_speedup: of one request alone, checked only when `enforce_targets`.
    """

    functions: tuple[Function, ...]
    dialects: tuple[str, ...] = ("chatml",)
    batches: tuple[int, ...] = (1,)
    repetitions: int = 5
    max_tokens: int = 256
    temperature: float = 0.7
    min_speedup: float = 2.0
    enforce_targets: bool = False

    def __post_init__(self) -> None:
        if not self.functions or not self.dialects or not self.batches or min(self.batches) < 1:
            raise ConfigError("settings.functions, dialects and batches must each name at least one, batches positive")
        if self.repetitions < 1:
            raise ConfigError(f"settings.repetitions is {self.repetitions}, must be at least 1")


def run(engine: Engine, settings: Settings, progress: Progress) -> Outcome:
    """A row for each dialect, function, batch, repetition and mode; which of the two modes begins, alternates."""
    engine.warmup(progress=progress)
    cells = [
        (dialect, one, batch)
        for dialect in settings.dialects
        for one in settings.functions
        for batch in settings.batches
    ]
    rows: list[dict[str, Any]] = []
    total = settings.repetitions * len(cells)
    for i in range(total):
        progress("call functions", i, total)
        (dialect, function, batch), repetition = cells[i % len(cells)], i // len(cells)
        if repetition == 0:
            _calls(engine, settings, dialect, function, batch, 0, MODES[0])  # compiles the grammar, keeps the prompts
        for mode in MODES if repetition % 2 == 0 else MODES[::-1]:
            rows.append(_calls(engine, settings, dialect, function, batch, repetition, mode))
    progress("call functions", total, total)
    summary = summarise(rows)
    single = {dialect: summary[f"{dialect}_1_speedup"] for dialect in settings.dialects if 1 in settings.batches}
    said = ", ".join(f"{speedup:.2f} times as fast in {dialect}" for dialect, speedup in single.items())
    checks = [_complete(rows)]
    if settings.enforce_targets:
        checks.append(Check("Speed target", min(single.values(), default=0.0) >= settings.min_speedup, said))
    return Outcome(rows, summary, checks, [f"With runs appended, one call is {said}."] if said else [])


def _calls(
    engine: Engine, settings: Settings, dialect: str, function: Function, batch: int, repetition: int, mode: str
) -> dict[str, Any]:
    """`batch` requests at once, from the first one's start to the last one's end. Their prompts are in the cache."""
    engine.append_runs(mode == "appended")
    tools = [{"name": one.name, "parameters": one.parameters} for one in settings.functions]
    requests = [
        Request(
            [{"role": "user", "content": f"Example {i}: call {function.name} with arguments that you make up."}],
            max_tokens=settings.max_tokens,
            sampling=Sampling(temperature=settings.temperature, seed=100 * repetition + i),
            tools=tuple({"type": "function", "function": one} for one in tools),
            tool_choice=NamedTool(function.name),
            tool_dialect=dialect,
            parallel_tool_calls=False,
        )
        for i in range(batch)
    ]
    started = time.perf_counter()
    with ThreadPoolExecutor(batch) as pool:
        envelopes = list(pool.map(engine.generate, requests))
    seconds = time.perf_counter() - started
    engine.append_runs(True)
    return {
        "dialect": dialect,
        "function": function.name,
        "batch": batch,
        "repetition": repetition,
        "mode": mode,
        "seconds": seconds,
        "called": sum(one.status is Status.COMPLETED and len(one.calls) == 1 for one in envelopes),
        "tokens": sum(len(one.tokens) for one in envelopes),
        "forced_tokens": sum(one.telemetry.forced_tokens for one in envelopes),
    }


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians over pairs of the same dialect, function, batch and repetition.

    speedup: seconds drawn over seconds appended; speedup_per_token: likewise by token of the output, as the two differ;
    forced_share: of the tokens with runs appended.
    """
    summary: dict[str, Any] = {}
    for dialect, batch in _cells(rows):
        cell = [row for row in rows if (row["dialect"], row["batch"]) == (dialect, batch)]
        of = {(row["function"], row["repetition"], row["mode"]): row for row in cell}
        pairs = [(row, of[(*key[:2], MODES[1])]) for key, row in of.items() if key[2] == MODES[0]]
        found = {
            "speedup": [off["seconds"] / on["seconds"] for on, off in pairs],
            "speedup_per_token": [off["seconds"] * on["tokens"] / (on["seconds"] * off["tokens"]) for on, off in pairs],
            "forced_share": [on["forced_tokens"] / on["tokens"] for on, _ in pairs],
        }
        for i, mode in enumerate(MODES):
            found[f"{mode}_s"] = [pair[i]["seconds"] for pair in pairs]
            found[f"{mode}_tokens"] = [pair[i]["tokens"] / batch for pair in pairs]
        summary |= {f"{dialect}_{batch}_{name}": statistics.median(values) for name, values in found.items()}
    return summary


def _cells(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Dialects and batches in their order."""
    return list(dict.fromkeys((row["dialect"], row["batch"]) for row in rows))


def _complete(rows: Sequence[Row]) -> Check:
    cut = [row for row in rows if row["called"] != row["batch"]]
    return Check("Every request ended in its one call", not cut, f"in {len(rows) - len(cut)} of {len(rows)} rounds")


def tables(results: Results) -> list[Table]:
    """One line a dialect and batch."""
    lines = []
    for dialect, batch in _cells(results.rows):
        of = {
            name.removeprefix(f"{dialect}_{batch}_"): value
            for name, value in results.summary.items()
            if name.startswith(f"{dialect}_{batch}_")
        }
        lines.append(
            (
                f"{dialect}, {batch} at a time",
                *(f"{of[f'{mode}_s']:.2f} s, {of[f'{mode}_tokens']:.0f}" for mode in MODES),
                f"{of['forced_share']:.0%}",
                f"{of['speedup']:.2f}",
                f"{of['speedup_per_token']:.2f}",
            )
        )
    columns = ("calls", "appended: time, tokens a call", "drawn: time, tokens a call", "forced", "speed-up", "by token")
    return [Table("Forced runs appended against drawn (medians)", columns, tuple(lines))]


def figures(results: Results) -> list[Figure]:
    caption = "Seconds of each round of calls: forced runs appended at once, and the same drawn token by token."
    return [Figure("rounds", caption, lambda canvas: _draw(canvas, results), (7.0, 3.6))]


def _draw(canvas: Canvas, results: Results) -> None:
    axes = canvas.subplots()
    cells = _cells(results.rows)
    for mode, colour, shift in zip(MODES, (plots.BLUE, plots.VERMILION), (-0.15, 0.15), strict=True):
        rows = [row for row in results.rows if row["mode"] == mode]
        places = [cells.index((row["dialect"], row["batch"])) + shift for row in rows]
        axes.plot(places, [row["seconds"] for row in rows], "o", color=colour, alpha=0.6, label=mode)
    axes.set(
        ylabel="seconds", xticks=range(len(cells)), xticklabels=[f"{one}, {batch} at a time" for one, batch in cells]
    )
    axes.set_ylim(bottom=0)
    axes.legend()


KIND = Kind("forced_runs", Settings, run, tables, figures)
