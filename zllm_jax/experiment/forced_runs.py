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
from zllm_jax.experiment.kind import Engine, Kind, Outcome, Progress, Table
from zllm_jax.experiment.plots import Figure
from zllm_jax.experiment.results import Check, Results
from zllm_jax.values import Envelope, Fence, Request, Sampling, Status

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

MODES = ("appended", "drawn")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A function that is called: its parameters as a JSON Schema."""

    name: str
    parameters: Any

    @property
    def call(self) -> dict[str, Any]:
        """The schema of a call of it, and of nothing else."""
        properties = {"name": {"const": self.name}, "arguments": self.parameters}
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """functions: what is called, one a request. batches: requests at a time.

    min_speedup: of one request alone, checked only when `enforce_targets`.
    """

    functions: tuple[Signature, ...]
    batches: tuple[int, ...] = (1, 8)
    repetitions: int = 5
    max_tokens: int = 256
    temperature: float = 0.7
    min_speedup: float = 2.0
    enforce_targets: bool = False

    def __post_init__(self) -> None:
        if not self.functions or not self.batches or min(self.batches) < 1:
            raise ConfigError("settings.functions and settings.batches must each name at least one, batches positive")
        if self.repetitions < 1:
            raise ConfigError(f"settings.repetitions is {self.repetitions}, must be at least 1")


def run(engine: Engine, settings: Settings, progress: Progress) -> Outcome:
    """A row for each function, batch, repetition and mode; the two modes run in turn, and each begins every other."""
    engine.warmup(progress=progress)
    cells = [(one, batch) for one in settings.functions for batch in settings.batches]
    rows: list[dict[str, Any]] = []
    total = settings.repetitions * len(cells)
    for i in range(total):
        progress("call functions", i, total)
        (function, batch), repetition = cells[i % len(cells)], i // len(cells)
        if repetition == 0:
            _calls(engine, settings, function, 1, repetition, MODES[0])  # the grammar is compiled here
        for mode in MODES if repetition % 2 == 0 else MODES[::-1]:
            rows.append(_calls(engine, settings, function, batch, repetition, mode))
    progress("call functions", total, total)
    summary = summarise(rows)
    target = f"one call is {summary['speedup_1']:.2f} times as fast" if "speedup_1" in summary else "no single calls"
    checks = [_complete(rows)]
    if settings.enforce_targets:
        checks.append(Check("Speed target", summary.get("speedup_1", 0.0) >= settings.min_speedup, target))
    return Outcome(rows, summary, checks, [f"Forced runs appended: {target}."])


def _calls(
    engine: Engine, settings: Settings, function: Signature, batch: int, repetition: int, mode: str
) -> dict[str, Any]:
    """`batch` requests at once, from the first one's start to the last one's end."""
    engine.append_runs(mode == "appended")
    requests = [
        Request(
            [{"role": "user", "content": f"Example {i}: call {function.name} with arguments that you make up."}],
            max_tokens=settings.max_tokens,
            sampling=Sampling(temperature=settings.temperature, seed=100 * repetition + i),
            fence=Fence(schema=function.call),
            cache=False,
        )
        for i in range(batch)
    ]
    started = time.perf_counter()
    with ThreadPoolExecutor(batch) as pool:
        envelopes = list(pool.map(engine.generate, requests))
    seconds = time.perf_counter() - started
    engine.append_runs(True)
    return {"function": function.name, "batch": batch, "repetition": repetition, "mode": mode, **_sums(envelopes)} | {
        "seconds": seconds
    }


def _sums(envelopes: Sequence[Envelope]) -> dict[str, int]:
    return {
        "completed": sum(one.status is Status.COMPLETED for one in envelopes),
        "text_bytes": sum(len(one.text.encode()) for one in envelopes),
        "tokens": sum(len(one.tokens) for one in envelopes),
        "forced_tokens": sum(one.telemetry.forced_tokens for one in envelopes),
    }


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over pairs of the same function, batch and repetition.

    speedup: seconds drawn over seconds appended; speedup_per_byte: likewise by byte of text, as the two may say texts
    of different length; forced_share: of the tokens with runs appended.
    """
    summary: dict[str, Any] = {}
    of = {(row["function"], row["batch"], row["repetition"], row["mode"]): row for row in rows}
    pairs = [(row, of[(*key[:3], "drawn")]) for key, row in of.items() if key[3] == "appended"]
    for batch in sorted({row["batch"] for row in rows}):
        cell = [(on, off) for on, off in pairs if on["batch"] == batch]
        summary[f"speedup_{batch}"] = statistics.median(off["seconds"] / on["seconds"] for on, off in cell)
        summary[f"speedup_per_byte_{batch}"] = statistics.median(
            off["seconds"] * on["text_bytes"] / (on["seconds"] * off["text_bytes"]) for on, off in cell
        )
        for i, mode in enumerate(MODES):
            summary[f"{mode}_s_{batch}"] = statistics.median(pair[i]["seconds"] for pair in cell)
            summary[f"{mode}_tokens_{batch}"] = statistics.median(pair[i]["tokens"] / batch for pair in cell)
        summary[f"forced_share_{batch}"] = statistics.median(on["forced_tokens"] / on["tokens"] for on, _ in cell)
    return summary


def _complete(rows: Sequence[dict[str, Any]]) -> Check:
    cut = [row for row in rows if row["completed"] != row["batch"]]
    return Check("Every call came to its end", not cut, f"{len(rows) - len(cut)} of {len(rows)} rounds did")


def tables(results: Results) -> list[Table]:
    """One line a batch."""
    summary = results.summary
    lines = [
        (
            f"{batch} at a time",
            *(f"{summary[f'{mode}_s_{batch}']:.2f} s, {summary[f'{mode}_tokens_{batch}']:.0f}" for mode in MODES),
            f"{summary[f'forced_share_{batch}']:.0%}",
            f"{summary[f'speedup_{batch}']:.2f}",
            f"{summary[f'speedup_per_byte_{batch}']:.2f}",
        )
        for batch in sorted({row["batch"] for row in results.rows})
    ]
    columns = ("calls", "appended: time, tokens a call", "drawn: time, tokens a call", "forced", "speed-up", "by byte")
    return [Table("Forced runs appended against drawn (medians)", columns, tuple(lines))]


def figures(results: Results) -> list[Figure]:
    caption = "Seconds of each round of calls: forced runs appended at once, and the same drawn token by token."
    return [Figure("rounds", caption, lambda canvas: _draw(canvas, results), (7.0, 3.6))]


def _draw(canvas: Canvas, results: Results) -> None:
    axes = canvas.subplots()
    batches = sorted({row["batch"] for row in results.rows})
    for mode, colour, shift in zip(MODES, (plots.BLUE, plots.VERMILION), (-0.15, 0.15), strict=True):
        cell = [row for row in results.rows if row["mode"] == mode]
        axes.plot(
            [batches.index(row["batch"]) + shift for row in cell],
            [row["seconds"] for row in cell],
            "o",
            color=colour,
            alpha=0.6,
            label=mode,
        )
    axes.set(ylabel="seconds", xticks=range(len(batches)), xticklabels=[f"{batch} at a time" for batch in batches])
    axes.set_ylim(bottom=0)
    axes.legend()


KIND = Kind("forced_runs", Settings, run, tables, figures)
