"""One API key, compared in constant time and kept only as its digest."""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from zllm_jax.server.errors import on_http_error

OPEN_PATHS = frozenset({"/health", "/ready"})


class RequireKey:
    """ASGI middleware: every path but the probes needs `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self.app = app
        self.digest = _digest(api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allowed(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        error = HTTPException(401, "a valid key is needed: Authorization: Bearer KEY", {"www-authenticate": "Bearer"})
        response = await on_http_error(HttpRequest(scope), error)
        await response(scope, receive, send)

    def _allowed(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(_digest(key.strip()), self.digest) and scheme.lower() == "bearer"


def tenant_of(scope: Scope) -> str:
    """Whose request it is: empty where no key was asked for."""
    tenant: str = scope.get("state", {}).get("tenant", "")
    return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
