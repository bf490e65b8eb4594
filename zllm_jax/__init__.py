"""zllm_jax: a research LLM-inference stack in Python and JAX.

Importing this package touches neither jax nor a device: names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zllm_jax.config import ContextExtension, EngineConfig, ModelConfig
from zllm_jax.errors import ZllmError
from zllm_jax.values import (
    CallDelta,
    Delta,
    Envelope,
    Fence,
    NamedTool,
    Request,
    Sampling,
    Status,
    Tier,
    ToolCall,
    Usage,
    release,
)

if TYPE_CHECKING:
    from zllm_jax.wiring import Engine

__version__ = "0.1.0"

__all__ = [
    "CallDelta",
    "ContextExtension",
    "Delta",
    "Engine",
    "EngineConfig",
    "Envelope",
    "Fence",
    "ModelConfig",
    "NamedTool",
    "Request",
    "Sampling",
    "Status",
    "Tier",
    "ToolCall",
    "Usage",
    "ZllmError",
    "__version__",
    "release",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from zllm_jax.wiring import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
