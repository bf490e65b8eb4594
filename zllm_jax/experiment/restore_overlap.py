"""What a restore costs those who wait for it, and those who don't.

Time to first token of a long conversation's next turn, restored from disk stage by stage against all at once; and the
intervals between the tokens of a neighbour stream: alone, while the snapshot restores, while a long prompt is computed.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from zllm_jax.errors import ConfigError
from zllm_jax.experiment.kind import Engine, Kind, Outcome, Progress
from zllm_jax.experiment.restore_overlap_show import figures, percentile, summarise, tables
from zllm_jax.experiment.results import Check
from zllm_jax.experiment.texts import PromptSource
from zllm_jax.values import Envelope, Request, Sampling, Status

Condition = Literal["alone", "beside_restore", "beside_prefill"]
CONDITIONS: tuple[Condition, ...] = ("alone", "beside_restore", "beside_prefill")
MODES = ("staged", "blocking")
PLACES = ("disk_warm", "disk_cold")
CHUNKS = 6


@dataclass(frozen=True, kw_only=True)
class Settings:
    """snapshot_tokens: length of the conversation that restores. new_tokens: what its next turn adds.

    long_tokens: length of the prompt that is computed beside the stream, in chunks of chunk_tokens. stream_tokens: what
    the stream generates when alone. repetitions: of each mode; streams: of each condition.
    itl_factor: an interval's p99 beside other work may be so many times that of a stream alone, plus one chunk.
    min_gain: by how much a staged restore is to be faster to the first token than a blocking one.
    """

    snapshot_tokens: int = 4000
    new_tokens: int = 30
    long_tokens: int = 2000
    chunk_tokens: int = 256
    stream_tokens: int = 64
    repetitions: int = 7
    streams: int = 5
    itl_factor: float = 2.0
    min_gain: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("snapshot_tokens", "new_tokens", "stream_tokens", "repetitions", "streams", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"settings.{name} is {getattr(self, name)}, must be at least 1")
        if self.long_tokens <= self.chunk_tokens:
            raise ConfigError(f"settings.long_tokens is {self.long_tokens}, must be more than chunk_tokens")


def run(engine: Engine, settings: Settings, progress: Progress) -> Outcome:
    """Measure all modes and conditions interleaved, in shuffled order."""
    if engine.tokenizer is None:
        raise ConfigError("restore_overlap needs a model with a tokenizer: its prompts are prose")
    bench = _Bench(engine, settings, PromptSource(engine.tokenizer))
    engine.warmup(progress=progress)
    order = random.Random(settings.seed)
    rows: list[dict[str, Any]] = []
    total = settings.repetitions * len(MODES) * len(PLACES) + settings.streams * len(CONDITIONS)
    progress("restore and stream", 0, total)
    bench.prepare()
    for repetition in range(max(settings.repetitions, settings.streams)):
        jobs: list[tuple[str, str]] = []
        if repetition < settings.repetitions:
            jobs += [(mode, place) for mode in MODES for place in PLACES]
        if repetition < settings.streams:
            jobs += [("stream", condition) for condition in CONDITIONS]
        for what, where in order.sample(jobs, len(jobs)):
            row = bench.stream(where) if what == "stream" else bench.restore(what, where)
            rows.append({"measured": what, "where": where, "repetition": repetition, **row})
            progress("restore and stream", len(rows), total)
    summary = summarise(rows)
    return Outcome(rows, summary, _checks(rows, summary, settings), _notes(summary, settings))


class _Bench:
    """One engine and the conversations that are run on it."""

    def __init__(self, engine: Engine, settings: Settings, prompts: PromptSource) -> None:
        self._engine, self._settings, self._prompts = engine, settings, prompts
        text = prompts.slice(settings.snapshot_tokens + settings.new_tokens, 0)
        self._conversation, self._turn = text[: settings.snapshot_tokens], text
        self._long = prompts.slice(settings.long_tokens, 1)

    def prepare(self) -> None:
        """The conversation, computed once, to disk: each next turn finds it there."""
        self._engine.forget()
        self._generate(self._conversation, 1)
        self._engine.evict()

    def restore(self, mode: str, place: str) -> dict[str, Any]:
        """TTFT of the next turn; what it adds is not kept, so that the next one restores the same snapshot."""
        self._engine.stage_restores(mode == "staged")
        dropped = self._engine.drop_page_cache() if place == "disk_cold" else None
        envelope = self._generate(self._turn, 1)
        self._engine.stage_restores(True)
        self._engine.forget(keep_disk=True)
        timing = envelope.timing
        return {
            "ttft_s": timing.ttft_s,
            "restore_s": timing.restore_s,
            "prefill_s": timing.prefill_s,
            "tier": envelope.usage.tier.value,
            "cached_tokens": envelope.usage.cached_tokens,
            "token": envelope.tokens[0],
            "page_cache_dropped": dropped,
        }

    def stream(self, condition: str) -> dict[str, Any]:
        """The intervals between a stream's tokens while the other work lasts.

        Beside a prefill also what its last chunk takes alone: half before the stream, half after it, as a machine whose
        speed drifts would else be compared with itself at another time.
        """
        chunks = self._chunks_s() if condition == "beside_prefill" else []
        started, other = threading.Event(), _Other(self._engine)
        num_tokens = self._settings.stream_tokens if condition == "alone" else 100_000
        call = self._engine.submit(_greedy(self._prompts.slice(32, 2), min(num_tokens, self._room())))
        times: list[float] = []
        for delta in call:
            if delta.tokens:
                times.append(time.perf_counter())
            if len(times) == 4 and not started.is_set():
                started.set()
                if condition == "beside_restore":
                    other.start(_greedy(self._turn, 1))
                elif condition == "beside_prefill":
                    other.start(_greedy(self._long, 1, cache=False))
            if condition != "alone" and other.done:
                call.cancel()
        first, last = other.span if condition != "alone" else (times[0], times[-1])
        gaps = [b - a for a, b in pairwise(times) if b >= first and a <= last]
        self._engine.forget(keep_disk=True)
        row: dict[str, Any] = {"intervals_s": gaps, "p99_s": percentile(gaps, 99), "median_s": statistics.median(gaps)}
        if other.envelope is not None:
            row |= {"other_tier": other.envelope.usage.tier.value, "other_ttft_s": other.envelope.timing.ttft_s}
        if condition == "beside_prefill":
            row["chunks_s"] = chunks + self._chunks_s()
        return row

    def _chunks_s(self) -> list[float]:
        """Seconds of the long prompt's last chunk, the longest one, computed after all before it were kept.

        Each time with other tokens, so that none is found in memory.
        """
        chunk = self._settings.chunk_tokens
        before = self._long[:-chunk]
        self._generate(before, 1)
        ends = [self._prompts.slice(chunk, 3 + index) for index in range(CHUNKS // 2)]
        found = [self._generate([*before, *end], 1) for end in ends]
        self._engine.forget(keep_disk=True)
        if any(envelope.usage.cached_tokens != len(before) for envelope in found):
            raise RuntimeError(f"a last chunk was not computed alone: {[e.usage.cached_tokens for e in found]}")
        return [envelope.timing.prefill_s for envelope in found]

    def _room(self) -> int:
        most = self._engine.config.max_seq_tokens or self._engine.model_config.max_context_tokens
        return most - 32

    def _generate(self, tokens: Sequence[int], max_tokens: int) -> Envelope:
        envelope = self._engine.generate(_greedy(tokens, max_tokens))
        if envelope.status not in (Status.COMPLETED, Status.TRUNCATED):
            raise RuntimeError(f"a request ended as {envelope.status.value}: {envelope.error}")
        return envelope


class _Other:
    """A request in a thread of its own, and when it ran."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread: threading.Thread | None = None
        self.envelope: Envelope | None = None
        self.span = (0.0, 0.0)

    def start(self, request: Request) -> None:
        self._thread = threading.Thread(target=self._run, args=(request,), name="other-request")
        self._thread.start()

    def _run(self, request: Request) -> None:
        start = time.perf_counter()
        self.envelope = self._engine.generate(request)
        self.span = (start, start + self.envelope.timing.ttft_s)

    @property
    def done(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()


def _greedy(tokens: Sequence[int], max_tokens: int, *, cache: bool = True) -> Request:
    sampling = Sampling(temperature=0.0, seed=0)
    return Request(tuple(tokens), max_tokens=max_tokens, ignore_eos=True, sampling=sampling, cache=cache)


def _checks(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], settings: Settings) -> list[Check]:
    restores = [row for row in rows if row["measured"] != "stream"]
    tokens = {row["token"] for row in restores}
    hits = [row["tier"] == "disk" and row["cached_tokens"] >= settings.snapshot_tokens - 1 for row in restores]
    beside = [row for row in rows if row["where"] == "beside_restore"]
    allowed = settings.itl_factor * summary["p99_alone_s"] + summary["chunk_s"]
    found = [
        Check("Every restored turn draws the same token", len(tokens) == 1, f"{len(restores)} turns"),
        Check(
            "Every turn hits the whole snapshot on disk",
            all(hits) and all(row["other_tier"] == "disk" for row in beside),
            f"{sum(hits)} of {len(hits)} alone, {len(beside)} beside a stream",
        ),
    ]
    for condition in CONDITIONS[1:]:
        p99 = summary[f"p99_{condition}_s"]
        found.append(
            Check(
                f"The stream's p99 interval {condition.replace('_', ' a ')} is at most {settings.itl_factor:g} times "
                "that alone, plus one chunk",
                p99 <= allowed,
                f"{p99 * 1e3:.0f} ms, allowed {allowed * 1e3:.0f} ms",
            )
        )
    return found


def _notes(summary: Mapping[str, Any], settings: Settings) -> list[str]:
    gain = summary["gain_disk_warm"]
    met = "met" if gain >= settings.min_gain else "missed"
    return [
        f"Goal: staged at least {settings.min_gain:.0%} faster to the first token than blocking: {met} "
        f"({gain:.0%} with a warm page cache, {summary['gain_disk_cold']:.0%} with a cold one).",
        "Intervals are counted from the start of the other request to its first token. One chunk is the long prompt's "
        f"last, computed alone: the p99 of {CHUNKS * settings.streams}, half of each {CHUNKS} before the stream beside "
        "that prompt and half after it.",
    ]


KIND = Kind("restore_overlap", Settings, run, tables, figures)
