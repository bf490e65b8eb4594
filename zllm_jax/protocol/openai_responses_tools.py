"""Tools of the Responses protocol, which of them may or must be called, and what form the answer must have."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol.forms import openai_form
from zllm_jax.protocol.reading import Json, members, required, typed
from zllm_jax.values import AllowedTools, Fence, NamedTool, ToolChoice


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The tools that can be called here. spaces: for the names that stand in a namespace, (namespace, name in it)."""

    tools: tuple[Json, ...] = ()
    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def offered(given: Mapping[str, Any], items: Iterable[Json]) -> Offer:
    """The functions among `tools` and among the items that add tools.

    Those of a namespace are offered as `namespace.name`. Tools that a server runs by itself, and those whose input is
    no JSON, cannot be offered: they are left out, as clients send them to every server.
    """
    several: list[Any] = [(one, f"tools[{i}]") for i, one in enumerate(typed(given, "tools", list, []))]
    for item in items:
        if item["type"] == "additional_tools":
            several += [(one, "input.tools") for one in typed(item, "tools", list, [], prefix="input.")]
    tools, spaces = dict[str, Json](), dict[str, tuple[str, str]]()
    for one, param in several:
        for tool, space in _functions(one, param):
            name = tool["function"]["name"]
            if space:
                full = f"{space}.{name}"
                spaces[full] = (space, name)
                tool["function"]["name"] = name = full
            tools[name] = tool
    return Offer(tools=tuple(tools.values()), spaces=spaces)


def _functions(value: Any, param: str) -> list[tuple[Json, str]]:
    given = members(value, param)
    kind = required(given, "type", str, prefix=f"{param}.")
    if kind == "function":
        return [(_function(given, param), "")]
    if kind == "namespace":
        space = required(given, "name", str, prefix=f"{param}.")
        inner: list[Any] = required(given, "tools", list, prefix=f"{param}.")
        return [(tool, space) for i, one in enumerate(inner) for tool, _ in _functions(one, f"{param}.tools[{i}]")]
    return []


def _function(given: Json, param: str) -> Json:
    shown: Json = {"name": required(given, "name", str, prefix=f"{param}.")}
    if description := typed(given, "description", str, "", prefix=f"{param}."):
        shown["description"] = description
    typed(given, "strict", bool, False, prefix=f"{param}.")  # every call is held to its schema
    shown["parameters"] = typed(given, "parameters", dict, {}, prefix=f"{param}.")
    return {"type": "function", "function": shown}


def tool_choice(given: Mapping[str, Any], offer: Offer) -> ToolChoice:
    """`tool_choice` in each of its forms."""
    choice = given.get("tool_choice", "auto")
    if choice in ("auto", "none", "required"):
        return "auto" if not offer.tools and choice == "none" else choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return NamedTool(_name(choice, "tool_choice"))
    if kind == "allowed_tools":
        mode = choice.get("mode")
        if mode not in ("auto", "required"):
            raise InvalidRequest(
                f"tool_choice.mode is {reprlib.repr(mode)}, must be auto or required", param="tool_choice.mode"
            )
        several: list[Any] = required(choice, "tools", list, prefix="tool_choice.")
        names = tuple(
            _name(members(one, "tool_choice.tools"), f"tool_choice.tools[{i}]") for i, one in enumerate(several)
        )
        return AllowedTools(names, required=mode == "required")
    raise InvalidRequest(
        f"tool_choice is {reprlib.repr(choice)}, must be none, auto, required, "
        '{"type": "function", "name": ...} or {"type": "allowed_tools", "mode": ..., "tools": ...}',
        param="tool_choice",
    )


def _name(given: Json, param: str) -> str:
    if given.get("type") != "function":
        raise InvalidRequest(
            f"{param}.type is {reprlib.repr(given.get('type'))}: only functions can be called here",
            param=f"{param}.type",
        )
    space = typed(given, "namespace", str, "", prefix=f"{param}.")
    name = required(given, "name", str, prefix=f"{param}.")
    return f"{space}.{name}" if space else name


def text_format(given: Mapping[str, Any]) -> Fence | None:
    """The form of the answer."""
    text = members(given.get("text", {}), "text")
    for name in text:
        if name not in ("format", "verbosity"):  # how verbose an answer is, is a wish
            raise InvalidRequest(f"text.{name} is not supported", param=f"text.{name}")
    form = members(text.get("format", {"type": "text"}), "text.format")
    return openai_form(form, "text.format")
