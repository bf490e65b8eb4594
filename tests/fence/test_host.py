"""The host matcher against brute force on a tiny vocabulary, and with a real tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zllm_jax.checkpoint import open_checkpoint
from zllm_jax.dialect import load_tokenizer
from zllm_jax.fence.host import HostMatcher, HostVocabulary, lark
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
    with pytest.raises(ValueError, match=r"Lark grammar: .*2"):
        lark('start: "a"\nother: ( "b"\n')
    with pytest.raises(ValueError, match="missing"):
        lark("start: missing\n")
    with pytest.raises(ValueError, match="eos_ids"):
        HostVocabulary(VOCABULARY, (1,))


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
