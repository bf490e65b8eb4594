"""Token ids -> text, a few at a time, exact to the byte."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zllm_jax.dialect.tokenizer import Tokenizer


class Detokenizer:
    """Turns a growing row of ids into text; the pieces joined equal `decode` of the whole row.

    A character whose bytes are spread over several tokens comes with its last one: 👋 in three gives "", "", "👋".
    continuing: the ids follow on a prompt, so that the first space belongs to the text. shown: control tokens that are
    text all the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        continuing: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown if skip_special else frozenset[int]()
        self._strip = tokenizer.strips_space and not continuing
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        added = b"".join(self._tokenizer.token_bytes(token) for token in ids if token not in self._skipped)
        if self._strip and added:
            added, self._strip = added.removeprefix(b" "), False
        return self._utf8.decode(added)

    @property
    def pending(self) -> bool:
        """Whether the ids so far end inside a character."""
        return bool(self._utf8.getstate()[0])

    def close(self) -> str:
        """What is left: a replacement character for a character that never became whole."""
        return self._utf8.decode(b"", final=True)
