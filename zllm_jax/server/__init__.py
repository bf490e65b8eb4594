"""HTTP over Starlette: the only room that knows sockets, status codes and server-sent events.

Knows the protocols' functions and an `Engine` by its interface. Must not know where state lives or how a prompt
is rendered.
"""

from zllm_jax.server.app import create_app
from zllm_jax.server.body import Limits
from zllm_jax.server.engine import Engine
from zllm_jax.server.run import serve

__all__ = ["Engine", "Limits", "create_app", "serve"]
