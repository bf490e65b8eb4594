"""Grammars that fit no table of ours: masks from llguidance on the host, with the answers' shape of the device's.

Recursion without bound, ambiguity, long regular expressions: here they cost time in each step, not states. The library
is loaded with the first grammar: who has none does without.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zllm_jax.errors import InvalidRequest
from zllm_jax.fence.vocabulary import pack_bits

if TYPE_CHECKING:
    import llguidance


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
        import llguidance

        if not self.eos_ids or any(self.vocabulary[token] for token in self.eos_ids):
            raise ValueError("eos_ids: at least one, each given as b'' in the vocabulary, for it stands for no text")
        wrapper = llguidance.TokenizerWrapper(_Tokens(self.vocabulary, self.eos_ids[0]))
        tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=len(self.vocabulary), eos_token=list(self.eos_ids))
        object.__setattr__(self, "_tokenizer", tokenizer)

    def matcher(self, grammar: str) -> HostMatcher:
        """A matcher at the beginning of a text. grammar: what `lark` gave. `InvalidRequest` where it is unusable."""
        import llguidance

        inner = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if inner.is_error():
            raise _refused(inner.get_error())
        return HostMatcher(self, inner)

    @cached_property
    def texts(self) -> npt.NDArray[np.uint32]:
        """The tokens that have bytes, u32[W]."""
        return pack_bits(np.array([bool(token) for token in self.vocabulary]))

    @cached_property
    def eos(self) -> npt.NDArray[np.uint32]:
        """The EOS tokens, u32[W]."""
        return pack_bits(np.isin(np.arange(len(self.vocabulary)), self.eos_ids))


@dataclass(frozen=True, eq=False)
class HostMatcher:
    """Where a text stands in its grammar: a value; `advance` gives another one and leaves this as it is.

    reason: why nothing may follow, where the library gave up; else empty.
    """

    shared: HostVocabulary
    _inner: llguidance.LLMatcher | None = field(repr=False)
    reason: str = ""

    @property
    def dead(self) -> bool:
        """A token came that was not legal; nothing may follow."""
        return self._inner is None

    @property
    def because(self) -> str:
        """`reason` as the end of a sentence."""
        return f": {self.reason}" if self.reason else ""

    @property
    def ended(self) -> bool:
        """Whether the text may end here."""
        return self._inner is not None and self._inner.is_accepting()

    def mask(self) -> npt.NDArray[np.uint32]:
        """The tokens that may come next, u32[W], not to be written to; EOS exactly where the text may end."""
        return self._mask

    @cached_property
    def _mask(self) -> npt.NDArray[np.uint32]:
        words = np.zeros_like(self.shared.texts)
        if self._inner is None:
            return words
        found = np.frombuffer(self._inner.compute_bitmask(), "<u4")[: len(words)]
        if not self._inner.is_error():
            words[: len(found)] = found
            words &= self.shared.texts
            words |= self.shared.eos if self.ended else np.uint32(0)
        words.flags.writeable = False
        return words

    def advance(self, token: int) -> HostMatcher:
        """The position after `token`; a dead one where it was not legal. EOS leaves the position as it is."""
        if self._inner is None:
            return self
        if token in self.shared.eos_ids and self.ended:
            return self
        if not self._mask[token // 32] >> np.uint32(token % 32) & np.uint32(1):
            return HostMatcher(self.shared, None, _reason(self._inner))
        inner = self._inner.deep_copy()
        if inner.consume_token(token):
            return HostMatcher(self.shared, inner)
        return HostMatcher(self.shared, None, _reason(inner))

    def advance_all(self, tokens: Iterable[int]) -> HostMatcher:
        at = self
        for token in tokens:
            at = at.advance(token)
        return at


def _reason(inner: llguidance.LLMatcher) -> str:
    """What the library says of its failure, without the text that it quotes below."""
    return inner.get_error().partition("\n")[0]


class HostMachine:
    """A grammar over bytes, with the interface of `Machine`: to look at a text without a tokenizer."""

    def __init__(self, grammar: str) -> None:
        self.begin = HostVocabulary([b"", *(bytes([byte]) for byte in range(256))], (0,)).matcher(grammar)

    def step(self, at: HostMatcher, byte: int) -> HostMatcher:
        """The position after one byte; a dead one where it may not come."""
        return at.advance(byte + 1)

    def ended(self, at: HostMatcher) -> bool:
        """Whether the text may end here."""
        return at.ended


def lark(text: str) -> str:
    """A Lark-like grammar, checked: rules in lower case, terminals in capitals, `start` where the text begins.

    Raises `InvalidRequest` that says in which line what is wrong, or what is more than a rule about the text: that is
    not enforced here.
    """
    import llguidance

    for found in _BEYOND.finditer(text):
        if found.lastgroup is not None:
            line = text.count("\n", 0, found.start()) + 1
            raise _refused(f"line {line}: {found.group()}: {_WHY[found.lastgroup]}")
    grammar: str = llguidance.LLMatcher.grammar_from_lark(text)
    if error := llguidance.LLMatcher.validate_grammar(grammar):
        raise _refused(error)
    whole: str = llguidance.LLMatcher.grammar_from_lark(_EVERY_TOKENISATION + text)
    return whole


# Where only one text may follow, the library would else allow its first byte's token alone.
_EVERY_TOKENISATION = '%llguidance {"no_forcing": true}\n'


def _refused(reason: str) -> InvalidRequest:
    """The library's `2(13): ...` or `at 2(13): ...` in words."""
    said = re.sub(r"^(?:at )?(\d+)\((\d+)\):", r"line \1, column \2:", reason.rstrip())
    return InvalidRequest(f"the Lark grammar cannot be used: {said}", param="fence")


# Strings, patterns and comments are passed over; what has a name is refused.
_BEYOND = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*" | (?://|\#)[^\n]* | /(?:\\.|[^/\\\n])+/
    | (?P<json>%json\b) | (?P<options>%llguidance\b) | (?P<special><[^\s<>]+>) | (?P<other>@\w+)
    | \b(?P<sampling>temperature|max_tokens|stop)\s*=
    """,
    re.VERBOSE,
)
_WHY = {
    "json": "a schema inside a Lark grammar would not be enforced exactly; give it as the fence's schema",
    "options": "options of the library cannot be set",
    "special": "control tokens are no text, and cannot be asked for",
    "other": "there are no other grammars to refer to",
    "sampling": "only the text can be ruled, not its sampling; `suffix` and `lazy` can say where a terminal ends",
}
