"""What comparing tokens one by one gains over hashing blocks of them: the same traces, another granularity of a hit."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zllm_jax.cache.policy import CostAware
from zllm_jax.errors import ConfigError
from zllm_jax.experiment import plots
from zllm_jax.experiment.cache_sim import Costs, Served, Simulation, Unlimited, run_unlimited
from zllm_jax.experiment.cache_trace_show import of, values
from zllm_jax.experiment.kind import Kind, Outcome, Progress, Table
from zllm_jax.experiment.plots import Figure
from zllm_jax.experiment.results import Check, Results
from zllm_jax.experiment.traces import Agents, Trace, make_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Rows = Sequence[Mapping[str, Any]]
COLOURS = (plots.GREEN, plots.BLUE, plots.ORANGE, plots.VERMILION, plots.PURPLE, plots.SKY)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """blocks: tokens that one hash covers; 1 is exact matching, and what the others are compared with.

    memory: shares of the working set, without a disk; None is unlimited memory. costs, agents, seeds, page_tokens: as
    in cache_trace.
    """

    costs: Costs
    agents: tuple[Agents, ...] = (Agents(name="agents"),)
    seeds: tuple[int, ...] = (1, 2, 3)
    blocks: tuple[int, ...] = (1, 16, 64, 256)
    memory: tuple[float | None, ...] = (0.25, None)
    page_tokens: int = 128

    def __post_init__(self) -> None:
        if 1 not in self.blocks:
            raise ConfigError(f"settings.blocks is {self.blocks}, must hold 1: the others are compared with it")
        if min(self.blocks) < 1:
            raise ConfigError(f"settings.blocks is {self.blocks}, must be positive")
        if not self.agents or not self.seeds or not self.memory:
            raise ConfigError("settings.agents, seeds and memory must each name at least one")


def run(engine: None, settings: Settings, progress: Progress) -> Outcome:
    """Replay every trace x seed x memory x granularity."""
    rows: list[dict[str, Any]] = []
    total = len(settings.agents) * len(settings.seeds) * len(settings.memory) * len(settings.blocks)
    for agents in settings.agents:
        for seed in settings.seeds:
            trace = make_trace(agents, seed)
            unlimited = run_unlimited(trace, settings.costs, settings.page_tokens)
            for memory in settings.memory:
                for block in settings.blocks:
                    served = _replay(trace, unlimited, settings, memory, block)
                    place = {"trace": trace.name, "seed": seed, "memory": memory, "block_tokens": block}
                    rows.append(place | measures(served, settings.costs))
                    progress("replay the traces", len(rows), total)
    return Outcome(rows, summarise(rows), checks(rows), NOTES)


def _replay(trace: Trace, unlimited: Unlimited, settings: Settings, memory: float | None, block: int) -> list[Served]:
    largest = max(-(-(len(ask.prompt) + len(ask.reply)) // settings.page_tokens) for ask in trace.asks)
    if memory is None:
        num_pages = largest * len(trace.asks)
    else:
        num_pages = max(largest, round(memory * unlimited.working_set_pages))
    simulation = Simulation(
        trace,
        settings.costs,
        CostAware(),
        num_pages=num_pages,
        page_units=settings.page_tokens,
        disk=False,
        match_units=block,
    )
    return [simulation.serve(ask) for ask in trace.asks]


def measures(served: Sequence[Served], costs: Costs) -> dict[str, Any]:
    """What one replay gave."""
    prompt_tokens = sum(one.prompt_tokens for one in served)
    cached = sum(one.cached_tokens for one in served)
    return {
        "requests": len(served),
        "hit_rate": sum(one.cached_tokens > 0 for one in served) / len(served),
        "cached_tokens": cached,
        "cached_share": cached / prompt_tokens,
        "computed_tokens": prompt_tokens - cached,
        "prefill_s": sum(one.prefill_s for one in served),
        "cold_prefill_s": sum(costs.prefill_s(0, one.prompt_tokens) for one in served),
    }


def summarise(rows: Rows) -> dict[str, Any]:
    """Flat; means over seeds. Memory is in per cent of the working set, or `unlimited`.

    `lost_tokens_{trace}_{block}_{memory}`: tokens a request that exact matching reuses and this does not.
    `prefill_{trace}_{block}_{memory}`: prefill seconds over those of exact matching, less 1. `cached_...`: share of
    the prompt's tokens that are reused.
    """
    summary: dict[str, Any] = {}
    for trace in values(rows, "trace"):
        for memory in values(rows, "memory"):
            here = of(rows, trace=trace, memory=memory)
            exact = {row["seed"]: row for row in of(here, block_tokens=1)}
            for block in values(rows, "block_tokens"):
                found = of(here, block_tokens=block)
                at = f"{trace}_{block}_{_memory(memory)}"
                summary[f"cached_{at}"] = statistics.mean(row["cached_share"] for row in found)
                summary[f"hit_rate_{at}"] = statistics.mean(row["hit_rate"] for row in found)
                if block > 1:
                    pairs = [(row, exact[row["seed"]]) for row in found]
                    summary[f"lost_tokens_{at}"] = statistics.mean(
                        (one["cached_tokens"] - row["cached_tokens"]) / row["requests"] for row, one in pairs
                    )
                    summary[f"prefill_{at}"] = statistics.mean(
                        row["prefill_s"] / one["prefill_s"] - 1 for row, one in pairs
                    )
    return summary


def _memory(memory: float | None) -> str:
    return "unlimited" if memory is None else f"{memory * 100:g}"


def checks(rows: Rows) -> list[Check]:
    """What must hold whatever the trace."""
    unlimited = of(rows, memory=None)
    worse = []
    for row in unlimited:
        (exact,) = of(unlimited, trace=row["trace"], seed=row["seed"], block_tokens=1)
        if row["cached_tokens"] > exact["cached_tokens"]:
            worse.append(row)
    return [
        Check(
            "With unlimited memory no block size reuses more than exact matching",
            not worse,
            f"{len(unlimited)} replays",
        )
    ]


NOTES = (
    "The simulation of cache_trace, with the cost policy and no disk. A hit of hash blocks ends at the last whole "
    "block that is equal; an exact hit ends at the last equal token, and the page that it ends in is copied.",
    "Pages have the same size for all block sizes, so that only the granularity of a hit differs. A paged cache whose "
    "pages are its hash blocks would also waste on average half a block of memory for each kept state.",
    "Trace files of hashed blocks cannot be used: what is equal inside a block cannot be told.",
)


def tables(results: Results) -> list[Table]:
    rows, summary = results.rows, results.summary

    def cells(trace: str, memory: float | None, block: int) -> tuple[str, ...]:
        at = f"{trace}_{block}_{_memory(memory)}"
        lost, prefill = summary.get(f"lost_tokens_{at}"), summary.get(f"prefill_{at}")
        return (
            trace,
            "unlimited" if memory is None else f"{memory:.0%}",
            "exact" if block == 1 else f"{block}",
            f"{summary[f'hit_rate_{at}']:.1%}",
            f"{summary[f'cached_{at}']:.2%}",
            "-" if lost is None else f"{lost:,.0f}",
            "-" if prefill is None else f"{prefill:+.1%}",
        )

    return [
        Table(
            "Exact matching against hash blocks (means over seeds)",
            ("trace", "memory", "block", "requests with a hit", "tokens reused", "tokens lost a request",
             "prefill time over exact"),
            tuple(
                cells(trace, memory, block)
                for trace in values(rows, "trace")
                for memory in values(rows, "memory")
                for block in values(rows, "block_tokens")
            ),
        )
    ]  # fmt: skip


def figures(results: Results) -> list[Figure]:
    return [
        Figure(
            "prefill",
            "Prefill time that hash blocks cost over exact matching, by trace and memory; means over seeds.",
            lambda canvas: _draw(canvas, results),
            (8.0, 4.0),
        )
    ]


def _draw(canvas: Canvas, results: Results) -> None:
    axes = canvas.subplots()
    rows, summary = results.rows, results.summary
    blocks = [block for block in values(rows, "block_tokens") if block > 1]
    places = [(trace, memory) for trace in values(rows, "trace") for memory in values(rows, "memory")]
    width = 0.8 / len(blocks)
    for number, block in enumerate(blocks):
        heights = [100 * summary[f"prefill_{trace}_{block}_{_memory(memory)}"] for trace, memory in places]
        left = [place + number * width for place in range(len(places))]
        bars = axes.bar(
            left, heights, width, align="edge", color=COLOURS[number % len(COLOURS)], label=f"{block} tokens"
        )
        axes.bar_label(bars, fmt="%.1f", size=8)
    names = [f"{trace}\n{_memory(memory)}{'' if memory is None else ' %'} memory" for trace, memory in places]
    axes.set_xticks([place + 0.4 for place in range(len(places))], names)
    axes.set_ylabel("prefill time over exact matching (%)")
    axes.grid(visible=False, axis="x")
    canvas.legend(title="hash blocks of", ncols=len(blocks), loc="outside upper center")


KIND = Kind("cache_granularity", Settings, run, tables, figures, needs_engine=False)
