"""What a fence adds to a decode step: followed on the device, and driven by the host.

Rows of one model stand at the same place of the same grammar; a step is timed free, fenced on the device, and with
masks that the host computes for each step. What differs is the way only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zllm_jax.errors import ConfigError
from zllm_jax.experiment.config import ExperimentConfig
from zllm_jax.experiment.fence_show import WAYS, WORDS, alone_share, cell, figures, overhead, summarise, tables
from zllm_jax.experiment.kind import Kind, Outcome, Progress
from zllm_jax.experiment.results import Check

if TYPE_CHECKING:
    from zllm_jax.experiment.fence_bench import Bench, Timed


@dataclass(frozen=True, kw_only=True)
class Settings:
    """batches: rows decoded together, each a bucket of the engine's. temperatures: 0 and warmer.

    repetitions: timed calls of each way and place. table_states, table_tokens: size of the table whose bytes are
    shown beside the stated ones. read_bytes: what this machine's read rate is measured with.
    max_overhead: the most that a fence on the device may add; checked only when `enforce_targets`.
    """

    batches: tuple[int, ...] = (1, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    repetitions: int = 40
    table_states: int = 512
    table_tokens: int = 131_072
    read_bytes: int = 256 << 20
    max_overhead: float = 0.03
    seed: int = 0
    enforce_targets: bool = False

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1 or not self.temperatures:
            raise ConfigError("settings.batches and settings.temperatures must each name at least one, batches >= 1")
        if self.repetitions < 1:
            raise ConfigError(f"settings.repetitions is {self.repetitions}, must be at least 1")


def run(config: ExperimentConfig, settings: Settings, progress: Progress) -> Outcome:
    """Open the model's bench and measure."""
    from zllm_jax.experiment.fence_bench import open_bench  # the only part that needs jax itself

    return measure(open_bench(config, progress), settings, progress)


def measure(bench: Bench, settings: Settings, progress: Progress) -> Outcome:
    """Rows of `measured` "step" (one a call) and "stages" (one a place, batch and repetition), interleaved."""
    rows: list[dict[str, Any]] = []
    order = random.Random(settings.seed)
    for repetition in range(-1, settings.repetitions):  # the first one compiles and is not kept
        progress("time steps", max(repetition, 0), settings.repetitions)
        found = list(_round(bench, settings, order))
        if repetition >= 0:
            rows += [row | {"repetition": repetition} for row in found]
    progress("time steps", settings.repetitions, settings.repetitions)
    table = bench.table(settings.table_states, settings.table_tokens, settings.read_bytes)
    summary = summarise(rows) | table
    return Outcome(rows, summary, checks(rows, summary, settings), notes(summary, settings))


def _round(bench: Bench, settings: Settings, order: random.Random) -> Iterator[dict[str, Any]]:
    """Every way once, at every place, batch and temperature, in shuffled order inside each."""
    steps = bench.engine.decode_steps
    for batch in settings.batches:
        for temperature in settings.temperatures:
            jobs = [("free", ""), ("free_single", ""), *((way, place) for way in WAYS for place in WORDS)]
            for way, place in order.sample(jobs, len(jobs)):
                if way == "host":
                    timed = bench.masked(place, batch, temperature)
                else:
                    timed = bench.decode(place, batch, temperature, 1 if way == "free_single" else steps)
                yield _row(bench, timed, way, place, batch, temperature)
        for place in WORDS:
            yield {"measured": "stages", "place": place, "batch": batch, **bench.stages(place, batch)}


def _row(bench: Bench, timed: Timed, way: str, place: str, batch: int, temperature: float) -> dict[str, Any]:
    return {
        "measured": "step",
        "way": way,
        "place": place,
        "batch": batch,
        "temperature": temperature,
        "step_s": timed.step_s,
        "first": [tokens[0] for tokens in timed.tokens],
        "legal": bench.legal(place, timed) if place else None,
    }


def checks(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], settings: Settings) -> list[Check]:
    """A fast way to a wrong answer is no result."""
    fenced = [row for row in rows if row.get("legal") is not None]
    illegal = [row for row in fenced if not row["legal"]]
    found = [Check("Every token obeys its fence", not illegal, f"{len(fenced) - len(illegal)} of {len(fenced)} calls")]
    greedy = [row for row in fenced if row["temperature"] == 0]
    drawn: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for row in greedy:
        drawn.setdefault((row["place"], row["batch"]), set()).add(tuple(row["first"]))
    same = sum(len(ways) == 1 for ways in drawn.values())
    name = "At temperature 0 the device's mask and the host's draw the same tokens"
    if drawn:
        found.append(Check(name, same == len(drawn), f"at {same} of {len(drawn)} places"))
    if settings.enforce_targets:
        missed = _missed(summary, settings)
        found.append(Check(f"A fence adds at most {settings.max_overhead:.0%}", not missed, "; ".join(missed) or "all"))
    return found


def _missed(summary: Mapping[str, Any], settings: Settings) -> list[str]:
    """Where a fence on the device costs more than it may."""
    places = [(p, b, t) for p in WORDS for b in settings.batches for t in settings.temperatures]
    costs = {cell(*one): overhead(summary, "device", *one) for one in places}
    return [f"{where}: {cost:+.1%}" for where, cost in costs.items() if cost > settings.max_overhead]


def notes(summary: Mapping[str, Any], settings: Settings) -> list[str]:
    total = len(WORDS) * len(settings.batches) * len(settings.temperatures)
    alone = [alone_share(summary, place, batch) for place in WORDS for batch in settings.batches]
    missed = _missed(summary, settings)
    return [
        f"Each figure is the median of {settings.repetitions} calls; the ways follow each other in shuffled order, and "
        "a cost is a ratio of medians.",
        "Free and fenced steps run several a call, as the engine does; driven by the host they run one a call, because "
        "the host must see each token. A fenced call holds the host's copy of the state too.",
        "Stated figures of the stages come without their names: they stand beside the stage that they fit in order. "
        "They are of a GPU behind PCIe; where the device is this processor, its link cannot be measured.",
        f"By themselves, mask and advance on the device take {min(alone):.1%} to {max(alone):.1%} of a free step.",
        f"Goal: a fence on the device adds at most {settings.max_overhead:.0%}: met at {total - len(missed)} of "
        f"{total} places. " + "; ".join(missed),
    ]


KIND = Kind("fence_overhead", Settings, run, tables, figures, needs_engine=False)
