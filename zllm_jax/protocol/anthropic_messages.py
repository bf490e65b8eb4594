"""Messages: a request body to a `Call`.

Nothing is ignored in silence: a parameter either acts, or is one of the hints that cannot change the answer, or asks
for what only the protocol's home can do and its clients send everywhere, or is refused by name. Follows
https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol.anthropic_messages_history import history
from zllm_jax.protocol.anthropic_messages_tools import output_format, parallel, tool_choice, tools
from zllm_jax.protocol.call import Call
from zllm_jax.protocol.reading import Json, members, refuse_unsupported, required, typed
from zllm_jax.values import Request, Sampling

MAX_STOP_SEQUENCES = 64
Thinking = Literal["shown", "omitted", "hidden"]

_SAMPLING = ("temperature", "top_p", "top_k", "seed")  # seed is no part of the protocol, but repeats a call
_READ = frozenset(
    {"model", "messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice", "thinking"}
    | {"output_config", *_SAMPLING}
)
# What cannot change an answer here: whose call it is, how fast or where it may run, what is to be cached (everything
# is), which betas are on, and which old blocks a server may clear from a long history (none are).
_HINTS = frozenset(
    {"metadata", "service_tier", "speed", "inference_geo", "cache_control", "betas", "context_management"}
    | {"diagnostics"}
)
# Parameters without an implementation, each with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "fallbacks": ([],),
    "compaction": (),
    "thread": (),
    "billing_policy": (),
}
_THINKING = ("enabled", "adaptive", "disabled", "between_tools")
_DISPLAYS = ("summarized", "omitted")


@dataclass(frozen=True, kw_only=True)
class MessagesCall(Call):
    """A Messages body, understood. It is never `limited`: clients ask for more than a context may leave.

    thinking: whether the answer shows reasoning, only says that there was some, or leaves it out.
    prewarm: only the prompt is computed and kept (`max_tokens: 0`); the one token that the engine draws is dropped.
    """

    thinking: Thinking = "shown"
    prewarm: bool = False


def parse_request(body: Any, *, request_id: str | None = None) -> MessagesCall:
    """Understand a Messages body. Raises `InvalidRequest` with the parameter's name in `param`."""
    call = _parse(members(body, ""), request_id)
    *_, last = call.request.messages or ()
    if last["role"] == "assistant":
        raise InvalidRequest(
            "messages ends with an assistant message: an answer cannot continue one here; end with a user message",
            param="messages",
        )
    return call


def parse_prompt(body: Any) -> MessagesCall:
    """Understand the body of a count: one of Messages that needs no limit. Raises what `parse_request` does."""
    return _parse(members(body, "") | {"max_tokens": 0}, None)


def count_object(tokens: int) -> Json:
    """The answer to a count."""
    return {"input_tokens": tokens}


def _parse(given: Json, request_id: str | None) -> MessagesCall:
    refuse_unsupported(given, known=_READ | _HINTS, neutral=_NEUTRAL)
    model = required(given, "model", str)
    max_tokens = _max_tokens(given)
    request = Request(
        messages=history(given),
        max_tokens=max(max_tokens, 1),
        sampling=Sampling(**{name: given[name] for name in _SAMPLING if name in given}),
        stop=_stop_sequences(given),
        tools=tools(given),
        tool_choice=tool_choice(given),
        parallel_tool_calls=parallel(given),
        fence=output_format(given),
        request_id=request_id,
    )
    return MessagesCall(
        model=model,
        request=request,
        stream=typed(given, "stream", bool, False),
        thinking=_thinking(given),
        prewarm=max_tokens == 0,
    )


def _max_tokens(given: Mapping[str, Any]) -> int:
    value = required(given, "max_tokens", int)
    if isinstance(value, bool) or not 0 <= value < 2**31:
        raise InvalidRequest(
            f"max_tokens is {reprlib.repr(value)}, must be a positive integer, or 0 to compute the prompt only",
            param="max_tokens",
        )
    return value


def _stop_sequences(given: Mapping[str, Any]) -> tuple[str, ...]:
    texts: list[Any] = typed(given, "stop_sequences", list, [])
    if len(texts) > MAX_STOP_SEQUENCES or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest(
            f"stop_sequences is {reprlib.repr(texts)}, must be a list of at most {MAX_STOP_SEQUENCES} non-empty texts",
            param="stop_sequences",
        )
    return tuple(texts)


def _thinking(given: Mapping[str, Any]) -> Thinking:
    """Whether a model thinks is a matter of the model; how much, too: budgets are hints."""
    config = members(given.get("thinking", {"type": "adaptive"}), "thinking")
    for name, value, known in (
        ("type", config.get("type"), _THINKING),
        ("display", config.get("display", "summarized"), _DISPLAYS),
    ):
        if value not in known:
            raise InvalidRequest(
                f"thinking.{name} is {reprlib.repr(value)}, must be one of {', '.join(known)}", param=f"thinking.{name}"
            )
    for name in config:
        if name not in ("type", "display", "budget_tokens"):
            raise InvalidRequest(f"thinking.{name} is not supported", param=f"thinking.{name}")
    if config["type"] == "disabled":
        return "hidden"
    return "omitted" if config.get("display") == "omitted" else "shown"
