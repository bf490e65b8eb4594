"""Which format is this?"""

from __future__ import annotations

from pathlib import Path

from zllm_jax.checkpoint.base import Checkpoint
from zllm_jax.checkpoint.gguf_file import open_gguf
from zllm_jax.checkpoint.hf_directory import open_hf_directory
from zllm_jax.checkpoint.orbax_directory import MANIFEST, OrbaxDirectory
from zllm_jax.errors import BadCheckpoint, UnknownModel


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file, a Hugging Face directory, or what `convert` wrote. Headers only: no weight is read.

    Raises `UnknownModel` when there is nothing at `path`, `BadCheckpoint` when it cannot be used: another format, an
    unknown architecture, a truncated file, a tensor that is missing, left over or of the wrong shape.
    """
    if not path.exists():
        raise UnknownModel(f"there is no file or directory {path}")
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
