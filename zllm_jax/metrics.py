"""What happened, in Prometheus metrics: one `Metrics` an engine, with a registry of its own.

A leaf: rooms report events to it in their own words. All methods may be called from any thread, and cost microseconds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from zllm_jax.values import Status, Tier, Timing, Usage

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MISSES = ("no_prefix", "not_faster", "corrupt", "unavailable", "off", "not_admitted")
OUTCOMES = ("saved", "clean", "dropped")

# 1 ms to 60 s; the finer ones, of what happens once a token, begin at 0.1 ms.
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)
TOKEN_SECONDS = (0.0001, 0.0002, 0.0005, *SECONDS[:-4])
RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


class Metrics:
    """Counters, gauges and histograms named `zllm_*`, and the process's own (memory, CPU time, open files).

    Every series exists from the start with 0, so that a rate over it is right from the first event on.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._make_cache()
        self._make_requests()
        ProcessCollector(registry=self._registry)

    def _make_cache(self) -> None:
        lookups = self._counter(
            "zllm_cache_lookups_total", "Requests by tier of their hit and its reason", "tier reason"
        )
        known = [(tier, "hit") for tier in (Tier.RESIDENT, Tier.DISK)]
        known += [(tier, reason) for tier in (Tier.COLD, Tier.RESIDENT) for reason in MISSES]
        self._lookups = {(tier, reason): lookups.labels(tier.value, reason) for tier, reason in known}
        cached = self._counter("zllm_cached_tokens_total", "Prompt tokens that were not recomputed", "tier")
        self._cached = {tier: cached.labels(tier.value) for tier in Tier}
        self._looked_up_tokens = self._counter("zllm_looked_up_tokens_total", "Prompt tokens of all look-ups")
        self._near_misses = self._counter("zllm_near_misses_total", "Long common prefixes that were not a hit")

        self._restore_s = self._histogram("zllm_restore_seconds", "From a look-up to its restored state", SECONDS)
        self._predicted_s = self._histogram("zllm_restore_predicted_seconds", "The same, as predicted", SECONDS)
        self._ratio = self._histogram(
            "zllm_restore_actual_to_predicted_ratio", "Restore seconds over those predicted", RATIOS
        )
        self._restored_bytes = self._counter("zllm_restored_bytes_total", "Bytes read from the second tier")
        self._restored_tokens = self._counter("zllm_restored_tokens_total", "Tokens whose state was read back")

        evictions = self._counter("zllm_evictions_total", "States that left device memory", "outcome")
        evicted = self._counter("zllm_evicted_bytes_total", "Device bytes that they freed", "outcome")
        self._evictions = {name: (evictions.labels(name), evicted.labels(name)) for name in OUTCOMES}
        self._written_bytes = self._counter("zllm_written_bytes_total", "Bytes written to the second tier")
        self._write_s = self._histogram("zllm_write_seconds", "One snapshot, until it was durable", SECONDS)

    def _make_requests(self) -> None:
        requests = self._counter("zllm_requests_total", "Requests that ended, by status", "status")
        self._requests = {status: requests.labels(status.value) for status in Status}
        self._refused = self._counter("zllm_refused_requests_total", "Requests never queued, by error", "error")
        self._prompt_tokens = self._counter("zllm_prompt_tokens_total", "Prompt tokens of requests that ended")
        self._generated_tokens = self._counter("zllm_generated_tokens_total", "Tokens generated")
        self._queue_s = self._histogram("zllm_queue_seconds", "From submission to admission", SECONDS)
        self._ttft_s = self._histogram("zllm_time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        self._total_s = self._histogram("zllm_request_seconds", "From arrival to the end", SECONDS)
        self._interval_s = self._histogram("zllm_token_interval_seconds", "Between two tokens of one", TOKEN_SECONDS)

    def looked_up(self, tier: Tier, reason: str, prompt_tokens: int, cached_tokens: int) -> None:
        """A request's look-up; call it once for every request, those that did not ask for the cache ("off") too.

        reason: "hit", or why it is no better one: "no_prefix", "not_faster" (recomputing is predicted to be faster),
        "corrupt", "unavailable", "off", "not_admitted" (it ended in the queue). A resident hit may have a reason why it
        is not a longer one on disk.
        """
        series = self._lookups.get((tier, reason))
        if series is None:
            raise ValueError(f"({tier.value!r}, {reason!r}) is no outcome of a look-up: reasons are hit, {MISSES}")
        series.inc()
        self._looked_up_tokens.inc(prompt_tokens)
        self._cached[tier].inc(cached_tokens)

    def near_miss(self) -> None:
        """A long common prefix that was not a hit."""
        self._near_misses.inc()

    def restored(self, predicted_s: float | None, actual_s: float, nbytes: int, tokens: int) -> None:
        """A state was read back. predicted_s: what the decision to read it was based on, None without a measurement."""
        self._restore_s.observe(actual_s)
        self._restored_bytes.inc(nbytes)
        self._restored_tokens.inc(tokens)
        if predicted_s is not None:
            self._predicted_s.observe(predicted_s)
            if predicted_s > 0:
                self._ratio.observe(actual_s / predicted_s)

    def evicted(self, outcome: str, nbytes: int) -> None:
        """A state left device memory, freeing `nbytes`: "saved", "clean" (it was on disk already) or "dropped"."""
        if outcome not in self._evictions:
            raise ValueError(f"outcome is {outcome!r}, must be one of {OUTCOMES}")
        number, freed = self._evictions[outcome]
        number.inc()
        freed.inc(nbytes)

    def written(self, nbytes: int, seconds: float) -> None:
        """A snapshot is durable: what was written for it, and how long that took."""
        self._written_bytes.inc(nbytes)
        self._write_s.observe(seconds)

    def ended(self, status: Status, usage: Usage, timing: Timing) -> None:
        """A queued request ended in whatever way. One without a token has no time to first token."""
        self._requests[status].inc()
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._generated_tokens.inc(usage.generated_tokens)
        self._queue_s.observe(timing.queue_s)
        self._total_s.observe(timing.total_s)
        if usage.generated_tokens:
            self._ttft_s.observe(timing.ttft_s)

    def refused(self, error: str) -> None:
        """A request that was not even queued. error: the name of the error's class, from our own small tree."""
        self._refused.labels(error).inc()

    def token_interval(self, seconds: float) -> None:
        """Between two tokens of one sequence."""
        self._interval_s.observe(seconds)

    def watch(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A gauge that is read when somebody looks. One that fails reads NaN: the others must still be seen.

        name: with its unit, `zllm_` in front. Raises `ValueError` for a name that exists already.
        """
        Gauge(name, help, registry=self._registry).set_function(lambda: _read(name, read))

    def render(self) -> bytes:
        """Everything in Prometheus' text format, of type `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help: str, labels: str = "") -> Counter:
        return Counter(name, help, labels.split(), registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, buckets=buckets, registry=self._registry)


def _read(name: str, read: Callable[[], float]) -> float:
    try:
        return float(read())
    except Exception as error:
        log.warning("the gauge %s cannot be read: %s", name, error)
        return math.nan
