"""Several answers to one prompt: it is computed once, though none of them has ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cache.driver import prompt
from tests.scheduler.device import Bench, answer, result
from zllm_jax.scheduler import Ticket
from zllm_jax.values import Sampling, Status

Make = Callable[..., Bench]
HOT = Sampling(temperature=1.0)


def first_token(one: Bench, ticket: Ticket) -> None:
    """Let the device compute just so much that the ticket has its first token."""
    one.device.held = True
    one.device.wait_for_call()
    while not ticket._events:
        one.device.let()
        one.device.wait_for_call()


@pytest.mark.parametrize("length", [3, 48, 50])
@pytest.mark.parametrize("shared", [True, False])
def test_the_prompt_of_a_running_sequence_is_reused(bench: Make, shared: bool, length: int) -> None:
    one = bench(num_pages=128, max_pages=32)
    told = prompt(length)
    one.device.held = True
    first = one.submit(told, 9, sampling=HOT, share_prompt=shared)
    first_token(one, first)
    others = [one.submit(told, 9, sampling=HOT, seed=seed) for seed in (1, 2)]
    one.device.let_go()
    cached = []
    for seed, ticket in enumerate((first, *others)):
        tokens, outcome = result(ticket)
        assert tokens == answer(told, 9, HOT, seed)
        cached.append(outcome.usage.cached_tokens)
    most = length - 1  # but for the token that predicts the next
    assert cached == ([0, most, most] if shared else [0, 0, 0])
    computed = one.device.num_computed - 3 * 8  # without what was generated
    assert computed == length + 2 * (length - most if shared else length)


def test_what_is_shared_goes_with_the_sequence_that_covers_it(bench: Make) -> None:
    one = bench(num_pages=64)
    one.run(prompt(20), 4, share_prompt=True)
    (kept,) = one.cache.report()["resident"]
    assert kept["tokens"] == 23
    one.run(prompt(20), 4, share_prompt=True)  # known already: nothing is kept twice
    assert len(one.cache.report()["resident"]) == 1


def test_a_cancelled_sequence_leaves_its_prompt_to_the_others(bench: Make) -> None:
    one = bench(num_pages=64)
    first = one.submit(prompt(20), 9, share_prompt=True)
    first_token(one, first)
    first.cancel()
    one.device.let_go()
    result(first)
    tokens, outcome = one.run(prompt(20), 9)
    assert (tokens, outcome.usage.cached_tokens) == (answer(prompt(20), 9), 19)


def test_requests_that_keep_out_of_the_cache_share_nothing(bench: Make) -> None:
    one = bench(num_pages=64)
    one.run(prompt(20), 4, share_prompt=True, cache=False)
    assert one.cache.report()["resident"] == []


def test_without_a_page_to_copy_to_whole_pages_are_shared(bench: Make) -> None:
    one = bench(num_pages=8, max_pages=8)
    first = one.submit(prompt(22), 10, share_prompt=True)  # takes all eight pages
    first_token(one, first)
    (kept,) = one.cache.report()["resident"]
    assert (kept["tokens"], kept["pages"]) == (20, 5)
    one.device.let_go()
    assert result(first)[0] == answer(prompt(22), 10)


def test_a_copy_that_fails_ends_its_sequence_and_loses_no_page(bench: Make) -> None:
    one = bench(num_pages=64)
    one.device.failing["copy_page"] = MemoryError("no room")
    _, outcome = one.run(prompt(22), 10, share_prompt=True)
    assert outcome.status is Status.FAULTED
    assert one.cache.report()["resident"] == []
