"""Grammars that fit no table of ours: masks from llguidance on the host, with the answers' shape of the device's.

Recursion without bound, ambiguity, long regular expressions: here they cost time in each step, not states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import llguidance
import numpy as np
import numpy.typing as npt


class _Tokens:
    """What llguidance asks of a tokenizer. It never encodes here: the walk goes byte by byte."""

    def __init__(self, vocabulary: Sequence[bytes], eos_id: int) -> None:
        self.tokens = [token or b"<|%d|>" % i for i, token in enumerate(vocabulary)]
        self.special_token_ids = [i for i, token in enumerate(vocabulary) if not token]
        self.eos_token_id = eos_id
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        known = {token: i for i, token in reversed(list(enumerate(self.tokens)))}
        return [known[bytes([byte])] for byte in text if bytes([byte]) in known]


@dataclass(frozen=True, eq=False)
class HostVocabulary:
    """A vocabulary as llguidance wants it; built once a model (tens of milliseconds), shared by its matchers.

    vocabulary: the bytes of every token, b"" for a special, which no text matches. eos_ids: at least one.
    """

    vocabulary: Sequence[bytes] = field(repr=False)
    eos_ids: tuple[int, ...]
    _tokenizer: llguidance.LLTokenizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.eos_ids or any(self.vocabulary[token] for token in self.eos_ids):
            raise ValueError("eos_ids: at least one, each given as b'' in the vocabulary, for it stands for no text")
        wrapper = llguidance.TokenizerWrapper(_Tokens(self.vocabulary, self.eos_ids[0]))
        tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=len(self.vocabulary), eos_token=list(self.eos_ids))
        object.__setattr__(self, "_tokenizer", tokenizer)

    def matcher(self, grammar: str) -> HostMatcher:
        """A matcher at the beginning of a text. grammar: what `lark` gave. Raises `ValueError` where it is unusable."""
        inner = llguidance.LLMatcher(self._tokenizer, grammar)
        if inner.is_error():
            raise ValueError(f"grammar: {inner.get_error()}")
        return HostMatcher(self, inner)


@dataclass(frozen=True, eq=False)
class HostMatcher:
    """Where a text stands in its grammar: a value; `advance` gives another one and leaves this as it is."""

    shared: HostVocabulary
    _inner: llguidance.LLMatcher | None = field(repr=False)

    @property
    def dead(self) -> bool:
        """A token came that was not legal; nothing may follow."""
        return self._inner is None

    @property
    def ended(self) -> bool:
        """Whether the text may end here."""
        return self._inner is not None and self._inner.is_accepting()

    def mask(self) -> npt.NDArray[np.uint32]:
        """The tokens that may come next, u32[W]; EOS exactly where the text may end."""
        V = len(self.shared.vocabulary)
        words = np.zeros(-(-V // 32), np.uint32)
        if self._inner is None:
            return words
        words[:] = np.frombuffer(self._inner.compute_bitmask(), "<u4")[: len(words)]
        ended = self.ended
        for token in self.shared.eos_ids:
            bit = np.uint32(1 << token % 32)
            words[token // 32] = words[token // 32] | bit if ended else words[token // 32] & ~bit
        return words

    def advance(self, token: int) -> HostMatcher:
        """The position after `token`; a dead one where it was not legal. EOS leaves the position as it is."""
        if self._inner is None:
            return self
        if token in self.shared.eos_ids:
            return self if self.ended else HostMatcher(self.shared, None)
        if not self.mask()[token // 32] >> np.uint32(token % 32) & np.uint32(1):
            return HostMatcher(self.shared, None)
        inner = self._inner.deep_copy()
        return HostMatcher(self.shared, inner if inner.consume_token(token) else None)

    def advance_all(self, tokens: Iterable[int]) -> HostMatcher:
        at = self
        for token in tokens:
            at = at.advance(token)
        return at


def lark(text: str) -> str:
    """A Lark-like grammar, checked: rules in lower case, terminals in capitals, `start` the first of all.

    Raises `ValueError` that says in which line what is wrong.
    """
    grammar: str = llguidance.LLMatcher.grammar_from_lark(text)
    if error := llguidance.LLMatcher.validate_grammar(grammar):
        raise ValueError(f"Lark grammar: {error}")
    return grammar
