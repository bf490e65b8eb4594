"""The operations against sets of short texts, and the laws that make equal languages equal arrays."""

from __future__ import annotations

import itertools
import operator
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import ByteAutomaton
from zllm_jax.fence.automaton import build
from zllm_jax.fence.regular import (
    complement,
    concat,
    difference,
    empty,
    equal,
    finite_texts,
    intersect,
    is_empty,
    literal,
    optional,
    product,
    repeat,
    shortest,
    star,
    union,
)

SHORT = [bytes(text) for length in range(7) for text in itertools.product(b"ab", repeat=length)]
Texts = frozenset[bytes]


def cut(texts: set[bytes]) -> Texts:
    return frozenset(text for text in texts if len(text) <= 6)


def both(a: Texts, b: Texts) -> Texts:
    return cut({x + y for x in a for y in b})


def times(a: Texts, count: int) -> Texts:
    return reduce(both, [a] * count, frozenset([b""]))


def held(automaton: ByteAutomaton) -> Texts:
    return frozenset(text for text in SHORT if automaton.accepts(text))


@st.composite
def languages(draw: st.DrawFn, depth: int = 3) -> tuple[ByteAutomaton, Texts]:
    """An automaton, and which texts of at most six letters it must hold."""
    if depth == 0 or draw(st.booleans()):
        word = draw(st.sampled_from([b"", b"a", b"b", b"ab", b"ba", b"aab"]))
        return literal(word), frozenset([word])
    (a, texts_a), (b, texts_b) = draw(languages(depth=depth - 1)), draw(languages(depth=depth - 1))
    kind = draw(st.sampled_from(["union", "intersect", "difference", "concat", "star", "optional", "repeat"]))
    if kind in ("union", "intersect", "difference"):
        operation = {"union": union, "intersect": intersect, "difference": difference}[kind]
        combine = {"union": operator.or_, "intersect": operator.and_, "difference": operator.sub}[kind]
        return operation(a, b), combine(texts_a, texts_b)
    if kind == "concat":
        return concat(a, b), both(texts_a, texts_b)
    low, high = {"star": (0, 7), "optional": (0, 1), "repeat": (1, 3)}[kind]
    texts = frozenset[bytes]().union(*(times(texts_a, count) for count in range(low, high + 1)))
    return {"star": star, "optional": optional, "repeat": lambda one: repeat(one, 1, 3)}[kind](a), texts


@settings(max_examples=150, deadline=None)
@given(languages(), languages())
def test_operations_are_those_of_sets(one: tuple[ByteAutomaton, Texts], other: tuple[ByteAutomaton, Texts]) -> None:
    (a, texts_a), (b, texts_b) = one, other
    assert held(a) == texts_a
    assert held(union(a, b, literal(b"bb"))) == texts_a | texts_b | {b"bb"}
    whole, outcomes = product([a, b, literal(b"bb")])
    for text in SHORT:
        assert outcomes[whole.run(text)] == (text in texts_a) + 2 * (text in texts_b) + 4 * (text == b"bb")


@settings(max_examples=100, deadline=None)
@given(languages(), languages())
def test_equal_languages_are_equal_arrays(one: tuple[ByteAutomaton, Texts], other: tuple[ByteAutomaton, Texts]) -> None:
    a, b = one[0], other[0]
    for left, right in (
        (union(a, b), union(b, a, a)),
        (difference(a, b), difference(union(a, b), b)),
        (intersect(a, b), difference(a, difference(a, b))),
        (star(star(a)), star(a)),
        (concat(a, star(a)), repeat(a, 1, None)),
        (complement(a, union(a, b)), difference(b, a)),
        (optional(a), repeat(a, 0, 1)),
    ):
        assert left.digest == right.digest
        assert equal(left, right)
    assert is_empty(difference(a, a))
    assert difference(a, a).digest == empty().digest


def test_chains_before_cycles_are_minimal() -> None:
    a, b = literal(b"a"), literal(b"b")
    chain = concat(repeat(a, 0, 40), star(b), literal(b"c"))
    assert chain.num_states == 43  # dead, a 0 to 39 times, after the last a or a b, the end
    assert concat(repeat(a, 0, 20), repeat(a, 0, 20), star(b), literal(b"c")).digest == chain.digest


def test_states_that_lead_nowhere_go() -> None:
    loose = build([(1, b"a", 2), (1, b"b", 3), (3, b"b", 3), (4, b"a", 2)], start=1, accepting=[2])
    assert union(loose).num_states == 3
    assert union(loose).digest == literal(b"a").digest


def test_shortest_and_finite_texts() -> None:
    words = union(literal(b"bc"), literal(b"ad"), literal(b"abc"))
    assert shortest(words) == b"ad"
    assert finite_texts(words, 3) == [b"abc", b"ad", b"bc"]
    assert finite_texts(words, 2) is None
    assert finite_texts(star(words), 1000) is None
    assert finite_texts(repeat(union(literal(b"a"), literal(b"b")), 40, 40), 1000) is None
    assert finite_texts(empty(), 0) == []
    assert shortest(empty()) is None
    unreached = ByteAutomaton(np.zeros((3, 256), np.int32), np.array([False, False, True]), 1)
    assert is_empty(unreached)


def test_what_is_too_large() -> None:
    letters = union(literal(b"a"), literal(b"b"))
    with pytest.raises(UnsupportedGrammar, match="too large"):
        concat(star(letters), literal(b"a"), repeat(letters, 15, 15))
    with pytest.raises(UnsupportedGrammar, match="at most 62"):
        product([letters] * 63)
    with pytest.raises(ValueError, match="low <= high"):
        repeat(letters, 2, 1)
