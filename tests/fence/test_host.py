"""The host matcher against brute force on a tiny vocabulary, and with a real tokenizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zllm_jax.checkpoint import open_checkpoint
from zllm_jax.dialect import load_tokenizer
from zllm_jax.errors import InvalidRequest
from zllm_jax.fence.host import HostMachine, HostMatcher, HostVocabulary, lark
from zllm_jax.fence.vocabulary import unpack_bits

ARITHMETIC = lark('start: sum\nsum: term ("+" term)*\nterm: /[0-9]/ | "(" sum ")"\n')
VOCABULARY = [b"", *(bytes([byte]) for byte in b"0123456789+()x"), b"+(", b"1+", b"))", b"((", b"1)", b"12", b"+)"]
EOS = 0


def parse_sum(text: str, at: int) -> tuple[int, bool]:
    """How far a sum reaches, and whether it is cut off rather than wrong; by recursive descent."""
    while True:
        if at == len(text):
            return at, True
        if text[at] == "(":
            at, cut = parse_sum(text, at + 1)
            if cut or at == len(text):
                return at, True
            if text[at] != ")":
                return -1, False
        elif not text[at].isdigit():
            return -1, False
        at += 1
        if at == len(text) or text[at] != "+":
            return at, False
        at += 1


def viable(text: str) -> bool:
    """Every prefix of a sum can be completed."""
    at, _ = parse_sum(text, 0)
    return at == len(text)


def complete(text: str) -> bool:
    at, cut = parse_sum(text, 0)
    return at == len(text) and not cut


@pytest.fixture(scope="module")
def tiny() -> HostVocabulary:
    return HostVocabulary(VOCABULARY, (EOS,))


def allowed(at: HostMatcher) -> list[bool]:
    return unpack_bits(at.mask(), len(at.shared.vocabulary)).tolist()


def test_masks_are_those_of_brute_force(tiny: HostVocabulary) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        at, text = tiny.matcher(ARITHMETIC), b""
        for _ in range(12):
            expected = [viable((text + token).decode()) if token else complete(text.decode()) for token in VOCABULARY]
            assert allowed(at) == expected, text
            token = int(rng.choice(np.flatnonzero(expected)))
            if token == EOS:
                break
            at, text = at.advance(token), text + VOCABULARY[token]


def test_a_position_is_a_value(tiny: HostVocabulary) -> None:
    begin = tiny.matcher(ARITHMETIC)
    before = begin.mask()
    one = begin.advance(VOCABULARY.index(b"1"))
    assert (begin.mask() == before).all()
    assert one.ended
    assert one.advance(EOS).ended
    assert begin.advance(EOS).dead
    dead = begin.advance(VOCABULARY.index(b"x"))
    assert dead.dead
    assert not dead.mask().any()
    assert dead.advance(1).dead


def test_what_is_wrong_with_a_grammar_is_said(tiny: HostVocabulary) -> None:
    with pytest.raises(InvalidRequest, match=r"line 2, column 13: Expected token '\)'"):
        lark('start: "a"\nother: ( "b"\n')
    with pytest.raises(InvalidRequest, match=r"line 1, column 8: unknown name: .missing"):
        lark("start: missing\n")
    with pytest.raises(ValueError, match="eos_ids"):
        HostVocabulary(VOCABULARY, (1,))


@pytest.mark.parametrize(
    "grammar, message",
    [
        ('start: "a"\n  | %json {"type": "null"}\n', "line 2: %json: a schema inside"),
        ("start: <[3]>\n", r"line 1: <\[3\]>: control tokens"),
        ('start: "a" <|end|>\n', r"line 1: <\|end\|>: control tokens"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"\n', "line 1: %llguidance: options"),
        ('start: "a" @other\n', "line 1: @other: there are no other grammars"),
        ('start: x "b"\n\nx[max_tokens=2]: /a*/\n', "line 3: max_tokens=: only the text"),
        ('start: x "b"\nx[lazy, temperature = 2]: /a*/\n', "line 2: temperature =: only the text"),
    ],
)
def test_what_is_no_rule_about_the_text_is_refused(grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        lark(grammar)


def test_texts_patterns_and_remarks_may_look_like_what_is_refused() -> None:
    grammar = r"""
        // %json <[1]> @other
        # %llguidance
        start: "<b>" A " stop=\"%json\""
        A: /<i>\/@x/
    """
    machine = HostMachine(lark(grammar))
    at = machine.begin
    for byte in b'<b><i>/@x stop="%json"':
        assert not machine.ended(at)
        at = machine.step(at, byte)
    assert machine.ended(at)
    assert machine.step(at, ord("x")).dead


def test_a_grammar_that_asks_too_much_of_the_library_dies_with_the_reason() -> None:
    machine = HostMachine(lark('start: "a" ' + '"b"? ' * 3000 + "\n"))
    after = machine.step(machine.begin, ord("a"))
    dead = after if after.dead else machine.step(after, ord("b"))
    assert dead.dead
    assert "max is 2000" in dead.because
    assert "\n" not in dead.because


@pytest.mark.slow
def test_the_library_is_loaded_with_the_first_grammar() -> None:
    code = "import sys, zllm_jax.engine.fences; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_with_a_real_tokenizer(smollm2: Path) -> None:
    files = open_checkpoint(smollm2).tokenizer
    assert files is not None
    tokenizer = load_tokenizer(files)
    special = tokenizer.special_ids
    vocabulary = [b"" if token in special else tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    eos = tokenizer.encode("<|im_end|>")
    assert len(eos) == 1
    at = HostVocabulary(vocabulary, tuple(eos)).matcher(ARITHMETIC)
    for token in tokenizer.encode("((1+2)+3)", add_bos=False):
        assert allowed(at)[token]
        assert not allowed(at)[eos[0]]
        at = at.advance(token)
    assert at.ended
    assert allowed(at)[eos[0]]


def test_where_one_text_is_left_each_of_its_tokenisations_is_legal() -> None:
    shared = HostVocabulary([b"", b"t", b"r", b"u", b"e", b"tr", b"true", b"ue", b"x"], (EOS,))
    legal = np.flatnonzero(allowed(shared.matcher(lark('start: "true"'))))
    assert [shared.vocabulary[token] for token in legal] == [b"t", b"tr", b"true"]
