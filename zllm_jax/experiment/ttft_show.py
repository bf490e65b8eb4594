"""What the rows of ttft_restore say: medians, speed-ups, break-even lengths; tables and plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zllm_jax.experiment import plots
from zllm_jax.experiment.kind import Table
from zllm_jax.experiment.plots import Figure
from zllm_jax.experiment.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Rows = Sequence[Mapping[str, Any]]

MODES = {  # name in results -> words, colour, marker
    "cold": ("computed cold", plots.VERMILION, "o"),
    "disk_cold": ("restored, cold page cache", plots.ORANGE, "D"),
    "disk_warm": ("restored from disk", plots.BLUE, "s"),
    "resident": ("in device memory", plots.GREEN, "^"),
}
PARTS = {  # part of TTFT -> words, colour
    "prep_s": ("prep", plots.PURPLE),
    "queue_s": ("queue", plots.BLACK),
    "restore_s": ("restore", plots.BLUE),
    "prefill_s": ("prefill", plots.SKY),
}


def lengths_of(rows: Rows) -> list[int]:
    return sorted({row["prompt_tokens"] for row in rows})


def modes_of(rows: Rows) -> list[str]:
    present = {row["mode"] for row in rows}
    return [mode for mode in MODES if mode in present]


def values(rows: Rows, mode: str, length: int, key: str) -> list[float]:
    """One column's values of a mode at a length; rows without it are left out."""
    cell = (row for row in rows if row["mode"] == mode and row["prompt_tokens"] == length)
    return [row[key] for row in cell if row.get(key) is not None]


def median(rows: Rows, mode: str, length: int, key: str) -> float:
    found = values(rows, mode, length, key)
    return statistics.median(found) if found else math.nan


def summarise(rows: Rows) -> dict[str, Any]:
    """Flat, one figure a key: `ttft_{mode}_{length}_s`, `speedup_{mode}_{length}`, `break_even_{mode}_tokens`."""
    summary: dict[str, Any] = {}
    lengths = lengths_of(rows)
    cold = [median(rows, "cold", length, "ttft_s") for length in lengths]
    for mode in modes_of(rows):
        times = [median(rows, mode, length, "ttft_s") for length in lengths]
        for length, base, time_s in zip(lengths, cold, times, strict=True):
            summary[f"ttft_{mode}_{length}_s"] = time_s
            if mode != "cold":
                summary[f"speedup_{mode}_{length}"] = base / time_s
            rate = median(rows, mode, length, "restore_bytes_s")
            if not math.isnan(rate):
                summary[f"restore_{mode}_{length}_bytes_s"] = rate
        if mode != "cold":
            summary[f"break_even_{mode}_tokens"] = break_even(lengths, cold, times)
    return summary


def break_even(lengths: Sequence[int], cold: Sequence[float], other: Sequence[float]) -> float | str:
    """The prompt length from which `other` is faster than `cold`, interpolated between measured lengths.

    A text ("< 256", "> 7680") where it lies outside what was measured. Lengths increase; times are seconds.
    """
    gains = [math.log(c / o) for c, o in zip(cold, other, strict=True)]  # > 0: other is faster
    slower = [i for i, gain in enumerate(gains) if gain <= 0]
    if not slower:
        return f"< {lengths[0]}"
    last = slower[-1]
    if last == len(lengths) - 1:
        return f"> {lengths[-1]}"
    share = -gains[last] / (gains[last + 1] - gains[last])
    low, high = math.log(lengths[last]), math.log(lengths[last + 1])
    return round(math.exp(low + share * (high - low)), 1)


def missed_targets(summary: Mapping[str, Any], targets: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each target that was measured and not reached."""
    missed = []
    for target in targets:
        at = f"{target['mode']}_{target['prompt_tokens']}"
        speedup, ttft_s = summary.get(f"speedup_{at}"), summary.get(f"ttft_{at}_s")
        if speedup is not None and speedup < target["min_speedup"]:
            missed.append(f"{at} is {speedup:.1f} times faster than cold, target {target['min_speedup']:g}")
        if ttft_s is not None and target["max_ttft_s"] is not None and ttft_s > target["max_ttft_s"]:
            missed.append(f"{at} takes {ttft_s * 1e3:.0f} ms, target {target['max_ttft_s'] * 1e3:.0f} ms")
    return missed


def tables(results: Results) -> list[Table]:
    """TTFT and speed-up by length; where the time goes; what the disk gave."""
    rows, summary = results.rows, results.summary
    lengths, modes = lengths_of(rows), modes_of(rows)
    restored = [mode for mode in modes if mode != "cold"]

    def cell(mode: str, length: int) -> str:
        time_s = seconds(summary[f"ttft_{mode}_{length}_s"])
        return time_s if mode == "cold" else f"{time_s} ({summary[f'speedup_{mode}_{length}']:.1f}x)"

    main = Table(
        "Time to first token of the next turn, and how many times sooner than computed cold",
        ("prompt tokens", *(MODES[mode][0] for mode in modes)),
        tuple((f"{length:,}", *(cell(mode, length) for mode in modes)) for length in lengths),
    )
    even = Table(
        "Below this prompt length, recomputing is faster",
        ("from", "tokens"),
        tuple((MODES[mode][0], _tokens(summary[f"break_even_{mode}_tokens"])) for mode in restored),
    )
    parts = Table(
        "Parts of the time to first token (medians)",
        ("prompt tokens", "state", *(words for words, _ in PARTS.values()), "cached tokens", "MB read", "GB/s",
         "of disk rate", "of copy rate"),
        tuple(_parts_row(rows, mode, length) for length in lengths for mode in modes),
    )  # fmt: skip
    return [main, even, parts]


def _parts_row(rows: Rows, mode: str, length: int) -> tuple[str, ...]:
    def cell(key: str, scale: float, form: str) -> str:
        value = median(rows, mode, length, key)
        return "-" if math.isnan(value) else format(value * scale, form)

    read = median(rows, mode, length, "bytes_read")
    return (
        f"{length:,}",
        MODES[mode][0],
        *(seconds(median(rows, mode, length, part)) for part in PARTS),
        cell("cached_tokens", 1, ",.0f"),
        cell("bytes_read", 1e-6, ".1f") if read else "-",
        cell("restore_bytes_s", 1e-9, ".2f"),
        cell("share_of_disk_read", 1, ".0%"),
        cell("share_of_copy", 1, ".0%"),
    )


def figures(results: Results) -> list[Figure]:
    claim = "Time to first token of a conversation's next turn against its prompt length; median and range."
    return [
        Figure("ttft", claim, lambda canvas: _draw_ttft(canvas, results.rows)),
        Figure(
            "parts",
            "Where the time to first token goes when the state is restored or resident, by prompt length. "
            "Medians; each panel has its own scale; a cold run, for comparison, is all prefill.",
            lambda canvas: _draw_parts(canvas, results.rows),
            (9.0, 1.6 + 2.0 * math.ceil(len(lengths_of(results.rows)) / 3)),
        ),
    ]


def _draw_ttft(canvas: Canvas, rows: Rows) -> None:
    axes = canvas.subplots()
    lengths = lengths_of(rows)
    for mode in modes_of(rows):
        words, colour, marker = MODES[mode]
        middle = [median(rows, mode, length, "ttft_s") for length in lengths]
        low = [min(values(rows, mode, length, "ttft_s")) for length in lengths]
        high = [max(values(rows, mode, length, "ttft_s")) for length in lengths]
        axes.fill_between(lengths, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(lengths, middle, color=colour, marker=marker, label=words)
    axes.set(xscale="log", yscale="log", xlabel="prompt length (tokens)", ylabel="time to first token (s)")
    plots.plain_ticks(axes, lengths)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend()


def _draw_parts(canvas: Canvas, rows: Rows) -> None:
    # Beside a cold run's bar, which is all prefill, the parts of the others could not be seen.
    lengths, modes = lengths_of(rows), [mode for mode in modes_of(rows) if mode != "cold"]
    columns = min(3, len(lengths))
    grid = canvas.subplots(math.ceil(len(lengths) / columns), columns, squeeze=False).ravel()
    for axes, length in zip(grid, lengths, strict=False):
        left = [0.0] * len(modes)
        for part, (words, colour) in PARTS.items():
            width = [median(rows, mode, length, part) for mode in modes]
            axes.barh(range(len(modes)), width, left=left, color=colour, label=words, height=0.7)
            left = [a + b for a, b in zip(left, width, strict=True)]
        for place, end in enumerate(left):
            axes.annotate(seconds(end), (end, place), xytext=(3, 0), textcoords="offset points", va="center", size=8)
        cold = seconds(median(rows, "cold", length, "ttft_s"))
        axes.set(title=f"{length:,} tokens\n(cold: {cold})", xlabel="seconds", xlim=(0, max(left) * 1.3))
        axes.locator_params(axis="x", nbins=4)
        axes.set_yticks(range(len(modes)), [_short(mode) for mode in modes])
        axes.grid(visible=False, axis="y")
        axes.invert_yaxis()
    for axes in grid[len(lengths) :]:
        axes.set_axis_off()
    canvas.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(PARTS))


def _short(mode: str) -> str:
    return mode.replace("_", ", ")


def seconds(value: float) -> str:
    """Seconds as people read them: `4.31 s`, `152 ms`, `0.42 ms`."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.2f} ms"


def _tokens(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}"
