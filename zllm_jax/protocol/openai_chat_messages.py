"""Chat Completions: the messages of a conversation."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol.openai_chat_tools import calls
from zllm_jax.protocol.reading import Json, kind, members, only, refuse_unless_neutral, required, typed
from zllm_jax.values import Message

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(_ROLES, frozenset({"role", "content", "name"})),
    "assistant": frozenset({"role", "content", "name", "tool_calls", "reasoning_content", "refusal"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}
# What a client that sends an earlier answer back may leave in it.
_MESSAGE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"annotations": ([],)}
# Where a cache might cut: this one finds that by itself.
_CACHE_HINTS = ("prompt_cache_breakpoint", "cache_control")


def messages(given: Mapping[str, Any]) -> tuple[Message, ...]:
    """The conversation, as chat templates know it."""
    several = required(given, "messages", list)
    if not several:
        raise InvalidRequest("messages is empty: at least one message is needed", param="messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(several))


def _message(message: Any, param: str) -> Message:
    given = members(message, param)
    role = given.get("role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{param}.role is {reprlib.repr(role)}, must be one of {', '.join(_ROLES)}", param=f"{param}.role"
        )
    for name, value in given.items():
        if name in _MESSAGE_NEUTRAL:
            refuse_unless_neutral(f"{param}.{name}", value, _MESSAGE_NEUTRAL[name])
    only(given, _MESSAGE_FIELDS[role] | _MESSAGE_NEUTRAL.keys(), param)
    made, refusal = calls(given, param), typed(given, "refusal", str, "", prefix=f"{param}.")
    content = given.get("content", "" if made or refusal else None)  # who only calls or refuses says nothing else
    # "developer" is this protocol's newer name of the system role; chat templates know the older one.
    parsed: Json = {"role": "system" if role == "developer" else role, "content": _content(content, param, role)}
    parsed["content"] += refusal
    for name in ("name", "reasoning_content"):
        if text := typed(given, name, str, None, prefix=f"{param}."):
            parsed[name] = text
    if role == "tool":
        parsed["tool_call_id"] = required(given, "tool_call_id", str, prefix=f"{param}.")
    return {**parsed, "tool_calls": made} if made else parsed


def _content(content: Any, param: str, role: str) -> str:
    """The text of a message. Parts are joined as they are, so that a text cut into parts gives the same tokens."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{param}.content must be a text or a list of parts, got {kind(content)}", param=f"{param}.content"
        )
    return "".join(_part(part, f"{param}.content[{i}]", role) for i, part in enumerate(content))


def _part(part: Any, param: str, role: str) -> str:
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    found: Any = part.get("type") if isinstance(part, dict) else None
    if found not in kinds:
        what = reprlib.repr(found) if isinstance(part, dict) else kind(part)
        raise InvalidRequest(f"{param} is a part of type {what}, only text is supported", param=f"{param}.type")
    given = members(part, param)
    only(given, {"type", found, *_CACHE_HINTS}, param)
    return required(given, found, str, prefix=f"{param}.")
