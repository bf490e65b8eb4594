"""Exceptions and failed envelopes as HTTP answers, in the error shape of the protocol that was spoken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from zllm_jax.errors import InvalidRequest, Overloaded, UnknownModel, ZllmError
from zllm_jax.protocol import anthropic_errors, openai_errors
from zllm_jax.server.disconnect import ClientGone
from zllm_jax.server.sse import encode_json
from zllm_jax.values import Envelope, Status

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1

_STATUS_OF_ERROR: tuple[tuple[type[ZllmError], int], ...] = (
    (Overloaded, 429),
    (UnknownModel, 404),
    (InvalidRequest, 400),
    (ZllmError, 500),
)
_STATUS_OF_ENVELOPE: Mapping[Status, int] = {
    Status.TRANSPORT_FAILURE: 504,
    Status.CANCELED: 503,
    Status.REJECTED: 500,
    Status.FAULTED: 500,
}
# By the beginning of the path: what an endpoint calls the engine's parameters.
_PARAMS: Mapping[str, Mapping[str, str]] = {
    "/v1/chat/completions": {"fence": "response_format"},
    "/v1/responses": {"fence": "text.format", "messages": "input"},
}


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(content), status, headers=headers, media_type="application/json")


def failed_response(envelope: Envelope, failure: Callable[[Envelope], Any]) -> Response | None:
    """The HTTP error of an envelope that has no answer to show, as the protocol's `failure` says it; else None."""
    body = failure(envelope)
    return None if body is None else json_response(body, _STATUS_OF_ENVELOPE[envelope.status])


async def on_zllm_error(request: HttpRequest, error: Exception) -> Response:
    status = next(status for kind, status in _STATUS_OF_ERROR if isinstance(error, kind))
    if status >= 500:
        log.error("request failed: %s", error)
    headers = {"retry-after": str(RETRY_AFTER_S)} if isinstance(error, Overloaded) else None
    return json_response(error_object(request.url.path, error), status, headers)


async def on_http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    spoken = anthropic_errors if _speaks_messages(request.url.path) else openai_errors
    return json_response(spoken.http_error(error.status_code, error.detail), error.status_code, error.headers)


async def on_client_gone(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the access log shows it


async def on_unexpected(request: HttpRequest, error: Exception) -> Response:
    return json_response(error_object(request.url.path, error), 500)


def error_object(path: str, error: Exception) -> Any:
    """An exception in the shape of the protocol that is spoken at a path."""
    if _speaks_messages(path):
        return anthropic_errors.error_object(error)
    params = next((names for start, names in _PARAMS.items() if path.startswith(start)), None)
    return openai_errors.error_object(error, params)


def _speaks_messages(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


HANDLERS: Mapping[Any, Any] = {
    ZllmError: on_zllm_error,
    HTTPException: on_http_error,
    ClientGone: on_client_gone,
    Exception: on_unexpected,
}
