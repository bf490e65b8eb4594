"""Whose turn it is: priority, then a fair share for each tenant, then arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.device import job
from zllm_jax.scheduler import FairShare, Sequence, Ticket


def sequence(tenant: str = "", priority: int = 0) -> Sequence:
    return Sequence(job([1], tenant=tenant, priority=priority), Ticket(lambda: None))


def test_priority_goes_before_share_and_share_before_arrival() -> None:
    share, first, second, urgent = FairShare(), sequence("a"), sequence("b"), sequence("a", priority=1)
    for one in (first, second, urgent):
        share.arrive(one.job.tenant)
    assert share.order([second, first, urgent]) == [urgent, first, second]
    share.serve("a", 100)
    assert share.order([second, first, urgent]) == [urgent, second, first]


def test_who_was_away_has_saved_nothing_up() -> None:
    share = FairShare()
    share.arrive("busy")
    share.serve("busy", 1000)
    share.arrive("new")
    share.serve("new", 1)
    assert share.order([sequence("new"), sequence("busy")])[0].job.tenant == "busy"


def test_who_comes_back_still_owes_what_it_had_ahead() -> None:
    share = FairShare()
    for tenant in ("greedy", "modest"):
        share.arrive(tenant)
    share.serve("greedy", 1000)
    share.leave("greedy")
    share.arrive("greedy")
    assert share.order([sequence("greedy"), sequence("modest")])[0].job.tenant == "modest"


@given(st.lists(st.integers(1, 50), min_size=20, max_size=200))
def test_two_tenants_that_always_wait_get_the_same(costs: list[int]) -> None:
    """Whoever is served next, neither is ever ahead by more than one turn."""
    share, given_to = FairShare(), {"a": 0, "b": 0}
    both = [sequence("a"), sequence("b")]
    for tenant in given_to:
        share.arrive(tenant)
    for cost in costs:
        tenant = share.order(both)[0].job.tenant
        share.serve(tenant, cost)
        given_to[tenant] += cost
        assert abs(given_to["a"] - given_to["b"]) <= 50


def test_tenants_that_left_are_forgotten() -> None:
    share = FairShare()
    for number in range(100):
        share.arrive(str(number))
        share.serve(str(number), 5)
        share.leave(str(number))
    assert len(share) == 0
    assert not share._served


def test_who_leaves_last_has_saved_nothing_up_either() -> None:
    share = FairShare()
    share.arrive("w")
    share.serve("w", 1_000_000)
    share.arrive("v")
    share.serve("v", 5_000)
    for tenant in ("v", "w"):
        share.leave(tenant)
    for tenant in ("v", "w"):
        share.arrive(tenant)
    share.serve("w", 5_001)
    assert share.order([sequence("w"), sequence("v")])[0].job.tenant == "v"
