"""The index against brute force: the same answers as comparing every stored sequence token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zllm_jax.cache import Match, PrefixIndex, common_prefix
from zllm_jax.cache.index import BLOCK_TOKENS

# Sequences fork from one another at any token, so that they share whole blocks and parts of blocks.
forks = st.lists(
    st.tuples(st.integers(0, 10), st.integers(0, 3 * BLOCK_TOKENS), st.integers(0, 2 * BLOCK_TOKENS)),
    min_size=1,
    max_size=12,
)


def family(plan: list[tuple[int, int, int]]) -> list[np.ndarray]:
    """Each sequence keeps `kept` tokens of an earlier one and adds `added` tokens of its own."""
    made: list[np.ndarray] = [np.zeros(0, np.int32)]
    for number, (parent, kept, added) in enumerate(plan, start=1):
        start = made[parent % len(made)][:kept]
        made.append(np.concatenate([start, np.full(added, number % 4, np.int32)]))
    return made[1:]


def brute_force(a: np.ndarray, b: np.ndarray) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(forks, st.data())
def test_every_answer_is_that_of_brute_force(plan: list[tuple[int, int, int]], data: st.DataObject) -> None:
    sequences = family(plan)
    prompt = sequences.pop()
    index = PrefixIndex()
    for key, tokens in enumerate(sequences):
        index.add(key, tokens)
    stored = dict(enumerate(sequences))
    for key in data.draw(st.sets(st.sampled_from(sorted(stored)))) if stored else ():
        index.remove(key)
        del stored[key]

    common = {key: brute_force(tokens, prompt) for key, tokens in stored.items()}
    whole = {key for key, tokens in stored.items() if common[key] == len(tokens)}
    longest, longest_whole = index.longest(prompt), index.longest_whole(prompt)
    assert (longest.common if longest else 0) == max(common.values(), default=0)
    assert longest is None or common[longest.key] == longest.common  # type: ignore[index]
    assert (longest_whole.common if longest_whole else -1) == max((common[key] for key in whole), default=-1)
    assert longest_whole is None or longest_whole.key in whole
    assert set(index.prefixes_of(prompt)) == whole
    assert len(index) == len(stored)
    for key in list(stored):
        index.remove(key)
    assert len(index._nodes) == 1  # nothing but the root stays behind


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    left, right = np.array(a, np.int32), np.array(b, np.int32)
    assert common_prefix(left, right) == brute_force(left, right)


def test_the_newest_of_equals_is_found() -> None:
    index = PrefixIndex()
    tokens = np.arange(BLOCK_TOKENS + 3, dtype=np.int32)
    index.add("old", tokens)
    index.add("new", tokens)
    assert index.longest(tokens) == Match("new", len(tokens))


def test_a_key_is_indexed_once() -> None:
    index = PrefixIndex()
    index.add("a", np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match="'a' is indexed already"):
        index.add("a", np.arange(4, dtype=np.int32))


def test_a_colliding_hash_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 1: tokens decide. With every block hashed alike, answers stay those of the tokens."""
    monkeypatch.setattr("zllm_jax.cache.index._chains", lambda tokens: iter([b"same"] * (len(tokens) // BLOCK_TOKENS)))
    index = PrefixIndex()
    index.add("a", np.zeros(2 * BLOCK_TOKENS, np.int32))
    prompt = np.ones(2 * BLOCK_TOKENS + 1, np.int32)
    assert index.longest(prompt) is None
    assert index.longest_whole(prompt) is None
    assert index.prefixes_of(prompt) == []
