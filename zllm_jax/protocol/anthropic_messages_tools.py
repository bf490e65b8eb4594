"""Messages: tools, which of them may or must be called, and what form the answer must have."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol.reading import Json, members, required, typed
from zllm_jax.values import Fence, NamedTool, ToolChoice

# The protocol's own tools, named with the date of their version: "web_search_20250305". Its home runs them, or taught
# its models to use them; here they would never be called, so they are not shown.
_OWN_TOOL = re.compile(r"[a-z0-9_]+_\d{8}|mcp_toolset")
# Hints are when a tool is shown (always, so that a prompt goes on as it began), how its input is streamed (as it is
# generated), and who may call it (the model).
_TOOL_FIELDS = frozenset(
    {"type", "name", "description", "input_schema", "input_examples", "strict"}
    | {"cache_control", "defer_loading", "eager_input_streaming", "allowed_callers"}
)


def tools(given: Mapping[str, Any]) -> tuple[Json, ...]:
    """`tools`, without the protocol's own."""
    several: list[Any] = typed(given, "tools", list, [])
    made = (_tool(one, f"tools[{number}]") for number, one in enumerate(several))
    return tuple(one for one in made if one is not None)


def _tool(tool: Any, param: str) -> Json | None:
    given = members(tool, param)
    type_ = given.get("type", "custom")
    if isinstance(type_, str) and _OWN_TOOL.fullmatch(type_):
        return None
    if type_ != "custom":
        raise InvalidRequest(f"{param}.type is {reprlib.repr(type_)}, must be custom", param=f"{param}.type")
    for name in given:
        if name not in _TOOL_FIELDS:
            raise InvalidRequest(f"{param}.{name} is not supported", param=f"{param}.{name}")
    typed(given, "strict", bool, False, prefix=f"{param}.")  # every call is held to its schema
    schema = required(given, "input_schema", dict, prefix=f"{param}.")
    if examples := typed(given, "input_examples", list, [], prefix=f"{param}."):
        schema = {**schema, "examples": examples}  # where JSON Schema has them
    shown = {"name": required(given, "name", str, prefix=f"{param}.")}
    if description := typed(given, "description", str, "", prefix=f"{param}."):
        shown["description"] = description
    return {"type": "function", "function": {**shown, "parameters": schema}}


def tool_choice(given: Mapping[str, Any]) -> ToolChoice:
    """`tool_choice` in each of its forms."""
    choice = _choice(given)
    type_ = choice.get("type")
    if type_ == "tool":
        return NamedTool(required(choice, "name", str, prefix="tool_choice."))
    if type_ == "any":
        return "required"
    if type_ == "auto":
        return "auto"
    if type_ == "none":
        return "none" if given.get("tools") else "auto"
    raise InvalidRequest(
        f"tool_choice.type is {reprlib.repr(type_)}, must be auto, any, tool or none", param="tool_choice.type"
    )


def parallel(given: Mapping[str, Any]) -> bool:
    """Whether more than one call may come."""
    return not typed(_choice(given), "disable_parallel_tool_use", bool, False, prefix="tool_choice.")


def _choice(given: Mapping[str, Any]) -> Json:
    choice = members(given.get("tool_choice", {"type": "auto"}), "tool_choice")
    for name in choice:
        if name not in ("type", "name", "disable_parallel_tool_use"):
            raise InvalidRequest(f"tool_choice.{name} is not supported", param=f"tool_choice.{name}")
    return choice


def output_format(given: Mapping[str, Any]) -> Fence | None:
    """The form of the answer, which is enforced exactly; effort and budgets are hints."""
    config = members(given.get("output_config", {}), "output_config")
    for name in config:
        if name not in ("format", "effort", "task_budget"):
            raise InvalidRequest(f"output_config.{name} is not supported", param=f"output_config.{name}")
    if "format" not in config:
        return None
    param = "output_config.format"
    form = members(config["format"], param)
    if form.get("type") != "json_schema":
        raise InvalidRequest(
            f"{param}.type is {reprlib.repr(form.get('type'))}, must be json_schema", param=f"{param}.type"
        )
    schema: Json = required(form, "schema", dict, prefix=f"{param}.")
    return Fence(schema=schema)
