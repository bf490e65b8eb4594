"""Exceptions and failed envelopes as HTTP answers, in the error shape of the protocol that was spoken."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from zllm_jax.errors import InvalidRequest, Overloaded, UnknownModel, ZllmError
from zllm_jax.protocol import openai_errors
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
_CODE_OF_STATUS: Mapping[int, str] = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
}


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(content), status, headers=headers, media_type="application/json")


def failed_response(envelope: Envelope) -> Response | None:
    """The HTTP error of an envelope that has no answer to show, else None."""
    body = openai_errors.failure(envelope)
    return None if body is None else json_response(body, _STATUS_OF_ENVELOPE[envelope.status])


async def on_zllm_error(_: HttpRequest, error: Exception) -> Response:
    status = next(status for kind, status in _STATUS_OF_ERROR if isinstance(error, kind))
    if status >= 500:
        log.error("request failed: %s", error)
    headers = {"retry-after": str(RETRY_AFTER_S)} if isinstance(error, Overloaded) else None
    return json_response(openai_errors.error_object(error), status, headers)


async def on_http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _CODE_OF_STATUS.get(error.status_code, "invalid_request")
    body = openai_errors.error_body(error.detail, kind="invalid_request_error", code=code)
    return json_response(body, error.status_code, error.headers)


async def on_client_gone(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the access log shows it


async def on_unexpected(_: HttpRequest, error: Exception) -> Response:
    return json_response(openai_errors.error_object(error), 500)


HANDLERS: Mapping[Any, Any] = {
    ZllmError: on_zllm_error,
    HTTPException: on_http_error,
    ClientGone: on_client_gone,
    Exception: on_unexpected,
}
