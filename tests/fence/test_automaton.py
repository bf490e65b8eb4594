"""The automata made by hand, against Python's own idea of the same language."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from zllm_jax.fence import DEAD, ByteAutomaton, choices, decimal_number


def test_decimal_number_is_the_regular_expression() -> None:
    automaton, pattern = decimal_number(), re.compile(rb"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
    for length in range(6):
        for letters in itertools.product(b"-.0159e", repeat=length):
            text = bytes(letters)
            assert automaton.accepts(text) == bool(pattern.fullmatch(text)), text


def test_choices() -> None:
    texts = ["yes", "no", "nothing", "né"]
    automaton = choices(texts)
    assert all(automaton.accepts(text.encode()) for text in texts)
    assert not any(automaton.accepts(text) for text in (b"", b"y", b"noth", b"yesno", b"n\xc3", b"x"))
    assert automaton.run(b"x") == DEAD
    assert automaton.run(b"no") == automaton.run(b"o", automaton.run(b"n"))


def test_the_empty_choice_is_a_text() -> None:
    assert choices(["", "a"]).accepts(b"")
    with pytest.raises(ValueError, match="at least one text"):
        choices([])


@pytest.mark.parametrize(
    ("transitions", "accepting", "start", "rule"),
    [
        (np.zeros((2, 255), np.int32), [False, True], 1, "must be"),
        (np.full((2, 256), 2, np.int32), [False, True], 1, "must be states"),
        (np.zeros((2, 256), np.int32), [False, True], 2, "must be states"),
        (np.zeros((2, 256), np.int32), [True, True], 1, "state 0"),
        (np.ones((2, 256), np.int32), [False, True], 1, "state 0"),
    ],
)
def test_malformed_automata_are_refused(transitions: np.ndarray, accepting: list[bool], start: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        ByteAutomaton(transitions, np.array(accepting), start)
