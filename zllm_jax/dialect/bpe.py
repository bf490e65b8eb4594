"""BPE through Hugging Face's `tokenizers`: from tokenizer.json, or rebuilt from a GGUF's tokens and merges."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from zllm_jax.checkpoint import TokenizerFiles
from zllm_jax.dialect.tokenizer import MAX_VOCAB, Tokenizer
from zllm_jax.errors import BadTokenizer

_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2  # GGUF's token types

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class BpeTokenizer(Tokenizer):
    """`library` does the work. byte_level: pieces are spelled in GPT-2's alphabet, else in SentencePiece's."""

    def __init__(
        self,
        library: Library,
        *,
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        add_bos: bool,
        byte_level: bool = True,
        strips_space: bool = False,
    ) -> None:
        self._library = library
        self._added = library.get_added_tokens_decoder()
        self._byte_level = byte_level
        self.vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocab_size <= MAX_VOCAB:
            raise BadTokenizer(
                f"the vocabulary's ids end at {self.vocab_size:,}; it must have 1 to {MAX_VOCAB:,} tokens"
            )
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.special_ids = frozenset(id for id, token in self._added.items() if token.special)
        self.add_bos = add_bos
        self.strips_space = strips_space

    @cached_property
    def _plain(self) -> Library:
        """A twin that takes control tokens as text: the library's switch is a state, so it has an object of its own."""
        twin = Library.from_str(self._library.to_str())
        twin.encode_special_tokens = True
        return twin

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        library = self._library if parse_special else self._plain
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        spell = _byte_level_bytes if self._byte_level else fallback_bytes
        table = [b""] * self.vocab_size
        for piece, id in self._library.get_vocab(with_added_tokens=False).items():
            table[id] = spell(piece)
        for id, token in self._added.items():
            table[id] = token.content.encode()
        return tuple(table)

    @cached_property
    def digest(self) -> str:
        rest = json.dumps([self.bos_id, self.eos_ids, self.add_bos])
        return hashlib.sha256((self._library.to_str() + rest).encode()).hexdigest()


def bpe_from_json(files: TokenizerFiles) -> BpeTokenizer:
    """From tokenizer.json. Raises `BadTokenizer` when it cannot be parsed or its pieces have no known bytes."""
    path = files.tokenizer_json
    assert path is not None
    try:
        text = path.read_text(encoding="utf-8")
        library = Library.from_str(text)
        steps = list(_steps(json.loads(text).get("decoder")))
    except Exception as error:  # the library raises bare Exceptions
        raise BadTokenizer(f"{path} cannot be loaded: {error}") from error
    kinds = {step["type"] for step in steps}
    if not kinds & {"ByteLevel", "ByteFallback"}:
        raise BadTokenizer(f"{path}: its decoder is {sorted(kinds) or 'absent'}; it needs ByteLevel or ByteFallback")
    bos_id = _setting(library, files, "bos_token", files.bos_id)
    eos_id = _setting(library, files, "eos_token", None)
    return BpeTokenizer(
        library,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys((*files.eos_ids, *([] if eos_id is None else [eos_id])))),
        add_bos=bos_id is not None and library.encode("").ids[:1] == [bos_id],
        byte_level="ByteLevel" in kinds,
        strips_space=any(_strips(step) for step in steps),
    )


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A decoder's description without its nesting."""
    if decoder is None:
        return
    yield decoder
    for inner in decoder.get("decoders", ()):
        yield from _steps(inner)


def _strips(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"])
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")


def _setting(library: Library, files: TokenizerFiles, key: str, default: int | None) -> int | None:
    """The id of a token that tokenizer_config.json names, as text or as an object."""
    token = files.settings.get(key)
    if isinstance(token, Mapping):
        token = token.get("content")
    id: int | None = library.token_to_id(token) if isinstance(token, str) else None
    return default if id is None else id


def bpe_from_vocabulary(files: TokenizerFiles) -> BpeTokenizer:
    """From a GGUF's tokens, merges and the name of its pre-tokenizer. Raises `BadTokenizer`."""
    vocabulary = files.vocabulary
    assert vocabulary is not None
    pre = vocabulary.pre
    splitter = _pre_tokenizer(pre)
    try:
        pairs = [_pair(merge) for merge in vocabulary.merges]
        ids = {token: id for id, token in enumerate(vocabulary.tokens)}
        library = Library(models.BPE(vocab=ids, merges=pairs, ignore_merges=pre in _LLAMA3_NAMES))
    except Exception as error:  # the library raises bare Exceptions
        raise BadTokenizer(f"the file's merges do not fit its tokens: {error}") from error
    library.pre_tokenizer = splitter
    library.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        library.normalizer = normalizers.NFC()
    added = zip(vocabulary.tokens, vocabulary.types, strict=True)
    library.add_special_tokens([_added(token) for token, kind in added if kind in (_CONTROL, _UNKNOWN)])
    added = zip(vocabulary.tokens, vocabulary.types, strict=True)
    library.add_tokens([_added(token) for token, kind in added if kind == _USER_DEFINED])
    return BpeTokenizer(
        library,
        bos_id=files.bos_id,
        eos_ids=files.eos_ids,
        add_bos=pre in _LLAMA3_NAMES if vocabulary.add_bos is None else vocabulary.add_bos,
    )


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def _pre_tokenizer(pre: str) -> Any:
    """What cuts a text before any merge. Wrong cuts give wrong ids for digits and blanks only: never guess."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("gpt-2", "gpt2", "default"):
        return gpt2
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    patterns = dict.fromkeys(_LLAMA3_NAMES, _LLAMA3) | {"qwen2": _QWEN2}
    if pre not in patterns:
        known = ", ".join(("gpt-2", "default", "smollm", *patterns))
        raise BadTokenizer(f"tokenizer.ggml.pre is {pre!r}, an unknown pre-tokenizer; known are {known}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: each printable Latin-1 byte is itself, the others are 256, 257, ... in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:
        return piece.encode()  # never produced by the alphabet: padding such as "[PAD151665]"


_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


def fallback_bytes(piece: str) -> bytes:
    """SentencePiece's spelling: `<0x0A>` is one byte, ▁ a space."""
    if byte := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace("▁", " ").encode()
