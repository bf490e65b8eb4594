"""The simulated cache, by hand on a few requests and against brute force on many."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zllm_jax.cache import Candidate, CostAware, Lru, Policy, common_prefix
from zllm_jax.errors import ConfigError
from zllm_jax.experiment.cache_sim import Clairvoyant, Costs, Pages, Served, Simulation, run_unlimited
from zllm_jax.experiment.traces import Ask, Trace
from zllm_jax.values import Tier

# One token a second to compute, a hundred to restore or write; a token is ten bytes.
COSTS = Costs(prefill_token_s=1.0, prefill_position_s=0.0, restore_bytes_s=1000.0, write_bytes_s=1000.0, token_bytes=10)
PAGE = 4


def ask(prompt: str, reply: str = "") -> Ask:
    def units(text: str) -> np.ndarray:
        return np.array([ord(one) for one in text], np.int32)

    return Ask(units(prompt), units(reply), len(prompt))


def simulation(asks: Iterable[Ask], pages: int, *, policy: Policy | None = None, disk: bool = False, match: int = 1):  # type: ignore[no-untyped-def]
    trace = Trace("t", tuple(asks))
    return Simulation(trace, COSTS, policy or Lru(), num_pages=pages, page_units=PAGE, disk=disk, match_units=match)


def serve(pages: int, *asks: Ask, **options: object) -> list[Served]:
    one = simulation(asks, pages, **options)  # type: ignore[arg-type]
    return [one.serve(each) for each in asks]


FIRST, OTHER = ask("aaaaaaaa", "A"), ask("bbbbbbbb", "B")
SECOND = ask("aaaaaaaaAaaa", "C")  # goes on after FIRST and its reply


def test_the_next_turn_computes_what_is_new() -> None:
    first, second = serve(8, FIRST, SECOND)
    assert (first.tier, first.cached_tokens, first.prefill_s) == (Tier.COLD, 0, 8.0)
    assert (second.tier, second.cached_tokens, second.prefill_s, second.source) == (Tier.RESIDENT, 8, 4.0, 1)


def test_a_whole_prompt_that_is_known_still_computes_its_last_token() -> None:
    assert serve(8, FIRST, FIRST)[1].prefill_s == 1.0


def test_what_was_evicted_is_computed_again_without_a_disk() -> None:
    assert [one.tier for one in serve(3, FIRST, OTHER, SECOND)] == [Tier.COLD] * 3


def test_what_was_evicted_comes_back_from_disk() -> None:
    *_, third = serve(3, FIRST, OTHER, SECOND, disk=True)
    assert (third.tier, third.cached_tokens, third.gained_tokens) == (Tier.DISK, 8, 8)
    assert third.restore_s == pytest.approx(0.08)
    assert third.ttft_s == pytest.approx(4.08)


def test_a_later_turn_writes_only_what_is_new() -> None:
    """8 rows of FIRST, then 8 of OTHER; of SECOND's 12 rows 8 are on disk already."""
    written = [one.written_bytes for one in serve(3, FIRST, OTHER, SECOND, OTHER, disk=True)]
    assert written == [0, 80, 80, 40]


def test_what_was_restored_unchanged_is_not_written_again() -> None:
    """FIRST is restored and equals its snapshot; another conversation then pushes it out."""
    one = simulation([], 3, disk=True)
    for each in (FIRST, OTHER, ask("aaaaaaaaA", "")):
        one.serve(each)
    assert one.serve(OTHER).written_bytes == 0


def test_a_fork_finds_its_base_in_what_superseded_it() -> None:
    """FIRST is on disk; SECOND and a fork of it began from there. SECOND's snapshot replaces FIRST's."""
    one = simulation([], 6, disk=True)
    for each in (FIRST, ask("b" * 21), SECOND, ask("aaaaaaaaAzzz", "Z")):
        one.serve(each)
    assert one.serve(ask("c" * 21)).written_bytes == 10 * (4 + 4)  # of each what comes after FIRST's 8 rows


def test_a_restore_that_takes_longer_than_computing_is_left_alone() -> None:
    slow = Costs(prefill_token_s=1.0, prefill_position_s=0.0, restore_bytes_s=9.0, write_bytes_s=1.0, token_bytes=10)
    one = Simulation(Trace("t", ()), slow, Lru(), num_pages=3, page_units=PAGE, disk=True)
    assert [one.serve(each).tier for each in (FIRST, OTHER, SECOND)] == [Tier.COLD] * 3


def test_a_fork_shares_whole_pages() -> None:
    """Two branches from 8 equal tokens: 3 pages each, 2 of them shared."""
    one = simulation([], 4)
    one.serve(ask("aaaaaaaaxxx", "1"))
    assert one.serve(ask("aaaaaaaayyy", "2")).cached_tokens == 8
    assert one.serve(ask("aaaaaaaaxxx1", "3")).cached_tokens == 11  # the first branch is still there


def test_hash_blocks_hit_whole_blocks_only() -> None:
    def cached(match: int) -> int:
        return serve(8, ask("abcdefghijk", "1"), ask("abcdefghijz", "2"), match=match)[1].cached_tokens

    assert [cached(match) for match in (1, 4, 8, 16)] == [10, 8, 8, 0]


def test_a_request_that_cannot_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="a request needs 2 pages, memory has 1"):
        serve(1, FIRST)


@pytest.mark.parametrize("name", ["prefill_token_s", "restore_bytes_s", "write_bytes_s", "token_bytes"])
def test_rates_are_positive(name: str) -> None:
    values = {"prefill_token_s": 1.0, "prefill_position_s": 0.0, "restore_bytes_s": 1.0, "write_bytes_s": 1.0}
    with pytest.raises(ConfigError, match=rf"costs\.{name} is 0, must be positive"):
        Costs(**(values | {"token_bytes": 1} | {name: 0}))  # type: ignore[arg-type]


def test_prefill_grows_with_the_position() -> None:
    costs = Costs(prefill_token_s=2.0, prefill_position_s=0.5, restore_bytes_s=1.0, write_bytes_s=1.0, token_bytes=1)
    parts = costs.prefill_s(0, 30) + costs.prefill_s(30, 100)
    assert costs.prefill_s(0, 100) == pytest.approx(parts) == pytest.approx(200 + 0.5 * 5000)


def test_the_working_set_is_what_later_requests_need() -> None:
    """Both conversations wait for their next turn at once, two pages each; what is never used again does not count."""
    again = ask("bbbbbbbbBbbb", "D")
    assert run_unlimited(Trace("t", (FIRST, OTHER, SECOND, again)), COSTS, PAGE).working_set_pages == 4
    assert run_unlimited(Trace("t", (FIRST, SECOND, OTHER, again)), COSTS, PAGE).working_set_pages == 2
    assert run_unlimited(Trace("t", (FIRST, OTHER)), COSTS, PAGE).working_set_pages == 0


def test_the_clairvoyant_keeps_what_comes_next() -> None:
    def kept(*future: Ask) -> list[Tier]:
        asks = (FIRST, OTHER, ask("cccccccc", "E"), *future)
        later = run_unlimited(Trace("t", asks), COSTS, PAGE).later
        return [one.tier for one in serve(5, *asks, policy=Clairvoyant(later, COSTS.token_bytes))[3:]]

    again = ask("bbbbbbbbBbbb", "D")
    assert kept(SECOND) == kept(again) == [Tier.RESIDENT]


def test_the_clairvoyant_weighs_distance_against_seconds() -> None:
    def candidate(key: int, saved_s: float) -> Candidate:
        return Candidate(key, 4, 40, saved_s, 0, 1, 1)

    policy = Clairvoyant({1: [(12, 4)], 2: [(14, 4)]}, 10)

    def first(one_s: float, two_s: float) -> object:
        return policy.order([candidate(1, one_s), candidate(2, two_s)], 10)[0].key

    assert (first(1.0, 1.0), first(1.0, 2.0)) == (2, 1)  # the farther goes, unless it is worth more


def test_the_clairvoyant_counts_no_use_of_what_others_hold() -> None:
    """Both hold 4 tokens of 8 alone; the next use of 1 is only of the others."""
    policy = Clairvoyant({1: [(11, 4)], 2: [(90, 8)]}, 10)
    one, two = (Candidate(key, 8, 40, 1.0, 0, 1, 1) for key in (1, 2))
    assert [found.key for found in policy.order([two, one], 10)] == [1, 2]


# Conversations over two letters share and fork at random.
prompts = st.lists(st.text("ab", min_size=1, max_size=20), min_size=1, max_size=25)
policies = st.sampled_from([Lru, CostAware])


@given(prompts, policies, st.booleans(), st.integers(6, 12))
def test_memory_is_never_exceeded_and_every_page_has_its_holders(
    texts: list[str], policy: type[Policy], disk: bool, pages: int
) -> None:
    one = simulation([], pages, policy=policy(), disk=disk)
    for text in texts:
        one.serve(ask(text, "r"))
        held = {page for state in one._states.values() for page in state.pages}
        assert one._pages.free == pages - len(held)
        for state in one._states.values():
            others = {page for other in one._states.values() if other is not state for page in other.pages}
            assert one._pages.exclusive[state.id] == len(set(state.pages) - others)


@given(prompts)
def test_with_unlimited_memory_a_hit_is_the_longest_common_prefix(texts: list[str]) -> None:
    asks = [ask(text, "r") for text in texts]
    stored: list[np.ndarray] = []
    for one, served in zip(asks, serve(400, *asks), strict=True):
        best = max((common_prefix(state, one.prompt[:-1]) for state in stored), default=0)
        assert served.cached_tokens == best
        stored.append(np.concatenate([one.prompt, one.reply])[:-1])


@given(prompts, policies)
@settings(deadline=None)
def test_a_disk_finds_whatever_memory_has_lost(texts: list[str], policy: type[Policy]) -> None:
    asks = [ask(text, "r") for text in texts]
    limited, unlimited = serve(6, *asks, policy=policy(), disk=True), serve(400, *asks)
    assert [one.cached_tokens for one in limited] == [one.cached_tokens for one in unlimited]


def test_exclusive_pages_are_counted_through_sharing_and_release() -> None:
    pages = Pages(6)
    first = pages.take(3, 1)
    pages.share(first[:2], 2)
    second = first[:2] + pages.take(1, 2)
    assert pages.exclusive == {1: 1, 2: 1}
    pages.release(first, 1)
    assert pages.exclusive == {2: 3}
    pages.release(second, 2)
    assert (pages.exclusive, pages.free) == ({}, 6)
