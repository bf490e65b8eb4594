"""What went wrong, as OpenAI's protocols say it."""

from __future__ import annotations

from typing import Any

from zllm_jax.errors import InvalidRequest, Overloaded, UnknownModel, ZllmError
from zllm_jax.values import Envelope, Status

Json = dict[str, Any]
ANSWERS = frozenset({Status.COMPLETED, Status.TRUNCATED, Status.REFUSED})

_PARAMS = {"fence": "response_format"}  # what this protocol calls the engine's


def failure(envelope: Envelope) -> Json | None:
    """The error object of an envelope that has no answer to show, else None."""
    if envelope.status in ANSWERS:
        return None
    why = f": {envelope.error}" if envelope.error else ""
    code = "deadline_exceeded" if envelope.telemetry.deadline_exceeded else envelope.status.value.lower()
    return error_body(f"the call ended as {envelope.status.value}{why}", kind="server_error", code=code)


def error_object(error: Exception) -> Json:
    """The error object of an exception; one that is no `ZllmError` is not described to the client."""
    if not isinstance(error, ZllmError):
        return error_body("internal error", kind="server_error", code="internal_error")
    kind = "server_error"
    if isinstance(error, InvalidRequest | UnknownModel):
        kind = "invalid_request_error"
    elif isinstance(error, Overloaded):
        kind = "rate_limit_error"
    param = getattr(error, "param", None)
    return error_body(str(error), kind=kind, code=error.code, param=_PARAMS.get(param or "", param))


def error_body(message: str, *, kind: str, code: str, param: str | None = None) -> Json:
    """An error object; `kind` is the protocol's `type`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
