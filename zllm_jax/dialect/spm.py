"""SentencePiece: from tokenizer.model, or rebuilt from a GGUF's pieces, scores and types."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import sentencepiece

from zllm_jax.checkpoint import TokenizerFiles, Vocabulary
from zllm_jax.dialect.bpe import fallback_bytes
from zllm_jax.dialect.tokenizer import MAX_VOCAB, Tokenizer
from zllm_jax.errors import BadTokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # SentencePiece's types, which GGUF shares


class SpmTokenizer(Tokenizer):
    """`processor` does the work for plain text; tokens in `added` (text -> id) are cut out before it sees a text."""

    def __init__(
        self,
        proto: bytes,
        *,
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        add_bos: bool,
        strips_space: bool,
        added: Mapping[str, int],
        special_ids: frozenset[int],
    ) -> None:
        self._proto = proto
        self._processor = _processor(proto)
        self._added = dict(added)
        self._plain_added = {text: id for text, id in added.items() if id not in special_ids}
        self.vocab_size = max(self._processor.get_piece_size(), *(id + 1 for id in added.values()), 1)
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.special_ids = special_ids
        self.add_bos = add_bos
        self.strips_space = strips_space

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for part in split_tokens(text, self._added if parse_special else self._plain_added):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._processor.encode(part)
        return ids

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        size = self._processor.get_piece_size()
        table = [fallback_bytes(piece) for piece in self._processor.id_to_piece(list(range(size)))]
        table += [b""] * (self.vocab_size - size)
        for text, id in self._added.items():
            table[id] = text.encode()
        return tuple(table)

    @cached_property
    def digest(self) -> str:
        rest = json.dumps([self.bos_id, self.eos_ids, self.add_bos, sorted(self._added.items())])
        return hashlib.sha256(self._proto + rest.encode()).hexdigest()


def spm_from_file(files: TokenizerFiles) -> SpmTokenizer:
    """From tokenizer.model, with the tokens that tokenizer_config.json adds. Raises `BadTokenizer`."""
    assert files.sentencepiece is not None
    try:
        proto = files.sentencepiece.read_bytes()
    except OSError as error:
        raise BadTokenizer(f"cannot read {files.sentencepiece}: {error.strerror}") from error
    processor = _processor(proto)
    special = {processor.id_to_piece(id): id for id in range(processor.get_piece_size()) if processor.is_control(id)}
    added = dict(special)
    for text, id, is_special in _added_tokens(files.settings):
        added[text] = id
        if is_special:
            special[text] = id
    bos = processor.bos_id() if files.bos_id is None else files.bos_id
    return SpmTokenizer(
        proto,
        bos_id=None if bos < 0 else bos,
        eos_ids=files.eos_ids or tuple(id for id in (processor.eos_id(),) if id >= 0),
        add_bos=bool(files.settings.get("add_bos_token", True)),
        strips_space=_adds_space(proto),
        added=added,
        special_ids=frozenset(special.values()),
    )


def _added_tokens(settings: Mapping[str, Any]) -> list[tuple[str, int, bool]]:
    """Spelling, id and whether it is special, of what tokenizer_config.json adds to the pieces."""
    entries = settings.get("added_tokens_decoder", {})
    try:
        found = [(str(entry["content"]), int(id), bool(entry.get("special"))) for id, entry in entries.items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadTokenizer(f"tokenizer_config.json: added_tokens_decoder is malformed: {error!r}") from error
    if wrong := [id for text, id, _ in found if not text or not 0 <= id < MAX_VOCAB]:
        raise BadTokenizer(f"tokenizer_config.json: added_tokens_decoder has id {wrong[0]}; ids end at {MAX_VOCAB:,}")
    return found


def spm_from_vocabulary(files: TokenizerFiles) -> SpmTokenizer:
    """From a GGUF's pieces. Raises `BadTokenizer` when they make no model."""
    vocabulary = files.vocabulary
    assert vocabulary is not None
    special = {
        token: id
        for id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if token and kind in (_CONTROL, _UNKNOWN)
    }
    return SpmTokenizer(
        _model_proto(vocabulary),
        bos_id=files.bos_id,
        eos_ids=files.eos_ids,
        add_bos=True if vocabulary.add_bos is None else vocabulary.add_bos,
        strips_space=vocabulary.add_space_prefix,
        added=special,
        special_ids=frozenset(special.values()),
    )


def split_tokens(text: str, tokens: Mapping[str, int]) -> Iterator[str | int]:
    """`text` cut at the spellings of `tokens`, the longest first: "a<bos>b" -> "a", 2, "b"."""
    if not tokens:
        if text:
            yield text
        return
    lengths = sorted(set(map(len, tokens)), reverse=True)
    first = re.compile("[" + re.escape("".join({token[0] for token in tokens})) + "]")
    start = position = 0
    while found := first.search(text, position):
        position = found.start()
        for length in lengths:
            if (id := tokens.get(text[position : position + length])) is not None:
                if start < position:
                    yield text[start:position]
                yield id
                start = position = position + length
                break
        else:
            position += 1
    if start < len(text):
        yield text[start:]


def _processor(proto: bytes) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(proto)
    except RuntimeError as error:
        raise BadTokenizer(f"SentencePiece refuses the model: {error}") from error
    return processor


def _messages() -> Any:
    """SentencePiece's protobuf classes, which are made at import and so unknown to a type checker."""
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2


def _adds_space(proto: bytes) -> bool:
    return bool(_messages().ModelProto.FromString(proto).normalizer_spec.add_dummy_prefix)


def _model_proto(vocabulary: Vocabulary) -> bytes:
    """The SentencePiece model that a GGUF was made from, as far as its pieces tell: BPE by score, then bytes."""
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise BadTokenizer(f"{len(vocabulary.scores)} scores for {len(vocabulary.tokens)} pieces: one each is needed")
    model = _messages().ModelProto()
    add = model.pieces.add
    for id, (piece, score, kind) in enumerate(zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)):
        if id == vocabulary.unknown_id:
            kind = _UNKNOWN
        elif kind == _USER_DEFINED:
            piece = piece.replace(" ", "▁")  # GGUF writers put the spaces back in
        try:
            add(piece=piece, score=score, type=kind)
        except ValueError as error:
            raise BadTokenizer(f"piece {id} of the vocabulary has the unknown type {kind}") from error
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type = trainer.BPE
    trainer.byte_fallback = _BYTE in vocabulary.types
    trainer.vocab_size = len(vocabulary.tokens)
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = vocabulary.add_space_prefix
    normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    proto: bytes = model.SerializeToString()
    return proto
