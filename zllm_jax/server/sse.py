"""Server-sent events as a response that stops with its client."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from zllm_jax.server.disconnect import ClientGone, until_disconnect


def event(data: Mapping[str, Any] | str) -> bytes:
    """One event of the stream: JSON, or a bare word such as `[DONE]`."""
    text = data if isinstance(data, str) else encode_json(data).decode()
    return f"data: {text}\n\n".encode()


def named_event(data: Mapping[str, Any]) -> bytes:
    """One event that carries its `type` as its name, too."""
    return f"event: {data['type']}\n".encode() + event(data)


def encode_json(value: Any) -> bytes:
    """JSON as this server writes it everywhere: UTF-8, no spaces, no NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class EventStream(Response):
    """Sends `events` as they come; on disconnect the generator is cancelled and closed within its current step.

    A slow reader is waited for: `send` returns once the transport has room, so at most one event is held here.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send(send))
        except ClientGone:
            return

    async def _send(self, send: Send) -> None:
        async with aclosing(self.events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
