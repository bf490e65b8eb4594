"""What went wrong, as OpenAI's protocols say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zllm_jax.errors import InvalidRequest, Overloaded, UnknownModel, ZllmError
from zllm_jax.protocol.ending import failure_of
from zllm_jax.values import Envelope

Json = dict[str, Any]

_CODE_OF_STATUS: Mapping[int, str] = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
}


def failure(envelope: Envelope) -> Json | None:
    """The error object of an envelope that has no answer to show, else None."""
    if (failed := failure_of(envelope)) is None:
        return None
    message, code = failed
    return error_body(message, kind="server_error", code=code)


def error_object(error: Exception, params: Mapping[str, str] | None = None) -> Json:
    """The error object of an exception; one that is no `ZllmError` is not described to the client.

    params: what the endpoint calls the engine's parameters, where it has other names for them.
    """
    if not isinstance(error, ZllmError):
        return error_body("internal error", kind="server_error", code="internal_error")
    kind = "server_error"
    if isinstance(error, InvalidRequest | UnknownModel):
        kind = "invalid_request_error"
    elif isinstance(error, Overloaded):
        kind = "rate_limit_error"
    param = getattr(error, "param", None)
    return error_body(str(error), kind=kind, code=error.code, param=(params or {}).get(param or "", param))


def http_error(status: int, message: str) -> Json:
    """The error object of an HTTP status that no call caused."""
    code = _CODE_OF_STATUS.get(status, "invalid_request")
    return error_body(message, kind="invalid_request_error", code=code)


def error_body(message: str, *, kind: str, code: str, param: str | None = None) -> Json:
    """An error object; `kind` is the protocol's `type`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
