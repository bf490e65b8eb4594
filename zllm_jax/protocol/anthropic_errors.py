"""What went wrong, as Anthropic's Messages says it: https://docs.anthropic.com/en/api/errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zllm_jax.errors import BudgetExceeded, InvalidRequest, Overloaded, UnknownModel, ZllmError
from zllm_jax.protocol.ending import failure_of
from zllm_jax.values import Envelope

Json = dict[str, Any]

_KIND_OF_STATUS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
_PARAMS = {"fence": "output_config.format"}  # what this protocol calls the engine's


def failure(envelope: Envelope) -> Json | None:
    """The error object of an envelope that has no answer to show, else None."""
    if (failed := failure_of(envelope)) is None:
        return None
    message, code = failed
    return error_body(message, kind="timeout_error" if code == "deadline_exceeded" else "api_error")


def error_object(error: Exception) -> Json:
    """The error object of an exception; one that is no `ZllmError` is not described to the client."""
    if not isinstance(error, ZllmError):
        return error_body("internal error", kind="api_error")
    if isinstance(error, BudgetExceeded):  # of the prompt alone: a limit is lowered to what fits
        # Clients look for these first words, and then shorten the conversation by themselves.
        said = f"prompt is too long: {error.prompt_tokens} tokens > {error.budget_tokens - 1} maximum"
        return error_body(f"{said}, which leaves one for the answer", kind="invalid_request_error")
    kind = "api_error"
    if isinstance(error, UnknownModel):
        kind = "not_found_error"
    elif isinstance(error, InvalidRequest):
        kind = "invalid_request_error"
    elif isinstance(error, Overloaded):
        kind = "rate_limit_error"
    param = getattr(error, "param", None)
    param = _PARAMS.get(param or "", param)
    text = str(error)
    return error_body(text if not param or param in text else f"{param}: {text}", kind=kind)


def http_error(status: int, message: str) -> Json:
    """The error object of an HTTP status that no call caused."""
    return error_body(message, kind=_KIND_OF_STATUS.get(status, "invalid_request_error"))


def error_body(message: str, *, kind: str) -> Json:
    """An error object; `kind` is the protocol's `type`."""
    return {"type": "error", "error": {"type": kind, "message": message}}
