"""What the rows of fence_overhead say: medians, costs, the stages beside the stated figures; tables and plots."""

from __future__ import annotations

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

WORDS = {"text": "in a text", "value": "after a value", "name": "in a name"}
WAYS = {"device": ("on the device", plots.BLUE), "host": ("driven by the host", plots.VERMILION)}
STAGES = {  # part of the host's way -> words, stated range in microseconds
    "fetch": ("drawn token to the host", (5.0, 15.0)),
    "advance": ("grammar follows it", (2.0, 10.0)),
    "mask": ("mask computed", (10.0, 30.0)),
    "put": ("mask to the device", (15.0, 40.0)),
    "apply": ("mask applied", (0.0, 1.0)),
}
LAUNCHED = ("put", "apply", "device_mask", "device_advance")  # timed with a program's launch, shown without it
STATED_US = (1.5, 8.0, 2.76, 5.0)
CACHE_BYTES_S = 12e12  # of the stated fetch
ANSWER_TOKENS = 500


def cell(place: str, batch: int, temperature: float) -> str:
    """A place in words."""
    return f"{WORDS[place]}, batch {batch}, temperature {temperature:g}"


def overhead(summary: Mapping[str, Any], way: str, place: str, batch: int, temperature: float) -> float:
    """What a way adds to a free step, as a share of it."""
    return float(summary[f"overhead_{way}_{place}_{batch}_{temperature:g}"])


def summarise(rows: Rows) -> dict[str, Any]:
    """Medians of steps and stages, and costs as ratios of medians."""
    summary: dict[str, Any] = {}
    steps = [row for row in rows if row["measured"] == "step"]
    for batch, temperature in _conditions(steps):
        free = summary[f"free_{batch}_{temperature:g}_s"] = _step_s(steps, "free", "", batch, temperature)
        single = summary[f"free_single_{batch}_{temperature:g}_s"] = _step_s(
            steps, "free_single", "", batch, temperature
        )
        for place in _places(steps):
            device, host = (_step_s(steps, way, place, batch, temperature) for way in WAYS)
            where = f"{place}_{batch}_{temperature:g}"
            summary[f"overhead_device_{where}"] = device / free - 1
            summary[f"overhead_host_{where}"] = host / free - 1
            summary[f"host_added_{where}_s"] = host - single
    stages = [row for row in rows if row["measured"] == "stages"]
    for place in _places(stages):
        for batch in sorted({row["batch"] for row in stages}):
            here = [row for row in stages if (row["place"], row["batch"]) == (place, batch)]
            launch_s = statistics.median(row["launch_s"] for row in here)
            summary[f"launch_{place}_{batch}_s"] = launch_s
            for part in (*STAGES, "device_mask", "device_advance"):
                median_s = statistics.median(row[f"{part}_s"] for row in here)
                summary[f"{part}_{place}_{batch}_s"] = median_s - launch_s * (part in LAUNCHED)
    return summary


def _conditions(steps: Rows) -> list[tuple[int, float]]:
    return sorted({(row["batch"], row["temperature"]) for row in steps})


def _places(rows: Rows) -> list[str]:
    return [place for place in WORDS if any(row["place"] == place for row in rows)]


def _times(steps: Rows, way: str, place: str, batch: int, temperature: float) -> list[float]:
    wanted = (way, place, batch, temperature)
    return [row["step_s"] for row in steps if tuple(row[k] for k in ("way", "place", "batch", "temperature")) == wanted]


def _step_s(steps: Rows, way: str, place: str, batch: int, temperature: float) -> float:
    return statistics.median(_times(steps, way, place, batch, temperature))


def _stage_s(summary: Mapping[str, Any], part: str, batch: int) -> float:
    """The median place's."""
    return float(statistics.median(summary[f"{part}_{place}_{batch}_s"] for place in WORDS))


def alone_share(summary: Mapping[str, Any], place: str, batch: int) -> float:
    """What mask and advance on the device take when nothing else runs, of the quickest free step."""
    parts_s = sum(summary[f"device_{part}_{place}_{batch}_s"] for part in ("mask", "advance"))
    free = [value for key, value in summary.items() if key.startswith(f"free_{batch}_")]
    return float(parts_s / min(free))


def host_s(summary: Mapping[str, Any], batch: int) -> float:
    """All stages of the host's way for one step, with one launch for the masked program."""
    return sum(_stage_s(summary, part, batch) for part in (*STAGES, "launch"))


def tables(results: Results) -> list[Table]:
    """Cost by place and way; the stated figures beside ours; the parts by batch."""
    steps = [row for row in results.rows if row["measured"] == "step"]
    batches = sorted({batch for batch, _ in _conditions(steps)})
    return [_cost(results.summary, steps), _figures(results.summary, batches), _parts(results.summary, batches)]


def _cost(summary: Mapping[str, Any], steps: Rows) -> Table:
    lines = []
    for batch, temperature in _conditions(steps):
        free, single = (summary[f"{way}_{batch}_{temperature:g}_s"] for way in ("free", "free_single"))
        costs = [f"{overhead(summary, way, place, batch, temperature):+.1%}" for way in WAYS for place in WORDS]
        lines.append((f"{batch}, {temperature:g}", f"{free * 1e3:.1f} ms", *costs, f"{single / free - 1:+.1%}"))
    heads = [f"{words}, {WORDS[place]}" for words, _ in WAYS.values() for place in WORDS]
    columns = ("batch, temperature", "free step", *heads, "free, one step a call")
    return Table("What a way adds to a free step (medians)", columns, tuple(lines))


def _figures(summary: Mapping[str, Any], batches: Sequence[int]) -> Table:
    """Stated, computed from the formula, measured here."""
    first, last = batches[0], batches[-1]
    mask_bytes, masks_bytes = summary["mask_bytes"], summary["masks_bytes"]
    states, tokens = summary["table_states"], summary["table_tokens"]
    token_us, here_s = sum(STATED_US), host_s(summary, first)
    warmest = max(float(key.split("_")[2]) for key in summary if key.startswith(f"free_{last}_"))
    added_s = statistics.median(summary[f"host_added_{place}_{last}_{warmest:g}_s"] for place in WORDS)
    lost = [1 - 1 / (1 + overhead(summary, "host", place, last, warmest)) for place in WORDS]
    fetch_ns, here_ns = mask_bytes / CACHE_BYTES_S * 1e9, mask_bytes / summary["read_bytes_s"] * 1e9
    lines = [
        (f"mask of a state, {tokens:,} tokens", "16 KiB", f"{tokens / 8 / 1024:g} KiB", f"{mask_bytes / 1024:g} KiB"),
        (f"masks of {states} states", "8 MiB", f"{states * tokens / 8 / 2**20:g} MiB", f"{masks_bytes / 2**20:g} MiB"),
        ("one mask read", "1.33 ns", f"{fetch_ns:.2f} ns (16 KiB, 12 TB/s)", f"{here_ns:.0f} ns (its bytes, our rate)"),
        ("host-driven, a token", "17.26 us", f"{token_us:.2f} us", f"{here_s * 1e6:.0f} us"),
        (
            f"host-driven, {ANSWER_TOKENS} tokens",
            "8.63 ms",
            f"{ANSWER_TOKENS * token_us / 1e3:.2f} ms",
            f"{ANSWER_TOKENS * here_s * 1e3:.1f} ms",
        ),
        (f"under load, a step (here: batch {last})", "50-150 us", "not from a formula", f"{added_s * 1e6:+.0f} us"),
        (
            f"under load, {ANSWER_TOKENS} steps",
            "25-75 ms",
            f"{ANSWER_TOKENS * 50 / 1e3:g}-{ANSWER_TOKENS * 150 / 1e3:g} ms",
            f"{ANSWER_TOKENS * added_s * 1e3:+.0f} ms",
        ),
        ("under load, throughput lost", "15-35 %", "depends on the step", f"{statistics.median(lost):.1%}"),
    ]
    for part, (words, (low, high)) in STAGES.items():
        stated = f"{low:g}-{high:g} us" if low else f"< {high:g} us"
        lines.append(
            (f"stage: {words}", stated, "not from a formula", f"{_stage_s(summary, part, first) * 1e6:.1f} us")
        )
    return Table("Stated, computed, measured here", ("figure", "stated", "computed", "here"), tuple(lines))


def _parts(summary: Mapping[str, Any], batches: Sequence[int]) -> Table:
    words = {part: f"host: {words}" for part, (words, _) in STAGES.items()}
    words |= {"launch": "launch of a program", "device_mask": "device: mask", "device_advance": "device: advance"}
    columns = [(place, batch) for batch in batches for place in WORDS]
    heads = tuple(f"{WORDS[place]}, batch {batch}" for place, batch in columns)
    lines = [
        (name, *(f"{summary[f'{part}_{place}_{batch}_s'] * 1e6:.1f}" for place, batch in columns))
        for part, name in words.items()
    ]
    return Table("Each part by itself, microseconds (medians)", ("part", *heads), tuple(lines))


def figures(results: Results) -> list[Figure]:
    steps = [row for row in results.rows if row["measured"] == "step"]
    return [
        Figure(
            "overhead",
            "What a fence adds to a free decode step, as a share of it: followed on the device, and with a mask from "
            "the host for each step. Dots are ratios of medians; lines span the middle half of the single calls.",
            lambda canvas: _draw_cost(canvas, results.summary, steps),
            (8.0, 1.2 + 1.1 * len(_conditions(steps))),
        ),
        Figure(
            "stages",
            "The stages of the host's way: the ranges that are stated for a GPU, and what they take here at batch "
            f"{min(row['batch'] for row in steps)}. The last two are what the device's way takes instead.",
            lambda canvas: _draw_stages(canvas, results.summary, min(row["batch"] for row in steps)),
            (8.0, 3.6),
        ),
    ]


def _draw_cost(canvas: Canvas, summary: Mapping[str, Any], steps: Rows) -> None:
    axes = canvas.subplots()
    lines = [(*condition, place) for condition in _conditions(steps) for place in WORDS]
    for way, (words, colour) in WAYS.items():
        shift = 0.18 if way == "host" else -0.18
        for at, (batch, temperature, place) in enumerate(lines):
            free = summary[f"free_{batch}_{temperature:g}_s"]
            times = _times(steps, way, place, batch, temperature)
            low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
            axes.plot([(low / free - 1) * 100, (high / free - 1) * 100], [at + shift] * 2, color=colour, alpha=0.4)
        costs = [overhead(summary, way, place, batch, temperature) * 100 for batch, temperature, place in lines]
        axes.plot(costs, [at + shift for at in range(len(lines))], "o", color=colour, label=words)
    axes.axvline(0, color=plots.BLACK, linewidth=0.8)
    axes.set_yticks(range(len(lines)), [cell(place, batch, temperature) for batch, temperature, place in lines])
    axes.set(xlabel="added to a free step (%)")
    axes.invert_yaxis()
    axes.legend()


def _draw_stages(canvas: Canvas, summary: Mapping[str, Any], batch: int) -> None:
    axes = canvas.subplots()
    names = [*(words for words, _ in STAGES.values()), "device: mask", "device: advance"]
    least = 0.1
    for at, (low, high) in enumerate(stated for _, stated in STAGES.values()):
        axes.barh(at, high - max(low, least), left=max(low, least), color=plots.SKY, height=0.5)
    for parts, colour, label in (
        (tuple(STAGES), plots.VERMILION, "driven by the host, here"),
        (("device_mask", "device_advance"), plots.BLUE, "on the device, here"),
    ):
        first = 0 if parts[0] in STAGES else len(STAGES)
        here = [max(_stage_s(summary, part, batch) * 1e6, least) for part in parts]
        axes.plot(here, range(first, first + len(parts)), "o", color=colour, label=label)
    axes.barh(0, 0, color=plots.SKY, label="stated, on a GPU")
    axes.set_yticks(range(len(names)), names)
    axes.set(xscale="log", xlabel="microseconds a step")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.invert_yaxis()
    axes.legend()
