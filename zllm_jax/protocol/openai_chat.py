"""Chat Completions: a request body to a `Call`, a finished or running call to completion and chunk objects.

Nothing is ignored in silence: a parameter either acts, or is one of the hints that cannot change the answer,
or is refused by name. Follows https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from zllm_jax.errors import InvalidRequest, Overloaded, UnknownModel, ZllmError
from zllm_jax.values import (
    MAX_TOP_LOGPROBS,
    Delta,
    Envelope,
    Message,
    Request,
    Sampling,
    Status,
    TokenLogprob,
    Usage,
)

Json = dict[str, Any]
T = TypeVar("T")
D = TypeVar("D")

MAX_STOP = 4
MIN_LOGPROB = -9999.0  # what the protocol sends for a probability of zero: JSON has no -inf

_SAMPLING = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",  # this and the two below are no part of the protocol, but what its servers commonly add
    "min_p",
    "repetition_penalty",
)
_HINTS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_retention"})
_READ = frozenset(
    {"model", "messages", "max_tokens", "max_completion_tokens", "stop", "logit_bias", "logprobs", "top_logprobs"}
    | {"stream", "stream_options", "prompt_cache_key", "ignore_eos", *_SAMPLING}
)
# Parameters without an implementation, each with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}

_ROLES = ("system", "developer", "user", "assistant")
_MESSAGE_FIELDS = frozenset({"role", "content", "name"})
# What a client that sends an earlier answer back may leave in it.
_MESSAGE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"tool_calls": ([],), "annotations": ([],)}

_FINISH_REASON = {Status.COMPLETED: "stop", Status.TRUNCATED: "length", Status.REFUSED: "content_filter"}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request body, understood. `limited`: the client itself set how many tokens may be generated."""

    model: str
    request: Request
    stream: bool = False
    include_usage: bool = False
    limited: bool = False


def parse_request(body: Any, *, default_max_tokens: int, request_id: str | None = None) -> Call:
    """Understand a Chat Completions body. Raises `InvalidRequest` with the parameter's name in `param`."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {_kind(body)}")
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_unsupported(given)
    max_tokens = _max_tokens(given)
    stream = _typed(given, "stream", bool, False)
    sampling = Sampling(
        **{name: given[name] for name in _SAMPLING if name in given},
        logit_bias=_logit_bias(given),
        logprobs=_logprobs(given),
    )
    request = Request(
        messages=_messages(given),
        max_tokens=default_max_tokens if max_tokens is None else max_tokens,
        sampling=sampling,
        stop=_stop(given),
        ignore_eos=_typed(given, "ignore_eos", bool, False),
        conversation=_typed(given, "prompt_cache_key", str, None),
        request_id=request_id,
    )
    return Call(
        model=_required(given, "model", str),
        request=request,
        stream=stream,
        include_usage=_include_usage(given, stream),
        limited=max_tokens is not None,
    )


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in _NEUTRAL:
            _refuse_unless_neutral(name, value, _NEUTRAL[name])
        elif name not in _READ and name not in _HINTS:
            raise InvalidRequest(f"unknown parameter {name!r}", param=name)


def _refuse_unless_neutral(param: str, value: Any, neutral: Sequence[Any]) -> None:
    if value not in neutral:
        allowed = "".join(f", or send {choice!r}" for choice in neutral)
        raise InvalidRequest(
            f"{param} is {reprlib.repr(value)}, which is not supported: leave it out{allowed}", param=param
        )


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    for name in names:
        value = given[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise InvalidRequest(f"{name} is {reprlib.repr(value)}, must be an integer of at least 1", param=name)
    values = {given[name] for name in names}
    if len(values) > 1:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ: send one of them (max_tokens is the older name)",
            param="max_tokens",
        )
    return values.pop() if values else None


def _logit_bias(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    bias: dict[str, float] = _typed(given, "logit_bias", dict, {})
    for token in bias:
        if not (token.isascii() and token.isdigit()):
            raise InvalidRequest(f"logit_bias has the key {token!r}, must be a token id in decimal", param="logit_bias")
    return tuple(sorted((int(token), value) for token, value in bias.items()))


def _logprobs(given: Mapping[str, Any]) -> int | None:
    wanted = _typed(given, "logprobs", bool, False)
    top = given.get("top_logprobs")
    if top is None:
        return 0 if wanted else None
    if not isinstance(top, int) or isinstance(top, bool) or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs is {reprlib.repr(top)}, must be an integer in [0, {MAX_TOP_LOGPROBS}]", param="top_logprobs"
        )
    if not wanted:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return top


def _stop(given: Mapping[str, Any]) -> tuple[str, ...]:
    stop = given.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or len(texts) > MAX_STOP or not all(isinstance(t, str) and t for t in texts):
        raise InvalidRequest(
            f"stop is {reprlib.repr(stop)}, must be a non-empty text or a list of at most {MAX_STOP}", param="stop"
        )
    return tuple(texts)


def _include_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options: Json = _typed(given, "stream_options", dict, {})
    if options and not stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    for name in options:
        # Obfuscation pads chunks against traffic analysis; False, and leaving it out, ask for none.
        if name != "include_usage" and not (name == "include_obfuscation" and not options[name]):
            raise InvalidRequest(f"stream_options.{name} is not supported", param=f"stream_options.{name}")
    return _typed(options, "include_usage", bool, False, prefix="stream_options.")


def _messages(given: Mapping[str, Any]) -> tuple[Message, ...]:
    messages = _required(given, "messages", list)
    if not messages:
        raise InvalidRequest("messages is empty: at least one message is needed", param="messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: Any, param: str) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{param} must be an object, got {_kind(message)}", param=param)
    given = {name: value for name, value in message.items() if value is not None}
    role = given.get("role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{param}.role is {reprlib.repr(role)}, must be one of {', '.join(_ROLES)}", param=f"{param}.role"
        )
    for name, value in given.items():
        if name in _MESSAGE_NEUTRAL:
            _refuse_unless_neutral(f"{param}.{name}", value, _MESSAGE_NEUTRAL[name])
        elif name not in _MESSAGE_FIELDS:
            raise InvalidRequest(f"{param}.{name} is not supported", param=f"{param}.{name}")
    # "developer" is this protocol's newer name of the system role; chat templates know the older one.
    parsed = {"role": "system" if role == "developer" else role, "content": _content(given.get("content"), param)}
    if name := _typed(given, "name", str, None, prefix=f"{param}."):
        parsed["name"] = name
    return parsed


def _content(content: Any, param: str) -> str:
    """The text of a message. Parts are joined as they are, so that a text cut into parts gives the same tokens."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{param}.content must be a text or a list of parts, got {_kind(content)}", param=f"{param}.content"
        )
    return "".join(_part(part, f"{param}.content[{i}]") for i, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = reprlib.repr(part.get("type")) if isinstance(part, dict) else _kind(part)
        raise InvalidRequest(f"{param} is a part of type {kind}, only text is supported", param=f"{param}.type")
    return _required(part, "text", str, prefix=f"{param}.")


def _required(given: Mapping[str, Any], name: str, kind: type[T], *, prefix: str = "") -> T:
    value = _typed(given, name, kind, None, prefix=prefix)
    if value is None:
        raise InvalidRequest(f"{prefix}{name} is missing", param=prefix + name)
    return value


def _typed(given: Mapping[str, Any], name: str, kind: type[T], default: D, *, prefix: str = "") -> T | D:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise InvalidRequest(f"{prefix}{name} must be {_KIND_NAMES[kind]}, got {_kind(value)}", param=prefix + name)
    return value


_KIND_NAMES: Mapping[type, str] = {
    str: "a text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return _KIND_NAMES.get(type(value), type(value).__name__)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One call on its way back: the fields that every object of the answer repeats.

    created: Unix seconds. token_bytes: the bytes of a token id (empty for one that stands for no text).
    """

    call: Call
    completion_id: str
    created: int
    token_bytes: Callable[[int], bytes]

    def completion(self, envelope: Envelope) -> Json:
        """The `chat.completion` object of an envelope for which `failure` is None."""
        message = {"role": "assistant", "content": envelope.text, "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(envelope.logprobs),
            "finish_reason": _FINISH_REASON[envelope.status],
        }
        return self._object("chat.completion", [choice]) | {"usage": usage_object(envelope.usage)}

    def opening(self) -> Json:
        """The first chunk of a stream: who speaks."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The chunks that one delta becomes: its text, and at the end the reason and, if asked for, the usage."""
        if delta.text or (delta.logprobs and self.call.request.sampling.logprobs is not None):
            yield self._chunk({"content": delta.text}, logprobs=self._logprobs(delta.logprobs))
        if delta.envelope is not None:
            yield self._chunk({}, finish_reason=_FINISH_REASON[delta.envelope.status])
            if self.call.include_usage:
                yield self._object("chat.completion.chunk", []) | {"usage": usage_object(delta.envelope.usage)}

    def _chunk(self, delta: Json, *, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = self._object("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self.call.include_usage else chunk

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.call.model,
            "choices": choices,
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json | None:
        if self.call.request.sampling.logprobs is None:
            return None
        content = [
            self._token(entry.token, entry.logprob) | {"top_logprobs": [self._token(*top) for top in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        text = self.token_bytes(token)
        # A token may end inside a character: `token` then shows U+FFFD, and `bytes` says what it is.
        return {
            "token": text.decode("utf-8", errors="replace"),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(text),
        }


def usage_object(usage: Usage) -> Json:
    """Token counts; `prompt_tokens` includes the cached ones, as this protocol defines it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.generated_tokens,
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def model_object(name: str, *, created: int) -> Json:
    """One entry of the model list."""
    return {"id": name, "object": "model", "created": created, "owned_by": "zllm"}


def model_list(names: Sequence[str], *, created: int) -> Json:
    return {"object": "list", "data": [model_object(name, created=created) for name in names]}


def failure(envelope: Envelope) -> Json | None:
    """The error object of an envelope that has no answer to show, else None."""
    if envelope.status in _FINISH_REASON:
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
    return error_body(str(error), kind=kind, code=error.code, param=getattr(error, "param", None))


def error_body(message: str, *, kind: str, code: str, param: str | None = None) -> Json:
    """An error object; `kind` is the protocol's `type`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
