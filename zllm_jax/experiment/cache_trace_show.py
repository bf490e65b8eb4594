"""What the rows of cache_trace say: means over seeds, what a policy gains over LRU; tables and plots."""

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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Rows = Sequence[Mapping[str, Any]]

POLICIES = {  # name in results -> words, colour, marker
    "lru": ("least recently used", plots.ORANGE, "o"),
    "cost": ("cost", plots.BLUE, "s"),
    "clairvoyant": ("clairvoyant", plots.BLACK, "^"),
}
TIERS = {False: ("memory only", "--"), True: ("with disk", "-")}


def of(rows: Rows, **wanted: Any) -> Rows:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def mean(rows: Rows, key: str) -> float | None:
    found = [row[key] for row in rows if row[key] is not None]
    return statistics.mean(found) if found else None


def values(rows: Rows, key: str) -> list[Any]:
    """The different values of a column, in the order of their first row."""
    return list(dict.fromkeys(row[key] for row in rows))


def summarise(rows: Rows) -> dict[str, Any]:
    """Flat, one figure a key; memory is in per cent of the working set.

    `share_{trace}_{policy}_{memory}`: saved seconds over those of unlimited memory, memory only.
    `gain_{trace}_{policy}_{memory}`: saved seconds over those of LRU less 1, memory only; mean over seeds.
    `restore_{trace}_{policy}_{memory}`: restore seconds over those of LRU less 1, with a disk.
    """
    summary: dict[str, Any] = {}
    for trace in values(rows, "trace"):
        for memory in values(rows, "memory"):
            here = of(rows, trace=trace, memory=memory)
            for policy in values(rows, "policy"):
                at = f"{trace}_{policy}_{memory * 100:g}"
                alone = of(here, policy=policy, disk=False)
                summary[f"share_{at}"] = statistics.mean(row["saved_s"] / row["unlimited_saved_s"] for row in alone)
                if policy != "lru":
                    summary[f"gain_{at}"] = _over_lru(here, policy, "saved_s", disk=False)
                    summary[f"restore_{at}"] = _over_lru(here, policy, "restore_s", disk=True)
    return summary


def _over_lru(rows: Rows, policy: str, key: str, *, disk: bool) -> float | None:
    """Mean over seeds of a column's ratio to LRU, less 1."""
    ratios = []
    for seed in values(rows, "seed"):
        ((one,), (lru,)) = (of(rows, seed=seed, disk=disk, policy=name) for name in (policy, "lru"))
        if lru[key]:
            ratios.append(one[key] / lru[key] - 1)
    return statistics.mean(ratios) if ratios else None


def tables(results: Results) -> list[Table]:
    """What each policy saves, by trace; then all that was counted."""
    rows = results.rows
    return [
        *(_gains(rows, results.summary, trace) for trace in values(rows, "trace")),
        *(_details(of(rows, trace=trace), trace) for trace in values(rows, "trace")),
    ]


def _gains(rows: Rows, summary: Mapping[str, Any], trace: str) -> Table:
    def row(memory: float) -> tuple[str, ...]:
        def at(key: str, policy: str, form: str) -> str:
            value = summary[f"{key}_{trace}_{policy}_{memory * 100:g}"]
            return "-" if value is None else format(value, form)

        return (
            f"{memory:.0%}",
            *(at("share", policy, ".1%") for policy in POLICIES),
            *(at("gain", policy, "+.1%") for policy in ("cost", "clairvoyant")),
            *(at("restore", policy, "+.1%") for policy in ("cost", "clairvoyant")),
        )

    return Table(
        f"{trace}: prefill time saved without a disk, and restoring with one",
        ("memory", *(f"{words}, of unlimited" for words, _, _ in POLICIES.values()), "cost over LRU",
         "clairvoyant over LRU", "restore time, cost over LRU", "restore time, clairvoyant over LRU"),
        tuple(map(row, values(rows, "memory"))),
    )  # fmt: skip


def _details(rows: Rows, trace: str) -> Table:
    columns = {
        "hit_rate_memory": ("hits in memory", ".1%"),
        "hit_rate_disk": ("hits on disk", ".1%"),
        "cached_share_memory": ("tokens from memory", ".1%"),
        "cached_share_disk": ("tokens from disk", ".1%"),
        "ttft_p50_s": ("TTFT p50", "s"),
        "ttft_p99_s": ("TTFT p99", "s"),
        "written_bytes_per_saved_token": ("bytes written per token saved", ",.0f"),
    }

    def cells(memory: float, disk: bool, policy: str) -> tuple[str, ...]:
        here = of(rows, memory=memory, disk=disk, policy=policy)
        found = [(mean(here, key), form) for key, (_, form) in columns.items()]
        return tuple(
            "-" if value is None else seconds(value) if form == "s" else f"{value:{form}}" for value, form in found
        )

    return Table(
        f"{trace}: all counts (means over seeds)",
        ("memory", "tiers", "policy", *(words for words, _ in columns.values())),
        tuple(
            (f"{memory:.0%}", TIERS[disk][0], POLICIES[policy][0], *cells(memory, disk, policy))
            for memory in values(rows, "memory")
            for disk in TIERS
            for policy in POLICIES
        ),
    )


def figures(results: Results) -> list[Figure]:
    rows, columns = _grid(len(values(results.rows, "trace")))
    size_in = (1.0 + 3.4 * columns, 1.0 + 3.2 * rows)
    return [
        Figure(
            "saved",
            "Prefill time saved, less restoring, as a share of what unlimited memory saves, against memory. Lines are "
            "means over seeds, bands their range; those with a disk lie on one another.",
            lambda canvas: _draw(canvas, results.rows, _draw_saved, "share of unlimited"),
            size_in,
        ),
        Figure(
            "ttft",
            "Median (thin) and 99th percentile (thick) of the time to first token against memory, without a queue.",
            lambda canvas: _draw(canvas, results.rows, _draw_ttft, "time to first token (s)"),
            size_in,
        ),
        Figure(
            "written",
            "Bytes written to disk for each token that was read back instead of being computed, against memory.",
            lambda canvas: _draw(canvas, results.rows, _draw_written, "bytes written per token saved"),
            size_in,
        ),
    ]


def _grid(panels: int) -> tuple[int, int]:
    """Rows and columns."""
    columns = min(3, panels)
    return math.ceil(panels / columns), columns


def _draw(canvas: Canvas, rows: Rows, draw: Any, label: str) -> None:
    traces = values(rows, "trace")
    grid = canvas.subplots(*_grid(len(traces)), squeeze=False).ravel()
    for axes in grid[len(traces) :]:
        axes.set_axis_off()
    for axes, trace in zip(grid, traces, strict=False):
        draw(axes, of(rows, trace=trace))
        memory = values(rows, "memory")
        axes.set(title=trace, xscale="log", xlabel="memory (% of working set)", ylabel=label)
        axes.set_xticks(memory, [f"{100 * share:g}" for share in memory])
        axes.set_xticks([], minor=True)
    handles, labels = canvas.axes[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=3)


def _curve(rows: Rows, policy: str, disk: bool, key: str) -> tuple[list[float], list[Rows]]:
    found = of(rows, policy=policy, disk=disk)
    memory = [share for share in values(found, "memory") if mean(of(found, memory=share), key) is not None]
    return memory, [of(found, memory=share) for share in memory]


def _means(points: Sequence[Rows], key: str) -> list[float]:
    return [found for point in points if (found := mean(point, key)) is not None]


def _draw_saved(axes: Axes, rows: Rows) -> None:
    for disk, (tier, style) in TIERS.items():
        for policy, (words, colour, marker) in POLICIES.items():
            memory, points = _curve(rows, policy, disk, "saved_s")
            shares = [[row["saved_s"] / row["unlimited_saved_s"] for row in point] for point in points]
            label = f"{words}, {tier}"
            axes.plot(memory, list(map(statistics.mean, shares)), style, color=colour, marker=marker, label=label)
            axes.fill_between(
                memory, list(map(min, shares)), list(map(max, shares)), color=colour, alpha=0.12, linewidth=0
            )


def _draw_ttft(axes: Axes, rows: Rows) -> None:
    for disk, (tier, style) in TIERS.items():
        for policy, (words, colour, _) in POLICIES.items():
            for key, width in (("ttft_p50_s", 0.9), ("ttft_p99_s", 2.0)):
                memory, points = _curve(rows, policy, disk, key)
                label = f"{words}, {tier}" if key == "ttft_p99_s" else None
                axes.plot(memory, _means(points, key), style, color=colour, linewidth=width, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _draw_written(axes: Axes, rows: Rows) -> None:
    key = "written_bytes_per_saved_token"
    for policy, (words, colour, marker) in POLICIES.items():
        memory, points = _curve(rows, policy, True, key)
        axes.plot(memory, _means(points, key), color=colour, marker=marker, label=words)
    axes.set_yscale("log")
