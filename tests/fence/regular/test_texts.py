"""Texts and their JSON spellings, against Python's own decoders."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.regular import (
    any_text,
    difference,
    empty,
    finite_texts,
    json_string,
    literal,
    text_length,
    union,
)

EDGES = [
    0,
    8,
    0x1F,
    0x22,
    0x2F,
    0x41,
    0x5C,
    0x7F,
    0x80,
    0xFF,
    0x7FF,
    0x800,
    0xFFF,
    0x1000,
    0xCFFF,
    0xD000,
    0xD7FF,
    0xE000,
]
EDGES += [0xFFFF, 0x10000, 0x103FF, 0x10400, 0x1FFFF, 0x3FFFF, 0x40000, 0xFFFFF, 0x100000, 0x10FC00, 0x10FFFF]
CHARACTERS = [chr(code) for code in EDGES]
SHORT = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}


def spellings(character: str) -> set[bytes]:
    """Every way to write a character in a JSON string, with digits in one case."""
    units = character.encode("utf-16-be")
    digits = [f"{int.from_bytes(units[i : i + 2]):04x}" for i in range(0, len(units), 2)]
    forms = {"".join("\\u" + four for four in digits), "".join("\\u" + four.upper() for four in digits)}
    if character in SHORT:
        forms.add("\\" + SHORT[character])
    if character >= " " and character not in '"\\':
        forms.add(character)
    return {form.encode() for form in forms}


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_any_text_is_valid_utf8() -> None:
    """All first bytes with the second bytes at every border, cut at every length."""
    seconds = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF]
    for first in range(256):
        for second in seconds:
            for text in (bytes([first, second, *rest]) for rest in ([], [0x80], [0xBF, 0x80], [0xBF, 0xC0])):
                assert any_text().accepts(text) == is_utf8(text), text


@settings(max_examples=100, deadline=None)
@given(st.text(), st.integers(0, 6), st.integers(0, 4))
def test_text_length_counts_code_points(text: str, low: int, more: int) -> None:
    data = text.encode()
    assert text_length(low, low + more).accepts(data) == (low <= len(text) <= low + more)
    assert text_length(low, None).accepts(data) == (low <= len(text))


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from(CHARACTERS) | st.characters(exclude_categories=["Cs"]), max_size=8), st.randoms())
def test_every_spelling_of_a_text(text: str, rng: random.Random) -> None:
    spelled = b"".join(rng.choice(sorted(spellings(one))) for one in text) + b'"'
    assert json.loads(b'"' + spelled) == text
    assert json_string(any_text(), canonical=False).accepts(spelled)
    assert json_string(literal(text.encode()), canonical=False).accepts(spelled)
    assert not json_string(literal(text.encode()), canonical=False).accepts(spelled[:-1])
    others = json_string(difference(any_text(), literal(text.encode())), canonical=False)
    assert not others.accepts(spelled)
    assert others.accepts(b"x" + spelled)
    for ascii_only in (False, True):
        dumped = json.dumps(text, ensure_ascii=ascii_only).encode()[1:]
        assert json_string(literal(text.encode()), canonical=True).accepts(dumped)


@pytest.mark.parametrize("character", CHARACTERS)
def test_nothing_but_the_spellings_of_a_character(character: str) -> None:
    every = finite_texts(json_string(literal(character.encode()), canonical=False), 10_000)
    assert every is not None
    assert {json.loads(b'"' + text) for text in every} == {character}
    canonical = finite_texts(json_string(literal(character.encode()), canonical=True), 10)
    dumped = {json.dumps(character, ensure_ascii=ascii_only).encode()[1:] for ascii_only in (False, True)}
    assert canonical is not None
    assert set(canonical) == dumped


def test_surrogates_have_no_spelling() -> None:
    everything = json_string(any_text(), canonical=False)
    for wrong in (
        b'\\ud800"',
        b'\\uDC00"',
        b'\\ud800\\u0041"',
        b'\\ud800x"',
        b'\xed\xa0\x80"',
        b'\x1f"',
        b'\\x"',
        b'""',
    ):
        assert not everything.accepts(wrong)
    lone = literal("\ud800".encode(errors="surrogatepass"))
    assert json_string(lone, canonical=True).digest == empty().digest
    with pytest.raises(ValueError, match="valid UTF-8"):
        json_string(literal(b"\xff"), canonical=True)


def test_sizes() -> None:
    assert any_text().num_states == 9  # dead, between two characters, and seven inside one
    assert json_string(any_text(), canonical=False).num_states == 22
    assert json_string(text_length(0, 200), canonical=False).num_states == 4003
    names = union(*(literal(name) for name in (b"name", b"age", b"description")))
    assert json_string(difference(any_text(), names), canonical=False).num_states < 200
    with pytest.raises(UnsupportedGrammar, match="at most 2500"):
        text_length(0, 2501)
    assert text_length(2, 1).digest == empty().digest
    with pytest.raises(ValueError, match="below 0"):
        text_length(-1, 1)
