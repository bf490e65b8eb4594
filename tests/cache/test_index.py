"""The index against brute force: the same answers as comparing every stored sequence token by token."""

from __future__ import annotations

import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from zllm_jax.cache import Match, PrefixIndex, common_prefix

TENANTS = st.sampled_from(["", "one", "two"])
PARENTS = st.integers(0, 30)
KEPT = st.integers(0, 40)


def brute_force(a: np.ndarray, b: np.ndarray) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class AgainstBruteForce(RuleBasedStateMachine):
    """Sequences come, as forks of one another at any token, and go; every question gets the answer of all-pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.stored: dict[int, tuple[str, np.ndarray]] = {}
        self.made = [np.zeros(0, np.int32)]
        self.names = 0

    def fork(self, parent: int, kept: int, tail: list[int]) -> np.ndarray:
        return np.concatenate([self.made[parent % len(self.made)][:kept], np.array(tail, np.int32)])

    @rule(parent=PARENTS, kept=KEPT, tail=st.lists(st.integers(-1, 2), max_size=9), who=TENANTS)
    def add(self, parent: int, kept: int, tail: list[int], who: str) -> None:
        tokens = self.fork(parent, kept, tail)
        self.made.append(tokens)
        self.names += 1
        self.index.add(self.names, tokens, who)
        self.stored[self.names] = who, tokens

    @rule(which=PARENTS)
    def remove(self, which: int) -> None:
        if self.stored:
            key = sorted(self.stored)[which % len(self.stored)]
            self.index.remove(key)
            del self.stored[key]

    @rule(parent=PARENTS, kept=KEPT, tail=st.lists(st.integers(-1, 2), max_size=3), who=TENANTS)
    def ask(self, parent: int, kept: int, tail: list[int], who: str) -> None:
        prompt = self.fork(parent, kept, tail)
        own = {key: tokens for key, (tenant, tokens) in self.stored.items() if tenant == who}
        common = {key: brute_force(tokens, prompt) for key, tokens in own.items()}
        whole = {key for key, tokens in own.items() if common[key] == len(tokens)}
        best = max(common, key=lambda key: (common[key], key), default=None)
        expected = Match(best, common[best]) if best is not None and common[best] else None
        assert self.index.longest(prompt, who) == expected
        best = max(whole, key=lambda key: (common[key], key), default=None)
        assert self.index.longest_whole(prompt, who) == (None if best is None else Match(best, common[best]))
        found = self.index.prefixes_of(prompt, who)
        assert sorted(map(int, found)) == sorted(whole)  # type: ignore[call-overload]
        lengths = [common[key] for key in found]  # type: ignore[index]
        assert lengths == sorted(lengths, reverse=True)

    @invariant()
    def holds_what_was_stored(self) -> None:
        assert set(self.index) == set(self.stored)
        assert len(self.index) == len(self.stored)
        for key, (_, tokens) in self.stored.items():
            np.testing.assert_array_equal(self.index.tokens(key), tokens)
            assert self.index.num_tokens(key) == len(tokens)

    @invariant()
    def is_as_small_as_if_built_anew(self) -> None:
        fresh = PrefixIndex()
        for key, (tenant, tokens) in self.stored.items():
            fresh.add(key, tokens, tenant)
        assert shape(self.index) == shape(fresh)


def shape(index: PrefixIndex) -> dict[str, list[bytes]]:
    """The edges of each tenant's trie in the order of the tokens: the same for equal contents."""
    edges: dict[str, list[bytes]] = {}
    for tenant, root in index._roots.items():
        edges[tenant] = []
        waiting = [root]
        while waiting:
            node = waiting.pop()
            edges[tenant].append(node.edge)
            waiting += [node.children[first] for first in sorted(node.children)]
    return edges


AgainstBruteForce.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestAgainstBruteForce = AgainstBruteForce.TestCase


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    left, right = np.array(a, np.int32), np.array(b, np.int32)
    assert common_prefix(left, right) == brute_force(left, right)


def test_the_newest_of_equals_is_found_also_after_it_is_gone() -> None:
    index = PrefixIndex()
    tokens = np.arange(35, dtype=np.int32)
    for key in ("old", "newer", "newest"):
        index.add(key, tokens)
    assert index.longest(tokens) == index.longest_whole(tokens) == Match("newest", 35)
    index.remove("newest")
    assert index.longest(tokens) == index.longest_whole(tokens) == Match("newer", 35)


def test_a_key_is_indexed_once() -> None:
    index = PrefixIndex()
    index.add("a", np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match="'a' is indexed already"):
        index.add("a", np.arange(4, dtype=np.int32), "another tenant")
    with pytest.raises(KeyError):
        index.remove("b")


def test_tenants_do_not_see_each_other() -> None:
    """Invariant 18: a hit never crosses a tenant."""
    index = PrefixIndex()
    tokens = np.arange(20, dtype=np.int32)
    index.add("theirs", tokens, "one")
    for tenant in ("", "two"):
        assert index.longest(tokens, tenant) is None
        assert index.longest_whole(tokens, tenant) is None
        assert index.prefixes_of(tokens, tenant) == []


def test_a_sequence_of_thousands_of_turns_needs_no_recursion() -> None:
    index = PrefixIndex()
    turns = 2 * sys.getrecursionlimit()
    tokens = np.arange(turns, dtype=np.int32)
    for turn in range(1, turns + 1):
        index.add(turn, tokens[:turn])
    assert index.longest(tokens) == Match(turns, turns)
    assert len(index.prefixes_of(tokens)) == turns
    assert index.nbytes > 0
    for turn in range(1, turns + 1):
        index.remove(turn)
    assert len(index) == 0


def different(number: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 50_000, num_tokens, dtype=np.int32)


def forked(number: int, num_tokens: int) -> np.ndarray:
    """Families of a hundred, each member forking from the one before at another place, all with one first half."""
    base = different(number // 100, num_tokens)
    base[: num_tokens // 2] = different(999, num_tokens // 2)
    start = num_tokens // 2 + number % 100 * (num_tokens // 200)
    base[start:] = different(1000 + number, num_tokens - start)
    return base


def fill(make: Callable[[int, int], np.ndarray], count: int, num_tokens: int) -> PrefixIndex:
    index = PrefixIndex()
    for number in range(count):
        index.add(number, make(number, num_tokens))
    return index


def median_look_up_s(index: PrefixIndex, make: Callable[[int, int], np.ndarray], count: int, num_tokens: int) -> float:
    taken = []
    for number in range(0, count, max(1, count // 200)):
        prompt = np.concatenate([make(number, num_tokens), different(7, 30)])
        start = time.perf_counter()
        match = index.longest(prompt)
        taken.append(time.perf_counter() - start)
        assert match is not None
        assert match.common >= num_tokens
    return statistics.median(taken)


@pytest.mark.parametrize("make", [different, forked])
def test_ten_thousand_conversations_take_little_memory_and_time(make: Callable[[int, int], np.ndarray]) -> None:
    index = fill(make, 10_000, 4000)
    own_bytes = 10_000 * 4000 * 4
    assert index.nbytes <= (1.1 if make is different else 0.5) * own_bytes
    assert median_look_up_s(index, make, 10_000, 4000) < 1e-3


def test_nbytes_is_what_python_allocates() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = fill(forked, 300, 400)
        allocated = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert index.nbytes == pytest.approx(allocated, rel=0.1)
