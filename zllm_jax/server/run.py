"""Running the application with uvicorn, on loopback unless a key protects it."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import uvicorn

from zllm_jax.errors import ConfigError
from zllm_jax.server.app import create_app
from zllm_jax.server.body import Limits
from zllm_jax.server.calls import DEFAULT_MAX_TOKENS
from zllm_jax.server.engine import Engine

DRAIN_TIMEOUT_S = 10


def serve(
    engine: Engine,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
    history: Path | None = None,
    log_level: str = "info",
    own_logs: bool = True,
) -> None:
    """Serve `engine` until interrupted. Raises `ConfigError` for an address beyond this machine without `api_key`.

    history: see `create_app`. own_logs: False sends the server's log lines to the handlers that the process has.
    """
    if api_key is None and not is_loopback(host):
        raise ConfigError(f"host {host!r} is reachable from outside: set an API key, or serve on 127.0.0.1")
    app = create_app(engine, api_key=api_key, limits=limits, default_max_tokens=default_max_tokens, history=history)
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level=log_level,
        log_config=uvicorn.config.LOGGING_CONFIG if own_logs else None,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost is taken as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
