"""Which format is this?"""

from __future__ import annotations

from pathlib import Path

from zllm_jax.checkpoint.base import Checkpoint, TokenizerFiles
from zllm_jax.checkpoint.gguf_file import open_gguf
from zllm_jax.checkpoint.hf_directory import open_hf_directory
from zllm_jax.checkpoint.jsonfile import read_json
from zllm_jax.checkpoint.orbax_directory import MANIFEST, OrbaxDirectory
from zllm_jax.errors import BadCheckpoint, BadTokenizer, UnknownModel

_TOKENIZER = "tokenizer.json"


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file, a Hugging Face directory, or what `convert` wrote. Headers only: no weight is read.

    Raises `UnknownModel` when there is nothing at `path`, `BadCheckpoint` when it cannot be used: another format, an
    unknown architecture, a truncated file, a tensor that is missing, left over or of the wrong shape.
    """
    if not path.exists():
        raise UnknownModel(f"there is no file or directory {path}")
    if path.name == _TOKENIZER:
        raise BadCheckpoint(f"{path} is a tokenizer without weights: nothing can be computed with it")
    try:
        if path.is_file():
            return open_gguf(path)
        if (path / MANIFEST).is_file():
            return OrbaxDirectory(path)
        if (path / "config.json").is_file():
            return open_hf_directory(path)
    except OSError as error:
        raise BadCheckpoint(f"cannot read {error.filename or path}: {error.strerror or error}") from error
    raise BadCheckpoint(f"{path} is no checkpoint: a directory must have a config.json or a {MANIFEST}")


def open_tokenizer(path: Path) -> TokenizerFiles:
    """The tokenizer of a checkpoint, or a `tokenizer.json` with the `tokenizer_config.json` that stands beside it.

    Raises what `open_checkpoint` raises, and `BadTokenizer` for a checkpoint without one.
    """
    if path.name == _TOKENIZER and path.is_file():
        settings = path.with_name("tokenizer_config.json")
        return TokenizerFiles(tokenizer_json=path, settings=read_json(settings) if settings.is_file() else {})
    files = open_checkpoint(path).tokenizer
    if files is None:
        raise BadTokenizer(f"{path} has no tokenizer")
    return files
