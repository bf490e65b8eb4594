"""Messages: a conversation in content blocks to one in OpenAI's shape, in which templates are written.

Blocks keep their order. A text in blocks is the blocks' texts joined as they are, so that it gives the tokens that the
same text gives as a string, and one that Chat Completions was sent in parts. `cache_control` changes nothing: what is
computed is cached wherever it ends.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol.reading import Json, kind, members, required, typed
from zllm_jax.values import VOLATILE_HEADERS, Message

# What stands before the text of a result that `is_error`: templates know no such flag.
ERROR_PREFIX = "Error: "

_ROLES = ("user", "assistant", "system")
_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
    "tool_result": ("text", "tool_reference"),
}
_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"text", "citations"}),
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "tool_use": frozenset({"id", "name", "input", "caller"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
    "tool_reference": frozenset({"tool_name"}),
}
_ORDER = ("reasoning_content", "content", "tool_calls")  # within one message in OpenAI's shape


def history(given: Mapping[str, Any]) -> tuple[Message, ...]:
    """`system` and `messages`, as `Request.messages` has them."""
    messages = required(given, "messages", list)
    if not messages:
        raise InvalidRequest("messages is empty: at least one message is needed", param="messages")
    parsed = [one for i, message in enumerate(messages) for one in _message(message, f"messages[{i}]")]
    system = _text(given.get("system", ""), "system", "system")
    return ({"role": "system", "content": system}, *parsed) if system else tuple(parsed)


def _message(message: Any, param: str) -> Iterator[Message]:
    given = members(message, param)
    role = given.get("role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{param}.role is {reprlib.repr(role)}, must be one of {', '.join(_ROLES)}", param=f"{param}.role"
        )
    for name in given:
        if name not in ("role", "content"):
            raise InvalidRequest(f"{param}.{name} is not supported", param=f"{param}.{name}")
    content, where = given.get("content"), f"{param}.content"
    if role == "system" or isinstance(content, str):
        yield {"role": role, "content": _text(content, where, "system")}
    elif role == "user":
        yield from _user(_blocks(content, where, role), where)
    else:
        yield from _assistant(_blocks(content, where, role), where)


def _user(blocks: Sequence[Json], param: str) -> Iterator[Message]:
    """Results are messages of their own, in front of what the user says."""
    for number, block in enumerate(blocks):
        if block["type"] == "tool_result":
            yield _result(block, f"{param}[{number}]")
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    if texts or not blocks:
        yield {"role": "user", "content": "".join(texts)}


def _result(block: Json, param: str) -> Message:
    call_id = required(block, "tool_use_id", str, prefix=f"{param}.")
    text = _text(block.get("content", ""), f"{param}.content", "tool_result")
    failed = typed(block, "is_error", bool, False, prefix=f"{param}.")
    return {"role": "tool", "tool_call_id": call_id, "content": ERROR_PREFIX + text if failed else text}


def _assistant(blocks: Sequence[Json], param: str) -> Iterator[Message]:
    """One message, or several where the blocks come in another order than within one."""
    message: Json = {}
    reached = 0
    for number, block in enumerate(blocks):
        if block["type"] == "redacted_thinking":  # sealed by another server; nobody here can read it
            continue
        name, value = _piece(block, f"{param}[{number}]")
        if not value:
            continue
        if _ORDER.index(name) < reached:
            yield _closed(message)
            message = {}
        reached = _ORDER.index(name)
        message[name] = message[name] + value if name in message else value
    yield _closed(message)


def _closed(message: Json) -> Message:
    return {"role": "assistant", "content": "", **message}


def _piece(block: Json, param: str) -> tuple[str, Any]:
    """The field of a message that a block is, and its value."""
    if block["type"] == "text":
        return "content", block["text"]
    if block["type"] == "thinking":
        return "reasoning_content", required(block, "thinking", str, prefix=f"{param}.")
    call_id = required(block, "id", str, prefix=f"{param}.")
    name = required(block, "name", str, prefix=f"{param}.")
    arguments = json.dumps(required(block, "input", dict, prefix=f"{param}."), ensure_ascii=False)
    return "tool_calls", [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}]


def _text(content: Any, param: str, where: str) -> str:
    """A text, or the text of blocks of which all are text; `where` says which blocks those may be."""
    if isinstance(content, str):
        return content
    blocks = _blocks(content, param, where)
    return "".join(_said(block, f"{param}[{number}]") for number, block in enumerate(blocks))


def _said(block: Json, param: str) -> str:
    if block["type"] == "tool_reference":  # of a tool that is on offer from the beginning: its name is all there is
        return required(block, "tool_name", str, prefix=f"{param}.") + "\n"
    text: str = block["text"]
    header = text.lower().startswith(tuple(f"{name}:" for name in VOLATILE_HEADERS))
    # A header is a line; what the next block says must not become part of it.
    return text + "\n" if header and not text.endswith("\n") else text


def _blocks(content: Any, param: str, where: str) -> list[Json]:
    """Blocks of the types that may stand there, each without what is null; texts are texts."""
    if not isinstance(content, list):
        raise InvalidRequest(f"{param} must be a text or a list of blocks, got {kind(content)}", param=param)
    return [_block(block, f"{param}[{number}]", where) for number, block in enumerate(content)]


def _block(block: Any, param: str, where: str) -> Json:
    given = members(block, param)
    known = _BLOCKS[where]
    if given.get("type") not in known:
        raise InvalidRequest(
            f"{param} is a block of type {reprlib.repr(given.get('type'))}, what can be there is {', '.join(known)}",
            param=param,
        )
    for name in given:
        if name not in _FIELDS[given["type"]] and name not in ("type", "cache_control"):
            raise InvalidRequest(f"{param}.{name} is not supported", param=f"{param}.{name}")
    if given["type"] == "text":
        required(given, "text", str, prefix=f"{param}.")
    return given
