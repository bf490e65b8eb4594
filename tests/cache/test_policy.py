"""Policies rank facts: each test changes one fact and says which of two goes first."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zllm_jax.cache import POLICIES, Candidate, CostAware, Lru

ONE = Candidate(
    key="one", num_tokens=1000, freed_bytes=1 << 20, saved_s=2.0, uses=1, last_used=50, created=10, dependents=0
)
NOW = 60


def first(policy: str, **changed: object) -> str:
    """Which goes first: `one`, or another that differs from it in this."""
    other = dataclasses.replace(ONE, key="other", **changed)
    orders = {
        tuple(str(found.key) for found in POLICIES[policy]().order(pair, NOW)) for pair in ([ONE, other], [other, ONE])
    }
    (order,) = orders  # whatever order they come in
    return order[0]


@pytest.mark.parametrize(
    "changed, victim",
    [
        ({"last_used": 49}, "other"),
        ({"last_used": 51}, "one"),
        ({"created": 9}, "other"),  # equally old: the one that began first
        ({"created": 11, "saved_s": 0.0, "freed_bytes": 1 << 30}, "one"),  # what it costs does not count
    ],
)
def test_lru_looks_at_the_last_use_only(changed: dict[str, object], victim: str) -> None:
    assert first("lru", **changed) == victim


@pytest.mark.parametrize(
    "changed, victim",
    [
        ({"saved_s": 1.9}, "other"),
        ({"saved_s": 2.1}, "one"),
        ({"freed_bytes": 2 << 20}, "other"),  # more room for the same seconds
        ({"freed_bytes": 2 << 20, "saved_s": 4.1}, "one"),
        ({"num_tokens": 900}, "other"),
        ({"last_used": 49}, "other"),
        ({"num_tokens": 4000, "saved_s": 0.9}, "other"),  # four times the length: twice the heat
        ({"num_tokens": 4000, "saved_s": 1.1}, "one"),
        ({"dependents": 3, "saved_s": 0.9}, "other"),
        ({"dependents": 3, "saved_s": 1.1}, "one"),
        ({"last_used": 55, "saved_s": 0.9}, "other"),  # half the age makes up for no more than half the seconds
        ({"last_used": 55, "saved_s": 1.2}, "one"),
        ({"dependents": 1}, "one"),
        ({"freed_bytes": 0, "saved_s": 0.0, "last_used": 0}, "one"),  # nothing would be gained by it
        ({"created": 9}, "other"),
    ],
)
def test_cost_weighs_expected_seconds_against_bytes(changed: dict[str, object], victim: str) -> None:
    assert first("cost", **changed) == victim


candidates = st.builds(
    Candidate,
    key=st.uuids(),
    num_tokens=st.integers(1, 10_000),
    freed_bytes=st.integers(0, 1 << 30),
    saved_s=st.floats(0, 1e6),
    uses=st.integers(0, 50),
    last_used=st.integers(0, NOW),
    created=st.integers(0, NOW),
    dependents=st.integers(0, 5),
)


@given(st.lists(candidates, unique_by=lambda one: one.key), st.sampled_from(sorted(POLICIES)))
def test_an_order_holds_every_candidate_once(found: list[Candidate], policy: str) -> None:
    order = POLICIES[policy]().order(iter(found), NOW)
    assert sorted(map(id, order)) == sorted(map(id, found))
    if policy == "cost":
        frees = [one.freed_bytes > 0 for one in order]
        assert frees == sorted(frees, reverse=True)


def test_policies_are_found_by_their_names() -> None:
    assert {name: make().name for name, make in POLICIES.items()} == {"lru": Lru.name, "cost": CostAware.name}
