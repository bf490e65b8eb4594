"""What the rows of restore_overlap say: medians, percentiles; tables and plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zllm_jax.experiment import plots
from zllm_jax.experiment.kind import Table
from zllm_jax.experiment.plots import Figure
from zllm_jax.experiment.results import Results
from zllm_jax.experiment.ttft_show import seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Rows = Sequence[Mapping[str, Any]]

MODES = {"blocking": ("all at once", plots.ORANGE), "staged": ("stage by stage", plots.BLUE)}
PLACES = {"disk_warm": "page cache warm", "disk_cold": "page cache cold"}
CONDITIONS = {
    "alone": ("alone", plots.GREEN),
    "beside_restore": ("beside a restore", plots.BLUE),
    "beside_prefill": ("beside a long prompt", plots.VERMILION),
}


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]


def times(rows: Rows, mode: str, place: str, key: str) -> list[float]:
    return [row[key] for row in rows if row["measured"] == mode and row["where"] == place]


def intervals(rows: Rows, condition: str) -> list[float]:
    found = (row for row in rows if row["measured"] == "stream" and row["where"] == condition)
    return [value for row in found for value in row["intervals_s"]]


def summarise(rows: Rows) -> dict[str, Any]:
    """Flat: `ttft_{mode}_{place}_s` and its parts, `gain_{place}`, `p99_{condition}_s`, `median_{condition}_s`.

    And `chunk_s`, the p99 of a chunk alone: it is added to a p99.
    """
    summary: dict[str, Any] = {}
    for place in PLACES:
        for mode in MODES:
            for key in ("ttft_s", "restore_s", "prefill_s"):
                summary[f"{key[:-2]}_{mode}_{place}_s"] = statistics.median(times(rows, mode, place, key))
        summary[f"gain_{place}"] = 1 - summary[f"ttft_staged_{place}_s"] / summary[f"ttft_blocking_{place}_s"]
    for condition in CONDITIONS:
        found = intervals(rows, condition)
        summary[f"p99_{condition}_s"] = percentile(found, 99)
        summary[f"median_{condition}_s"] = statistics.median(found)
        summary[f"num_{condition}"] = len(found)
    chunks = [value for row in rows for value in row.get("chunks_s", ())]
    summary |= {"chunk_s": percentile(chunks, 99), "median_chunk_s": statistics.median(chunks)}
    return summary


def tables(results: Results) -> list[Table]:
    """TTFT by mode and page cache; intervals by condition."""
    s = results.summary
    restores = Table(
        "Time to first token of the restored turn (medians)",
        ("restored", "page cache", "first token", "restore", "prefill after it", "sooner by"),
        tuple(
            (
                words,
                place_words,
                seconds(s[f"ttft_{mode}_{place}_s"]),
                seconds(s[f"restore_{mode}_{place}_s"]),
                seconds(s[f"prefill_{mode}_{place}_s"]),
                f"{s[f'gain_{place}']:.0%}" if mode == "staged" else "-",
            )
            for place, place_words in PLACES.items()
            for mode, (words, _) in MODES.items()
        ),
    )
    streams = Table(
        "Intervals between the tokens of the neighbour stream",
        ("condition", "intervals", "median", "p99"),
        tuple(
            (words, str(s[f"num_{one}"]), seconds(s[f"median_{one}_s"]), seconds(s[f"p99_{one}_s"]))
            for one, (words, _) in CONDITIONS.items()
        ),
    )
    return [restores, streams]


def figures(results: Results) -> list[Figure]:
    return [
        Figure(
            "intervals",
            "Share of a stream's intervals between tokens that are at most so long: alone, while a snapshot of "
            f"{results.config['settings']['snapshot_tokens']:,} tokens restores, and while a prompt of "
            f"{results.config['settings']['long_tokens']:,} tokens is computed.",
            lambda canvas: _draw_intervals(canvas, results.rows),
        ),
        Figure(
            "overlap",
            "Time to first token of a restored turn: all stages restored before the first computes, and each computing "
            "as soon as its own rows are there. Medians; dots are single measurements.",
            lambda canvas: _draw_overlap(canvas, results.rows),
            (8.0, 3.2),
        ),
    ]


def _draw_intervals(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    for condition, (words, colour) in CONDITIONS.items():
        found = sorted(intervals(rows, condition))
        share = [(i + 1) / len(found) for i in range(len(found))]
        axes.step([value * 1e3 for value in found], share, where="post", color=colour, label=words)
    axes.set(xscale="log", xlabel="interval between two tokens (ms)", ylabel="share of intervals", ylim=(0, 1.02))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend()


def _draw_overlap(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    bars = [(place, mode) for place in PLACES for mode in MODES]
    for at, (place, mode) in enumerate(bars):
        found = [value * 1e3 for value in times(rows, mode, place, "ttft_s")]
        axes.barh(at, statistics.median(found), color=MODES[mode][1], height=0.6)
        axes.plot(found, [at] * len(found), "o", color=plots.BLACK, markersize=3)
    axes.set_yticks(range(len(bars)), [f"{MODES[mode][0]}, {PLACES[place]}" for place, mode in bars])
    axes.set(xlabel="time to first token (ms)", xlim=(0, None))
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
