"""The testing room: a tokenizer without files, tiny model shapes, an engine and a device that do as they are told."""

from zllm_jax.testing.backend import ScriptedBackend, chained_token
from zllm_jax.testing.engine import ScriptedEngine
from zllm_jax.testing.models import ByteTokenizer, tiny_config
from zllm_jax.testing.script import Script

__all__ = ["ByteTokenizer", "Script", "ScriptedBackend", "ScriptedEngine", "chained_token", "tiny_config"]
