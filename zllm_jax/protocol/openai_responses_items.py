"""Items of the Responses protocol: what a client may send of a conversation, and the messages that they come to."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol.reading import Json, kind, members, required, typed

_ROLES: Mapping[str, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS: Mapping[str, str] = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_PREFIX: Mapping[str, str] = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def input_items(given: Mapping[str, Any], new_id: Callable[[], str]) -> tuple[Json, ...]:
    """The body's `input` as items, checked, each with its type and an id. A text is a user's message."""
    value = given.get("input", [])
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise InvalidRequest(f"input must be a text or a list of items, got {kind(value)}", param="input")
    return tuple(_item(one, f"input[{i}]", new_id) for i, one in enumerate(value))


def _item(value: Any, param: str, new_id: Callable[[], str]) -> Json:
    given = members(value, param)
    of = given.get("type", "message" if "role" in given else None)
    if not isinstance(of, str):
        raise InvalidRequest(f"{param}.type is missing: an item is a message, a function_call, ...", param=param)
    item = {**given, "type": of, "id": given.get("id") or f"{_PREFIX.get(of, 'item')}_{new_id()}"}
    if of == "message":
        _check_message(item, param)
    elif of == "function_call":
        for name in ("call_id", "name", "arguments"):
            required(item, name, str, prefix=f"{param}.")
    elif of == "function_call_output":
        required(item, "call_id", str, prefix=f"{param}.")
        _text(item.get("output"), f"{param}.output")
    elif of == "reasoning":
        _reasoning(item, param)
    elif of == "item_reference":
        raise InvalidRequest(
            f"{param} is an item_reference: send the item itself, or previous_response_id", param=f"{param}.type"
        )
    return item


def _check_message(item: Json, param: str) -> None:
    if item.get("role") not in _ROLES:
        raise InvalidRequest(
            f"{param}.role is {reprlib.repr(item.get('role'))}, must be one of {', '.join(_ROLES)}",
            param=f"{param}.role",
        )
    _text(item.get("content"), f"{param}.content")


def _text(content: Any, param: str) -> str:
    """Parts are joined as they are, so that a text cut into parts gives the same tokens."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{param} must be a text or a list of parts, got {kind(content)}", param=param)
    return "".join(_part(part, f"{param}[{i}]") for i, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    given = members(part, param)
    member = _TEXTS.get(str(given.get("type")))
    if member is None:
        raise InvalidRequest(
            f"{param} is a part of type {reprlib.repr(given.get('type'))}, only text is supported",
            param=f"{param}.type",
        )
    return required(given, member, str, prefix=f"{param}.")


def _reasoning(item: Json, param: str) -> str:
    """The reasoning as the model wrote it; a summary is not that, and neither is what another server encrypted."""
    several: list[Any] = typed(item, "content", list, [], prefix=f"{param}.")
    parts = [members(part, f"{param}.content[{i}]") for i, part in enumerate(several)]
    return "".join(required(part, "text", str, prefix=f"{param}.content.") for part in parts)


def listed(item: Json) -> Json:
    """An input item as the protocol lists it: with its status, and its text in a part."""
    shown = {"status": "completed", **item}
    if isinstance(item.get("content"), str) and item["type"] == "message":
        said = {"type": "input_text", "text": item["content"]}
        if item["role"] == "assistant":
            said = {"type": "output_text", "text": item["content"], "annotations": []}
        shown["content"] = [said]
    return shown


def messages_of(items: Iterable[Json]) -> list[Json]:
    """The messages that checked items come to.

    What an assistant thought, said and called follows one another in one turn of a model: as long as the items do too,
    they are one message, and otherwise the next begins, so that their order is kept. Items of other kinds, which stand
    for tools that a server runs by itself, are left out.
    """
    messages: list[Json] = []
    stage = _DONE
    for item in items:
        of = item["type"]
        if of == "message" and item["role"] != "assistant":
            messages.append({"role": _ROLES[item["role"]], "content": _text(item["content"], "content")})
            stage = _DONE
        elif of == "function_call_output":
            text = _text(item["output"], "output")
            messages.append({"role": "tool", "content": text, "tool_call_id": item["call_id"]})
            stage = _DONE
        elif of in _STAGES:
            if of == "reasoning" and not _reasoning(item, ""):
                continue
            if stage >= _STAGES[of] and not (stage == _STAGES[of] == _CALLED):
                messages.append({"role": "assistant", "content": ""})
            stage = _STAGES[of]
            _add(messages[-1], item)
    return messages


_THOUGHT, _SAID, _CALLED, _DONE = range(4)
_STAGES: Mapping[str, int] = {"reasoning": _THOUGHT, "message": _SAID, "function_call": _CALLED}


def _add(message: Json, item: Json) -> None:
    if item["type"] == "reasoning":
        message["reasoning_content"] = _reasoning(item, "")
    elif item["type"] == "message":
        message["content"] = _text(item["content"], "content")
    else:
        space = item.get("namespace")
        name = f"{space}.{item['name']}" if space else item["name"]
        function = {"name": name, "arguments": item["arguments"]}
        message.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
