"""The door for users: a grammar by itself, and where a text leaves it."""

from __future__ import annotations

import pytest

from zllm_jax.errors import InvalidRequest, UnsupportedGrammar
from zllm_jax.fence import Refused, compile_grammar

DIGITS = b"0123456789"


def test_where_a_text_leaves_a_schema() -> None:
    grammar = compile_grammar(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert grammar.accepts(b'{"a": 1}')
    assert grammar.accepts('{"a": 1}')
    assert not grammar.accepts('{"a": 1')
    found = grammar.first_error(b'{"a": tru3}')
    assert found == Refused(6, b"-" + DIGITS, may_end=False)


@pytest.mark.parametrize(
    "text, expected",
    [
        (b"12", None),
        (b"1x", Refused(1, DIGITS, may_end=True)),
        (b"", Refused(0, DIGITS, may_end=False)),
        (b"123", Refused(2, b"", may_end=True)),
    ],
)
def test_a_pattern_and_a_lark_grammar_say_the_same(text: bytes, expected: Refused | None) -> None:
    assert compile_grammar(regex="[0-9]{1,2}").first_error(text) == expected
    assert compile_grammar(lark="start: /[0-9]/ /[0-9]?/\n").first_error(text) == expected


def test_choices_and_what_is_relaxed() -> None:
    assert compile_grammar(choices=["yes", "né"]).accepts("né")
    several = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(UnsupportedGrammar, match="#/uniqueItems"):
        compile_grammar(json_schema=several)
    grammar = compile_grammar(json_schema=several, relax=True)
    assert grammar.accepts("[1, 1]")
    assert len(grammar.relaxed) == 1
    with pytest.raises(InvalidRequest, match="exactly one of"):
        compile_grammar(regex="a", choices=["a"])
