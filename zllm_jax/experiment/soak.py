"""Many impatient clients at once, for minutes: everything that is promised of one request must hold of all.

Each client talks, forks, cancels, and starts again; an operator evicts now and then; a vandal overwrites files of the
second tier. Afterwards nothing may be lost: every page and buffer is home, and memory has not grown.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zllm_jax.config import zllm_home
from zllm_jax.errors import ConfigError
from zllm_jax.experiment import plots
from zllm_jax.experiment.kind import Engine, Kind, Outcome, Progress, Table
from zllm_jax.experiment.plots import Figure
from zllm_jax.experiment.restore_overlap_show import percentile
from zllm_jax.experiment.results import Check, Results
from zllm_jax.experiment.texts import PromptSource
from zllm_jax.memory import allocated_bytes
from zllm_jax.values import Envelope, Request, Sampling, Status

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

MB = 1e6
TICK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """clients: threads that talk. seconds: how long. first_tokens, turn_tokens, reply_tokens: most tokens of a first
    prompt, of what a turn adds, of an answer. max_tokens: a conversation starts anew before it grows beyond this.
    cancel_share, fork_share: of the requests. evict_every_s, vandal_every_s: 0 for never.
    warmup_share: of the time, before memory must be flat. max_growth_mb_min: what "flat" allows.
    """

    clients: int = 64
    seconds: float = 600.0
    first_tokens: int = 400
    turn_tokens: int = 60
    reply_tokens: int = 16
    max_tokens: int = 1000
    cancel_share: float = 0.15
    fork_share: float = 0.2
    evict_every_s: float = 20.0
    vandal_every_s: float = 5.0
    warmup_share: float = 0.3
    max_growth_mb_min: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("clients", "seconds", "first_tokens", "turn_tokens", "reply_tokens"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"settings.{name} is {getattr(self, name)}, must be positive")


def run(engine: Engine, settings: Settings, progress: Progress) -> Outcome:
    """Let everybody loose, then look what is left."""
    if engine.tokenizer is None:
        raise ConfigError("soak needs a model with a tokenizer: its prompts are prose")
    engine.forget()
    engine.warmup(progress=progress)
    crowd = _Crowd(engine, settings, PromptSource(engine.tokenizer))
    rows = crowd.run(progress)
    engine.evict()
    engine.forget(keep_disk=True)
    left = engine.report()
    summary = _summarise(rows, crowd, settings, left)
    return Outcome(rows, summary, _checks(crowd, summary, left, settings), _notes(settings))


class _Crowd:
    """The clients, the operator and the vandal, and what they saw."""

    def __init__(self, engine: Engine, settings: Settings, prompts: PromptSource) -> None:
        self._engine, self._settings, self._prompts = engine, settings, prompts
        self._folder = engine.config.store or zllm_home() / "snapshots"
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._turn = 0
        self.statuses: Counter[str] = Counter()
        self.tiers: Counter[str] = Counter()
        self.ttft_s: list[float] = []
        self.errors: list[str] = []
        self.vandalised = self.forks = 0

    def run(self, progress: Progress) -> list[dict[str, Any]]:
        """A row a second: memory, requests, bytes."""
        threads = [
            threading.Thread(target=self._guarded, args=(self._client, seed), name=f"client-{seed}")
            for seed in range(self._settings.clients)
        ]
        for every_s, work in (
            (self._settings.evict_every_s, self._engine.evict),
            (self._settings.vandal_every_s, self._vandal),
        ):
            if every_s:
                threads.append(threading.Thread(target=self._guarded, args=(self._every, every_s, work)))
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        rows: list[dict[str, Any]] = []
        while (elapsed := time.perf_counter() - start) < self._settings.seconds:
            report = self._engine.report()
            rows.append(
                {
                    "t_s": elapsed,
                    "rss_mb": _resident_bytes() / MB,
                    "allocated_mb": allocated_bytes() / MB,
                    "requests": sum(self.statuses.values()),
                    "device_mb": report["device_bytes"] / MB,
                    "disk_mb": report["disk_bytes"] / MB,
                }
            )
            progress("talk", int(elapsed), int(self._settings.seconds))
            self._stop.wait(TICK_S)
        self._stop.set()
        for thread in threads:
            thread.join()
        progress("talk", int(self._settings.seconds), int(self._settings.seconds))
        return rows

    def _guarded(self, work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:
            with self._lock:
                self.errors.append(f"{type(error).__name__}: {error}")

    def _every(self, seconds: float, work: Any) -> None:
        while not self._stop.wait(seconds):
            work()

    def _client(self, seed: int) -> None:
        s = self._settings
        rng = random.Random(s.seed * 1000 + seed)
        history: list[int] = []
        while not self._stop.is_set():
            if not history or len(history) + s.turn_tokens + s.reply_tokens > s.max_tokens:
                history = self._fresh(rng.randint(32, s.first_tokens))
            elif rng.random() < s.fork_share:
                history = history[: rng.randint(1, len(history))]
                self.forks += 1
            history += self._fresh(rng.randint(1, s.turn_tokens))
            envelope = self._say(history, rng)
            if envelope.status in (Status.COMPLETED, Status.TRUNCATED):
                history += envelope.tokens

    def _fresh(self, num_tokens: int) -> list[int]:
        with self._lock:
            self._turn += 1
            return self._prompts.slice(num_tokens, self._turn)

    def _say(self, history: Sequence[int], rng: random.Random) -> Envelope:
        sampling = Sampling(temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(1 << 30))
        call = self._engine.submit(
            Request(tuple(history), max_tokens=rng.randint(1, self._settings.reply_tokens), sampling=sampling)
        )
        patience = rng.randint(0, 8) if rng.random() < self._settings.cancel_share else None
        seen = 0
        if patience == 0:
            call.cancel()
        for delta in call:
            seen += len(delta.tokens)
            if patience is not None and seen >= patience:
                call.cancel()
            if delta.envelope is not None:
                self._note(delta.envelope)
                return delta.envelope
        raise AssertionError("a call ends with its envelope")

    def _note(self, envelope: Envelope) -> None:
        with self._lock:
            self.statuses[envelope.status.value] += 1
            if envelope.error is not None and envelope.status is not Status.CANCELED:
                self.errors.append(envelope.error)
            if envelope.tokens:
                self.tiers[envelope.usage.tier.value] += 1
                self.ttft_s.append(envelope.timing.ttft_s)

    def _vandal(self) -> None:
        """Overwrite a piece of some file of the second tier."""
        files = [path for path in self._folder.rglob("*") if path.is_file() and "quarantine" not in path.parts]
        if not files:
            return
        rng = random.Random(self.vandalised + self._settings.seed)
        with suppress(OSError), rng.choice(sorted(files)).open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(rng.randrange(max(1, size)))
            file.write(rng.randbytes(8)[: max(1, min(8, size - file.tell()))])
            self.vandalised += 1


def growth_mb_min(rows: Sequence[Mapping[str, Any]], warmup_share: float, key: str = "rss_mb") -> float:
    """Slope of memory over time after the warm-up, by least squares, in MB a minute."""
    flat = rows[int(len(rows) * warmup_share) :]
    if len(flat) < 2:
        return 0.0
    t = [row["t_s"] / 60 for row in flat]
    m = [row[key] for row in flat]
    mean_t, mean_m = sum(t) / len(t), sum(m) / len(m)
    spread = sum((one - mean_t) ** 2 for one in t)
    slope: float = sum((a - mean_t) * (b - mean_m) for a, b in zip(t, m, strict=True)) / spread
    return slope


def _summarise(
    rows: Sequence[Mapping[str, Any]], crowd: _Crowd, settings: Settings, left: Mapping[str, Any]
) -> dict[str, Any]:
    summary: dict[str, Any] = dict(sorted((f"status_{name.lower()}", count) for name, count in crowd.statuses.items()))
    summary |= {f"tier_{name}": count for name, count in sorted(crowd.tiers.items())}
    return (
        summary
        | dict(left["counters"])
        | {
            "clients": settings.clients,
            "seconds": settings.seconds,
            "requests": sum(crowd.statuses.values()),
            "forks": crowd.forks,
            "vandalised_files": crowd.vandalised,
            "errors": len(crowd.errors),
            "ttft_p50_s": percentile(crowd.ttft_s, 50) if crowd.ttft_s else None,
            "ttft_p99_s": percentile(crowd.ttft_s, 99) if crowd.ttft_s else None,
            "rss_growth_mb_min": growth_mb_min(rows, settings.warmup_share),
            "rss_last_mb": rows[-1]["rss_mb"] if rows else None,
            "allocated_growth_mb_min": growth_mb_min(rows, settings.warmup_share, "allocated_mb"),
        }
    )


def _checks(crowd: _Crowd, summary: Mapping[str, Any], left: Mapping[str, Any], settings: Settings) -> list[Check]:
    good = {Status.COMPLETED.value, Status.TRUNCATED.value, Status.CANCELED.value}
    bad = {name: count for name, count in crowd.statuses.items() if name not in good}
    pages, rings, buffers = left["pages"], left["rings"], left["buffers"]
    home = pages["free"] == pages["total"] and rings["free"] == rings["total"] and left["leases"] == 0
    growth = summary["rss_growth_mb_min"]
    return [
        Check(
            "No request fails, whatever happens to the files",
            not bad and not crowd.errors and summary["requests"] > 0,
            f"{summary['requests']} requests, {bad or 'none'} failed; first errors: {crowd.errors[:3]}",
        ),
        Check("Every page is home", home, f"pages {pages}, rings {rings}, leases {left['leases']}"),
        Check("Every buffer is home", buffers["in_use"] == 0 and left["saving"] == 0, f"buffers {buffers}"),
        Check(
            f"Memory grows by less than {settings.max_growth_mb_min:g} MB a minute after the warm-up",
            growth < settings.max_growth_mb_min,
            f"{growth:.2f} MB a minute",
        ),
    ]


def _notes(settings: Settings) -> list[str]:
    return [
        f"The first {settings.warmup_share:.0%} of the time count as warm-up for the slope of memory.",
        "Allocated is what the C library has given out; the rest of the process's memory it keeps for later.",
        "A vandalised file makes a look-up miss; it must never make a request fail.",
    ]


def tables(results: Results) -> list[Table]:
    s = results.summary
    plain = [(key.replace("_", " "), f"{value:,.3g}" if isinstance(value, float) else f"{value:,}") for key, value in
             s.items() if value is not None]  # fmt: skip
    return [Table("What happened", ("", ""), tuple(plain))]


def figures(results: Results) -> list[Figure]:
    caption = "Memory of the process, state in device memory and on disk over the run."
    return [Figure("memory", caption, lambda canvas: _draw(canvas, results.rows))]


def _draw(canvas: Canvas, rows: Sequence[Mapping[str, Any]]) -> None:
    axes = canvas.subplots()
    t = [row["t_s"] / 60 for row in rows]
    for key, words, colour in (
        ("rss_mb", "process (RSS)", plots.BLACK),
        ("allocated_mb", "allocated", plots.GREEN),
        ("disk_mb", "second tier, on disk", plots.ORANGE),
        ("device_mb", "state in device memory", plots.BLUE),
    ):
        if key in rows[0]:
            axes.plot(t, [row[key] for row in rows], color=colour, label=words)
    axes.set(xlabel="minutes", ylabel="MB", ylim=(0, None))
    axes.legend()


def _resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


KIND = Kind("soak", Settings, run, tables, figures)
