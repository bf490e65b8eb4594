"""A client that goes away stops its call within one step, streamed or not."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from zllm_jax.server.disconnect import ClientGone, until_disconnect
from zllm_jax.testing import ScriptedEngine
from zllm_jax.values import Status

STEP_S = 0.05


def connect(address: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and leave the connection open."""
    raw = json.dumps(body).encode()
    url = urlsplit(address)
    client = socket.create_connection((url.hostname, url.port), timeout=10)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-length: {len(raw)}\r\n\r\n"
    client.sendall(head.encode() + raw)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels(address: str, engine: ScriptedEngine, stream: bool) -> None:
    engine.step_s = STEP_S
    engine.say("x" * 400)
    client = connect(address, {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "stream": stream})
    if stream:
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
    else:
        while not engine.requests:
            time.sleep(0.01)
    client.close()
    gone = time.monotonic()
    (envelope,) = engine.wait_ended(1)
    # Half a second is a lazy machine's allowance; going on to the end would take 20 s.
    assert time.monotonic() - gone < STEP_S + 0.5
    assert envelope.status is Status.CANCELED
    assert len(envelope.tokens) < 100


def test_the_next_call_is_served_after_a_disconnect(address: str, engine: ScriptedEngine) -> None:
    engine.step_s = STEP_S
    engine.say("x" * 400)
    engine.say("ok")
    body = {"model": "scripted", "messages": [{"role": "user", "content": "?"}], "stream": True}
    client = connect(address, body)
    client.recv(10)
    client.close()
    engine.wait_ended(1)
    with connect(address, body | {"stream": False}) as again:
        assert b'"content":"ok"' in again.recv(1 << 16)
    assert [envelope.status for envelope in engine.envelopes] == [Status.CANCELED, Status.COMPLETED]


def test_work_is_cancelled_and_awaited() -> None:
    async def scenario() -> list[str]:
        log: list[str] = []
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            gone.set()
            try:
                await asyncio.sleep(30)
            finally:
                await asyncio.sleep(0)  # cleaning up may itself take a step
                log.append("cleaned")

        with pytest.raises(ClientGone):
            await until_disconnect(receive, work())  # type: ignore[arg-type]
        return log

    assert asyncio.run(scenario()) == ["cleaned"]


def test_a_result_survives_and_its_error_too() -> None:
    async def scenario() -> int:
        async def receive() -> dict[str, Any]:
            await asyncio.sleep(30)
            raise AssertionError("the watcher must be cancelled")

        async def work() -> int:
            return 7

        async def fail() -> int:
            raise KeyError("work")

        with pytest.raises(KeyError, match="work"):
            await until_disconnect(receive, fail())  # type: ignore[arg-type]
        return await until_disconnect(receive, work())  # type: ignore[arg-type]

    assert asyncio.run(scenario()) == 7
