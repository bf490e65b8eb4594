"""Metrics: what is reported is what a scrape shows, in Prometheus' own format; cheap, and of one engine only."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from zllm_jax.metrics import MISSES, Metrics
from zllm_jax.values import Status, Tier, Timing, Usage


def scraped(metrics: Metrics) -> dict[str, float]:
    """`name{label=value,...}` -> value, as Prometheus' parser reads a scrape; labels in order of their names."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for one in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(one.labels.items()))
            found[one.name + (f"{{{labels}}}" if labels else "")] = one.value
    return found


def test_every_series_is_there_before_anything_happens() -> None:
    found = scraped(Metrics())
    for name in (
        "zllm_cache_lookups_total{reason=hit,tier=disk}",
        "zllm_cache_lookups_total{reason=off,tier=cold}",
        "zllm_cached_tokens_total{tier=resident}",
        "zllm_evictions_total{outcome=dropped}",
        "zllm_requests_total{status=TRANSPORT_FAILURE}",
        "zllm_near_misses_total",
        "zllm_time_to_first_token_seconds_bucket{le=0.001}",
        "zllm_time_to_first_token_seconds_bucket{le=60.0}",
    ):
        assert found[name] == 0.0
    assert found["process_resident_memory_bytes"] > 0


def test_lookups_by_tier_and_reason() -> None:
    """Known fault 42: a request that never reached the cache is counted too."""
    metrics = Metrics()
    metrics.looked_up(Tier.DISK, "hit", 100, 90)
    metrics.looked_up(Tier.RESIDENT, "hit", 50, 20)
    for reason in MISSES:
        metrics.looked_up(Tier.COLD, reason, 10, 0)
    found = scraped(metrics)
    assert found["zllm_cache_lookups_total{reason=hit,tier=disk}"] == 1
    assert [found[f"zllm_cache_lookups_total{{reason={reason},tier=cold}}"] for reason in MISSES] == [1] * len(MISSES)
    assert sum(value for name, value in found.items() if name.startswith("zllm_cache_lookups_total")) == 8
    assert found["zllm_looked_up_tokens_total"] == 210
    assert (found["zllm_cached_tokens_total{tier=disk}"], found["zllm_cached_tokens_total{tier=resident}"]) == (90, 20)


def test_bytes_moved() -> None:
    metrics = Metrics()
    metrics.restored(0.1, 0.15, 1000, 10)
    metrics.restored(None, 0.3, 500, 5)
    metrics.evicted("saved", 2000)
    metrics.evicted("clean", 300)
    metrics.written(1500, 0.004)
    metrics.near_miss()
    found = scraped(metrics)
    assert (found["zllm_restored_bytes_total"], found["zllm_restored_tokens_total"]) == (1500, 15)
    assert found["zllm_restore_seconds_sum"] == pytest.approx(0.45)
    assert (found["zllm_restore_seconds_count"], found["zllm_restore_predicted_seconds_count"]) == (2, 1)
    assert found["zllm_restore_actual_to_predicted_ratio_sum"] == pytest.approx(1.5)
    assert found["zllm_evictions_total{outcome=saved}"] == found["zllm_evictions_total{outcome=clean}"] == 1
    assert found["zllm_evicted_bytes_total{outcome=saved}"] == 2000
    assert (found["zllm_written_bytes_total"], found["zllm_write_seconds_bucket{le=0.005}"]) == (1500, 1)
    assert found["zllm_near_misses_total"] == 1


def test_how_requests_ended() -> None:
    metrics = Metrics()
    timing = Timing(prep_s=0.01, queue_s=0.02, restore_s=0.03, prefill_s=0.04, decode_s=1.0)
    metrics.ended(Status.COMPLETED, Usage(prompt_tokens=10, generated_tokens=5), timing)
    metrics.ended(Status.CANCELED, Usage(prompt_tokens=7), Timing(queue_s=3.0))
    metrics.token_interval(0.0004)
    metrics.refused("Overloaded")
    found = scraped(metrics)
    assert found["zllm_requests_total{status=COMPLETED}"] == found["zllm_requests_total{status=CANCELED}"] == 1
    assert (found["zllm_prompt_tokens_total"], found["zllm_generated_tokens_total"]) == (17, 5)
    assert found["zllm_time_to_first_token_seconds_count"] == 1, "a request without a token has no first one"
    assert found["zllm_time_to_first_token_seconds_sum"] == pytest.approx(0.1)
    assert (found["zllm_request_seconds_count"], found["zllm_queue_seconds_count"]) == (2, 2)
    assert found["zllm_token_interval_seconds_bucket{le=0.0002}"] == 0
    assert found["zllm_token_interval_seconds_bucket{le=0.0005}"] == 1
    assert found["zllm_refused_requests_total{error=Overloaded}"] == 1


def test_gauges_are_read_at_the_scrape_and_a_failing_one_harms_nobody() -> None:
    metrics = Metrics()
    waiting = [3]
    metrics.watch("zllm_waiting_requests", "Requests in the queue", lambda: waiting[0])
    metrics.watch("zllm_disk_bytes", "Bytes on disk", lambda: 1 / 0)
    assert scraped(metrics)["zllm_waiting_requests"] == 3
    waiting[0] = 4
    found = scraped(metrics)
    assert found["zllm_waiting_requests"] == 4
    assert math.isnan(found["zllm_disk_bytes"])
    with pytest.raises(ValueError, match="zllm_disk_bytes"):
        metrics.watch("zllm_disk_bytes", "again", lambda: 0)


def test_nothing_is_shared_between_two_engines() -> None:
    one, other = Metrics(), Metrics()
    one.near_miss()
    assert scraped(other)["zllm_near_misses_total"] == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.looked_up(Tier.COLD, "hit", 1, 0),
        lambda m: m.looked_up(Tier.COLD, "because", 1, 0),
        lambda m: m.evicted("lost", 1),
    ],
)
def test_a_word_that_is_none_of_ours(call: Callable[[Metrics], None]) -> None:
    with pytest.raises(ValueError, match=r"must be one of|is no outcome"):
        call(Metrics())


def test_from_many_threads_nothing_is_lost() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(500):
            metrics.token_interval(0.01)
            metrics.looked_up(Tier.COLD, "no_prefix", 1, 0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    found = scraped(metrics)
    assert found["zllm_token_interval_seconds_count"] == 2000
    assert found["zllm_looked_up_tokens_total"] == 2000


def test_a_token_costs_microseconds() -> None:
    """The device loop reports every token; the best of several tries, because the machine may be busy."""
    metrics = Metrics()
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(500):
            metrics.token_interval(0.02)
        best = min(best, (time.perf_counter() - start) / 500)
    assert best < 20e-6
