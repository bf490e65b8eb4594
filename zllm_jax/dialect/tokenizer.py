"""Text <-> token ids, whatever library does the work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property

from zllm_jax.checkpoint import TokenizerFiles
from zllm_jax.dialect.detokenizer import Detokenizer
from zllm_jax.errors import BadTokenizer

MAX_VOCAB = 1 << 22  # a bound on what a broken file can make us build; the largest vocabularies have 2**18


class Tokenizer(ABC):
    """A checkpoint's tokenizer. Immutable; safe to use from several threads.

    vocab_size: one more than the highest id. special_ids: control tokens, which decoding leaves out.
    add_bos: whether prompts begin with `bos_id` unless said otherwise.
    strips_space: SentencePiece's rule that a text's first space is an artefact of its encoding.
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    add_bos: bool
    strips_space: bool

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """The ids of `text`.

        add_bos: None follows the checkpoint, but never gives a second BOS to a text that begins with one.
        parse_special: False takes `<|im_end|>` and the like as plain text, for input that must not steer the model.
        """
        ids = self._encode(text, parse_special)
        if add_bos is None:
            add_bos = self.add_bos and ids[:1] != [self.bos_id]
        if add_bos and self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids

    @abstractmethod
    def _encode(self, text: str, parse_special: bool) -> list[int]:
        """Without BOS."""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become replacement characters."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return detokenizer.feed(ids) + detokenizer.close()

    def token_bytes(self, token: int) -> bytes:
        """What `token` adds to a text, byte for byte; a control token's own spelling; b"" for an id without text.

        Models often have more rows than the tokenizer has tokens.
        """
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    @cached_property
    @abstractmethod
    def _bytes(self) -> tuple[bytes, ...]:
        """`token_bytes` of every id below `vocab_size`."""

    @cached_property
    @abstractmethod
    def digest(self) -> str:
        """sha256 (hex): equal digests, equal ids for every text."""


def load_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """The tokenizer of a checkpoint's files. Raises `BadTokenizer` when they are missing or unusable."""
    from zllm_jax.dialect.bpe import bpe_from_json, bpe_from_vocabulary
    from zllm_jax.dialect.spm import spm_from_file, spm_from_vocabulary

    if files.tokenizer_json is not None:
        return bpe_from_json(files)
    if files.sentencepiece is not None:
        return spm_from_file(files)
    if files.vocabulary is None:
        raise BadTokenizer("the checkpoint has neither tokenizer.json nor tokenizer.model nor a vocabulary of its own")
    makers = {"gpt2": bpe_from_vocabulary, "llama": spm_from_vocabulary}
    kind = files.vocabulary.kind
    if kind not in makers:
        raise BadTokenizer(f"tokenizer.ggml.model is {kind!r}; known are {', '.join(makers)}")
    return makers[kind](files)
