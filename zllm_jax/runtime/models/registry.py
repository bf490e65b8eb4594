"""Which module stands for which architecture."""

from __future__ import annotations

from types import ModuleType

from zllm_jax.config import ModelConfig
from zllm_jax.errors import BadCheckpoint
from zllm_jax.runtime.models import gemma3, llama

_ARCHITECTURES: dict[str, ModuleType] = {"llama": llama, "gemma3": gemma3}


def architecture(cfg: ModelConfig) -> ModuleType:
    """The module of an architecture. Raises `BadCheckpoint` for an unknown one."""
    try:
        return _ARCHITECTURES[cfg.arch]
    except KeyError:
        raise BadCheckpoint(f"architecture {cfg.arch!r} is unknown; known: {sorted(_ARCHITECTURES)}") from None
