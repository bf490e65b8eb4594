"""Chat Completions: tools, which of them may or must be called, and what form the answer must have."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol.forms import openai_form
from zllm_jax.protocol.reading import Json, members, only, required, typed
from zllm_jax.values import AllowedTools, Fence, NamedTool, ToolChoice

_TOOL_MEMBERS = frozenset({"type", "function"})
_FUNCTION_MEMBERS = frozenset({"name", "description", "parameters", "strict"})


def tools(given: Mapping[str, Any]) -> tuple[Json, ...]:
    """`tools`: functions; those of other kinds are refused by their type."""
    several: list[Any] = typed(given, "tools", list, [])
    return tuple(_tool(one, f"tools[{i}]") for i, one in enumerate(several))


def _tool(tool: Any, param: str) -> Json:
    function = _function(tool, param, "a tool", _TOOL_MEMBERS, _FUNCTION_MEMBERS)
    parameters = typed(function, "parameters", dict, {}, prefix=f"{param}.function.")
    typed(function, "strict", bool, False, prefix=f"{param}.function.")  # every call is held to its schema
    shown = {"name": function["name"]}
    if description := typed(function, "description", str, "", prefix=f"{param}.function."):
        shown["description"] = description
    return {"type": "function", "function": {**shown, "parameters": parameters}}


def tool_choice(given: Mapping[str, Any]) -> ToolChoice:
    """`tool_choice` in each of its forms."""
    choice = given.get("tool_choice", "auto")
    if choice in ("auto", "none", "required"):
        return "auto" if not given.get("tools") and choice == "none" else choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return NamedTool(_named(choice, "tool_choice"))
    if kind == "allowed_tools":
        only(choice, ("type", "allowed_tools"), "tool_choice")
        return _allowed(members(choice.get("allowed_tools"), "tool_choice.allowed_tools"))
    raise InvalidRequest(
        f"tool_choice is {reprlib.repr(choice)}, must be none, auto, required, "
        '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", "allowed_tools": ...}',
        param="tool_choice",
    )


def _allowed(given: Json) -> AllowedTools:
    param = "tool_choice.allowed_tools"
    only(given, ("mode", "tools"), param)
    mode = given.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{param}.mode is {reprlib.repr(mode)}, must be auto or required", param=f"{param}.mode")
    several: list[Any] = required(given, "tools", list, prefix=f"{param}.")
    names = tuple(_named(one, f"{param}.tools[{i}]") for i, one in enumerate(several))
    return AllowedTools(names, required=mode == "required")


def _named(value: Any, param: str) -> str:
    name: str = _function(value, param, "a choice", _TOOL_MEMBERS, frozenset({"name"}))["name"]
    return name


def _function(value: Any, param: str, what: str, outer: frozenset[str], inner: frozenset[str]) -> Json:
    given = members(value, param)
    if given.get("type") != "function":
        raise InvalidRequest(
            f"{param}.type is {reprlib.repr(given.get('type'))}: {what} must be a function", param=f"{param}.type"
        )
    function = members(given.get("function"), f"{param}.function")
    only(given, outer, param)
    only(function, inner, f"{param}.function")
    required(function, "name", str, prefix=f"{param}.function.")
    return function


def calls(message: Mapping[str, Any], param: str) -> list[Json]:
    """The calls that an earlier answer made, as they were sent."""
    several: list[Any] = typed(message, "tool_calls", list, [], prefix=f"{param}.")
    return [_call(one, f"{param}.tool_calls[{i}]") for i, one in enumerate(several)]


def _call(call: Any, param: str) -> Json:
    known = frozenset({"id", "index", *_TOOL_MEMBERS})
    function = _function(call, param, "a call", known, frozenset({"name", "arguments"}))
    arguments = required(function, "arguments", str, prefix=f"{param}.function.")
    call_id = required(call, "id", str, prefix=f"{param}.")
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def response_format(given: Mapping[str, Any]) -> Fence | None:
    """The form of the answer."""
    form = members(given.get("response_format", {"type": "text"}), "response_format")
    return openai_form(form, "response_format", inside="json_schema")
