"""A real uvicorn on a free loopback port, run in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import openai
import pytest
import uvicorn
from starlette.types import ASGIApp

from zllm_jax.server import create_app
from zllm_jax.testing import ScriptedEngine


@contextlib.contextmanager
def running(app: ASGIApp) -> Iterator[str]:
    """Run `app` while the context lasts; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server did not start within 20 s"
            time.sleep(0.01)
        host, port = listener.getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(step_s=0.001)


@pytest.fixture
def address(engine: ScriptedEngine) -> Iterator[str]:
    """Where `engine` is served."""
    with running(create_app(engine)) as url:
        yield url


@contextlib.contextmanager
def official(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, which refuses what its protocol does not have."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as client:
        yield client


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with official(address) as made:
        yield made


@pytest.fixture
def run_app() -> Callable[[ASGIApp], contextlib.AbstractContextManager[str]]:
    """For a test that builds its own application."""
    return running
