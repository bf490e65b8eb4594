"""What a server on the open net is sent: each answered with the protocol's own 4xx, none with a 5xx, none forgotten."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from zllm_jax.errors import ConfigError
from zllm_jax.server import Limits, create_app, serve
from zllm_jax.server.run import is_loopback
from zllm_jax.testing import ScriptedEngine

LIMITS = Limits(body_bytes=4096, json_depth=8, body_timeout_s=0.2)
CHAT = "/v1/chat/completions"


def in_process(use: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]], **app: Any) -> httpx.Response:
    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(ScriptedEngine(), **{"limits": LIMITS} | app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await use(client)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "not valid JSON"),
        (b"{", 400, "not valid JSON"),
        (b"\xff\xfe", 400, "not valid JSON"),
        (b'{"temperature": NaN}', 400, "NaN"),
        (b'{"seed": ' + b"9" * 4000 + b"}", 400, ""),
        (b"[]", 400, "must be a JSON object, got a list"),
        (b"null", 400, "must be a JSON object, got null"),
        (b'{"model": "scripted", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "surrogate"),
        (b'{"\\udfff": 1}', 400, "surrogate"),
        (b"[" * 9 + b"]" * 9, 400, "deeper than 8"),
        (b"[" * 4000, 400, "the body"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, 400, "deeper than 8"),
        (b" " * 4097, 413, "larger than 4096 bytes"),
    ],
    ids=lambda value: repr(value)[:24] if isinstance(value, bytes) else None,
)
def test_bodies(body: bytes, status: int, says: str) -> None:
    response = in_process(lambda client: client.post(CHAT, content=body))
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


def test_nesting_at_the_limit_is_read() -> None:
    # Eight lists: the body is refused for what it is, not for its depth.
    response = in_process(lambda client: client.post(CHAT, content=b"[" * 8 + b"]" * 8))
    assert "must be a JSON object" in response.json()["error"]["message"]


def test_deep_bodies_do_not_exhaust_the_stack() -> None:
    body = b"[" * 200_000 + b"]" * 200_000
    response = in_process(lambda client: client.post(CHAT, content=body), limits=Limits())
    assert response.status_code == 400
    assert "deeper than 64" in response.json()["error"]["message"]


def test_a_body_of_undeclared_size_is_cut_off() -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 1000

    assert in_process(lambda client: client.post(CHAT, content=endless())).status_code == 413


@pytest.mark.parametrize(("method", "path", "status"), [("GET", CHAT, 405), ("GET", "/v1/nothing", 404)])
def test_routes_that_do_not_exist(method: str, path: str, status: int) -> None:
    response = in_process(lambda client: client.request(method, path))
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_fault_of_ours_is_a_500_that_tells_nothing(run_app: Any) -> None:
    engine = ScriptedEngine()  # with no script it raises RuntimeError
    with run_app(create_app(engine)) as url:
        response = httpx.post(url + CHAT, json={"model": "scripted", "messages": [{"role": "user", "content": "?"}]})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"


def test_stalled_and_broken_connections_do_not_harm_the_others(run_app: Any) -> None:
    engine = ScriptedEngine()
    engine.say("fine")
    with run_app(create_app(engine, limits=LIMITS)) as url:
        where = urlsplit(url)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {where.netloc}\r\n".encode()
        beginnings = [b"", b"\x16\x03\x01\x02", head, head + b"content-length: 50\r\n\r\n{", b"GET / HTTP/9\r\n\r\n"]
        clients = [socket.create_connection((where.hostname, where.port), timeout=10) for _ in range(30)]
        for i, client in enumerate(clients):
            client.sendall(beginnings[i % len(beginnings)])
        body = {"model": "scripted", "messages": [{"role": "user", "content": "?"}]}
        assert httpx.post(url + CHAT, json=body).json()["choices"][0]["message"]["content"] == "fine"
        stalled = clients[3]
        assert stalled.recv(64).startswith(b"HTTP/1.1 408")
        for client in clients:
            client.close()


def test_probes_and_cache() -> None:
    assert in_process(lambda client: client.get("/health")).json() == {"status": "ok"}
    assert in_process(lambda client: client.get("/ready")).status_code == 200
    assert in_process(lambda client: client.get("/v1/cache")).json()["model"] == "scripted"


def test_not_ready_is_503() -> None:
    async def ask() -> int:
        app = create_app(ScriptedEngine(ready=False))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return (await client.get("/ready")).status_code

    assert asyncio.run(ask()) == 503


@pytest.mark.parametrize("path", ["/v1/models", "/v1/cache", "/metrics", CHAT, "/nothing"])
@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "Basic key", "key", "Bearer k\xe9y"])
def test_every_path_but_the_probes_needs_the_key(path: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    response = in_process(lambda client: client.get(path, headers=headers), api_key="key")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_the_key_opens() -> None:
    for scheme in ("Bearer", "bearer"):
        headers = {"authorization": f"{scheme} key"}
        assert in_process(lambda c, h=headers: c.get("/v1/models", headers=h), api_key="key").status_code == 200
    assert in_process(lambda client: client.get("/health"), api_key="key").status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_no_public_address_without_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        serve(ScriptedEngine(), host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        create_app(ScriptedEngine(), api_key=" ")
