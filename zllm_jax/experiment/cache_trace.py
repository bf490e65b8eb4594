"""What an eviction policy is worth: traces replayed against the two-tier cache under memory that does not suffice.

No engine and no device: look-ups, sharing and policies are the cache's own code, seconds come from measured rates.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zllm_jax.cache.policy import POLICIES, Policy
from zllm_jax.errors import ConfigError
from zllm_jax.experiment.cache_sim import Clairvoyant, Costs, Served, Simulation, Unlimited, run_unlimited
from zllm_jax.experiment.cache_trace_show import figures, summarise, tables
from zllm_jax.experiment.kind import Kind, Outcome, Progress
from zllm_jax.experiment.results import Check
from zllm_jax.experiment.traces import Agents, Trace, make_trace, read_mooncake
from zllm_jax.values import Tier


@dataclass(frozen=True, kw_only=True)
class TraceFile:
    """A file in the format of Mooncake, or its first `requests` requests. One that is not there is left out."""

    name: str
    path: Path
    requests: int | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """With this share of the working set and no disk, the cost policy saves so much more than LRU on this trace."""

    trace: str
    memory: float
    min_gain: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """costs: measured rates. agents: traces that are made, one for each of `seeds`; files: traces that are read.

    memory: shares of the working set, which is the most bytes, over time, that later requests still need.
    """

    costs: Costs
    agents: tuple[Agents, ...] = (Agents(name="agents"),)
    files: tuple[TraceFile, ...] = ()
    seeds: tuple[int, ...] = (1, 2, 3)
    memory: tuple[float, ...] = (0.05, 0.1, 0.25, 0.5, 1.0)
    page_tokens: int = 128
    targets: tuple[Target, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if not self.agents and not self.files:
            raise ConfigError("settings.agents and settings.files are empty: there is nothing to replay")
        if not self.memory or min(self.memory) <= 0:
            raise ConfigError(f"settings.memory is {self.memory}, must be positive shares of the working set")
        if self.page_tokens < 1:
            raise ConfigError(f"settings.page_tokens is {self.page_tokens}, must be at least 1")
        names = [*(agents.name for agents in self.agents), *(file.name for file in self.files)]
        if len(set(names)) < len(names):
            raise ConfigError(f"two traces have one name: {', '.join(names)}")


def run(engine: None, settings: Settings, progress: Progress) -> Outcome:
    """Replay every trace x seed x memory x policy, with and without a disk."""
    traces = list(_traces(settings))
    total = len(traces) * len(settings.memory) * 2 * (len(POLICIES) + 1)
    rows: list[dict[str, Any]] = []
    for trace, seed in traces:
        for row in _replays(trace, settings):
            rows.append({"trace": trace.name, "seed": seed, **row})
            progress("replay the traces", len(rows), total)
    left_out = [file.name for file in settings.files if not file.path.exists()]
    summary = summarise(rows)
    return Outcome(rows, summary, checks(rows, settings), notes(settings, left_out))


def _traces(settings: Settings) -> Iterator[tuple[Trace, int | None]]:
    for agents in settings.agents:
        yield from ((make_trace(agents, seed), seed) for seed in settings.seeds)
    for file in settings.files:
        if file.path.exists():
            yield read_mooncake(file.path, file.name, file.requests), None


def _replays(trace: Trace, settings: Settings) -> Iterator[dict[str, Any]]:
    costs, page_units = settings.costs, max(1, settings.page_tokens // trace.unit_tokens)
    unlimited = run_unlimited(trace, costs, page_units)
    largest = max(-(-(len(ask.prompt) + len(ask.reply)) // page_units) for ask in trace.asks)
    for memory in settings.memory:
        num_pages = max(largest, round(memory * unlimited.working_set_pages))
        for disk in (False, True):
            for policy in _policies(unlimited, costs):
                simulation = Simulation(trace, costs, policy, num_pages=num_pages, page_units=page_units, disk=disk)
                served = [simulation.serve(ask) for ask in trace.asks]
                yield {
                    "memory": memory,
                    "memory_bytes": num_pages * page_units * trace.unit_tokens * costs.token_bytes,
                    "disk": disk,
                    "policy": policy.name,
                    "unlimited_saved_s": saved_s(unlimited.served, costs),
                    **measures(served, costs),
                }


def _policies(unlimited: Unlimited, costs: Costs) -> list[Policy]:
    return [*(make() for make in POLICIES.values()), Clairvoyant(unlimited.later, costs.token_bytes)]


def saved_s(served: Sequence[Served], costs: Costs) -> float:
    """Prefill seconds that the cache saved, less the seconds for restoring."""
    return sum(costs.prefill_s(0, one.prompt_tokens) - one.ttft_s for one in served)


def measures(served: Sequence[Served], costs: Costs) -> dict[str, Any]:
    """What one replay gave."""
    prompt_tokens = sum(one.prompt_tokens for one in served)
    gained = sum(one.gained_tokens for one in served)
    written = sum(one.written_bytes for one in served)
    ttft_s = [one.ttft_s for one in served]

    def of(tier: Tier) -> list[Served]:
        return [one for one in served if one.tier is tier]

    return {
        "requests": len(served),
        "hit_rate_memory": len(of(Tier.RESIDENT)) / len(served),
        "hit_rate_disk": len(of(Tier.DISK)) / len(served),
        "cached_share_memory": sum(one.cached_tokens for one in of(Tier.RESIDENT)) / prompt_tokens,
        "cached_share_disk": sum(one.cached_tokens for one in of(Tier.DISK)) / prompt_tokens,
        "saved_s": saved_s(served, costs),
        "prefill_s": sum(one.prefill_s for one in served),
        "restore_s": sum(one.restore_s for one in served),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "written_bytes": written,
        "write_s": written / costs.write_bytes_s,
        "written_bytes_per_saved_token": written / gained if gained else None,
    }


def checks(rows: Sequence[Mapping[str, Any]], settings: Settings) -> list[Check]:
    """The targets, and what must hold of any replay."""
    found = [_check_target(rows, target) for target in settings.targets]
    above = [row for row in rows if row["saved_s"] > row["unlimited_saved_s"] * (1 + 1e-9)]
    found.append(Check("No memory saves more than unlimited memory", not above, f"in {len(rows)} replays"))
    with_disk = {_place(row): row["saved_s"] for row in rows if row["disk"]}
    worse = [row for row in rows if not row["disk"] and row["saved_s"] > with_disk[_place(row)]]
    found.append(Check("A second tier never saves less", not worse, f"in {len(with_disk)} pairs of replays"))
    return found


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("trace", "seed", "memory", "policy"))


def _check_target(rows: Sequence[Mapping[str, Any]], target: Target) -> Check:
    saved = {
        (row["seed"], row["policy"]): row["saved_s"]
        for row in rows
        if row["trace"] == target.trace and row["memory"] == target.memory and not row["disk"]
    }
    gains = [saved[seed, "cost"] / saved[seed, "lru"] - 1 for seed, policy in saved if policy == "cost"]
    name = (
        f"With memory for {target.memory:.0%} of the working set of {target.trace!r} and no disk, the cost policy "
        f"saves at least {target.min_gain:.0%} more prefill time than LRU"
    )
    if not gains:
        return Check(name, False, "that was not replayed")
    each = ", ".join(f"{gain:+.1%}" for gain in gains)
    return Check(name, statistics.mean(gains) >= target.min_gain, f"mean {statistics.mean(gains):+.1%}; seeds: {each}")


def notes(settings: Settings, left_out: Sequence[str]) -> list[str]:
    """What a reader must know beside the figures."""
    found = [
        "A simulation: requests are served one after the other, TTFT is restoring and computing without a queue, the "
        "disk is never full and writing to it delays nobody. Prefill, restore and write rates are those in the "
        "settings; prompts longer than what they were measured with are extrapolated (attention grows with position).",
        "The working set is the most bytes, over time, that later requests still need: with so much memory and "
        "knowledge of the future nothing is computed twice. Memory is never less than the largest request needs.",
        "The clairvoyant knows which request uses which state next, and on the same units (whole conversations that "
        "share pages) moves out what saves the fewest seconds a byte and tick until then. It shows what guessing "
        "right would give. It is no proof of the most that could be saved; unlimited memory is.",
        "Saved seconds are those of prefill that the cache made needless, less those of restoring. With a disk that "
        "never fills, policies differ in what is restored, not in what is computed.",
        "The form of the cost policy was chosen on the seeds 0 to 3, 10 and 11 (the experiment file names others) of "
        "the traces 'agents' and 'fork-heavy', and their mix of sessions was settled while looking at what policies "
        "gain. "
        "What it gains is less where all conversations are alike, where they are short, and where a late token costs "
        "no more than an early one.",
    ]
    if any(file.name not in left_out for file in settings.files):
        found.append(
            "A trace file gives one id for each 512 tokens of input: only whole blocks are reused, replies come with "
            "the next turn's input, pages hold one block."
        )
    if left_out:
        found.append(f"Left out, because the file is not there: {', '.join(left_out)}.")
    return found


KIND = Kind("cache_trace", Settings, run, tables, figures, needs_engine=False)
