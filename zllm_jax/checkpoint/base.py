"""What every checkpoint offers, whatever its format: a configuration, canonical parameters, a tokenizer's files."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zllm_jax.checkpoint.digest import digest_files
from zllm_jax.checkpoint.jsonfile import read_json
from zllm_jax.checkpoint.parameters import parameter_shapes
from zllm_jax.config import Dtype, ModelConfig
from zllm_jax.errors import BadCheckpoint


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A GGUF's own vocabulary, from which a tokenizer is rebuilt.

    kind: "gpt2" (byte-level BPE with `merges`) or "llama" (SentencePiece pieces with `scores`).
    pre: the pre-tokenizer's name. types: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    """

    kind: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] = ()
    merges: tuple[str, ...] = ()
    add_bos: bool | None = None
    add_space_prefix: bool = True
    unknown_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What a checkpoint says about its tokenizer: one of the first three, and the special ids.

    settings: the content of `tokenizer_config.json`, else empty.
    """

    tokenizer_json: Path | None = None
    sentencepiece: Path | None = None
    vocabulary: Vocabulary | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def save(self, folder: Path) -> None:
        """Copy everything into `folder`, so that `load` gives an equal tokenizer there."""
        folder.mkdir(parents=True)
        for source, name in ((self.tokenizer_json, "tokenizer.json"), (self.sentencepiece, "tokenizer.model")):
            if source is not None:
                (folder / name).write_bytes(source.read_bytes())
        rest = {
            "vocabulary": asdict(self.vocabulary) if self.vocabulary else None,
            "settings": dict(self.settings),
            "bos_id": self.bos_id,
            "eos_ids": self.eos_ids,
        }
        (folder / "tokenizer_files.json").write_text(json.dumps(rest))

    @classmethod
    def load(cls, folder: Path) -> TokenizerFiles:
        """What `save` wrote. Raises `BadCheckpoint`."""
        rest = read_json(folder / "tokenizer_files.json")
        try:
            vocabulary = rest["vocabulary"]
            if vocabulary:
                lists = {key: tuple(value) for key, value in vocabulary.items() if isinstance(value, list)}
                vocabulary = Vocabulary(**(vocabulary | lists))
            return cls(
                tokenizer_json=_existing(folder / "tokenizer.json"),
                sentencepiece=_existing(folder / "tokenizer.model"),
                vocabulary=vocabulary,
                settings=rest["settings"],
                bos_id=rest["bos_id"],
                eos_ids=tuple(rest["eos_ids"]),
            )
        except (KeyError, TypeError) as error:
            raise BadCheckpoint(f"{folder / 'tokenizer_files.json'} is not what convert writes: {error!r}") from error


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None


class Checkpoint(ABC):
    """A model on disk. Opening reads headers only; each `read` brings in one parameter.

    path: what was opened. tokenizer: None where the checkpoint has none. chat_template: Jinja source, or None.
    """

    path: Path
    config: ModelConfig
    tokenizer: TokenizerFiles | None
    chat_template: str | None

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Canonical parameter names and shapes: those of `parameter_shapes(config)`."""
        return parameter_shapes(self.config)

    @abstractmethod
    def read(self, name: str, dtype: Dtype = "float32") -> np.ndarray:
        """Parameter `name` in its canonical layout, C-contiguous, of `dtype`. Safe to call from several threads.

        Raises `KeyError` for a name that is not in `shapes`, `BadCheckpoint` when the file changed meanwhile.
        """

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """The files that decide what the model computes."""

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of the weight files; the file's own where there is one. Hashed once per file and machine."""
        return digest_files(self.weight_files())
