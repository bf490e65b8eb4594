"""ChatML JSON as Hermes 2 Pro writes it: tools in a system turn of their own, results in turns of role `tool`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zllm_jax.dialect.chatml_json import CHATML_LAYOUT, chatml_turn
from zllm_jax.dialect.tools import Layout, ToolSpec, calls_in, canonical_json, render_calls

_TYPES = {"string": "str", "number": "float", "integer": "int", "boolean": "bool", "array": "list[Union[]]"}


@dataclass(frozen=True)
class Hermes:
    """The dialect. bos: what every conversation begins with. It has no reasoning of its own."""

    layout: Layout = CHATML_LAYOUT
    bos: str = ""

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        """What tells the model of `tools`; empty for none."""
        return _INSTRUCTIONS.replace("{tools}", "\n".join(_shown(tool) for tool in tools)) if tools else ""

    def results(self, texts: Sequence[str]) -> str:
        """Results that follow on each other."""
        return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec] = (), *, generation: bool = True
    ) -> str:
        """The text of a conversation; generation: up to where the assistant's next turn begins."""
        told = self.instructions(tools)
        out = [self.bos, *([chatml_turn("system", told)] if told else [])]
        results: list[str] = []
        for number, message in enumerate(messages):
            content, calls = str(message.get("content") or ""), calls_in(message)
            if message["role"] == "tool":
                results.append(content)
                last = number + 1 == len(messages)
                if last or messages[number + 1]["role"] != "tool":
                    # The template leaves no line break behind these turns, and one before their end but for the last.
                    end = "<|im_end|>" if last else "\n<|im_end|>"
                    out.append(f"<|im_start|>tool\n{self.results(results)}{end}")
                    results = []
            elif calls:
                out.append(chatml_turn("assistant", render_calls(self.layout, calls)))
            else:
                out.append(chatml_turn(message["role"], content))
        return "".join(out) + ("<|im_start|>assistant\n" if generation else "")


def _shown(tool: ToolSpec) -> str:
    """A tool with its description as a Python signature, every list of whatever type, as the template has it."""
    properties = tool.parameters.get("properties") or {}
    typed = [(name, _type(schema), str(schema.get("description") or "")) for name, schema in properties.items()]
    signature = f"{tool.name}({', '.join(f'{name}: {kind}' for name, kind, _ in typed)}) - {tool.description}\n\n"
    arguments = "".join(f"        {name}({kind}): {text.strip()}" for name, kind, text in typed)
    described = signature + ("    Args:\n" + arguments if typed else "")
    parameters = canonical_json(tool.parameters) if typed else "{}"
    function = f'{{"name": "{tool.name}", "description": "{described}", "parameters": {parameters}}}'
    return f'{{"type": "function", "function": {function}'


def _type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        return f"Union[{','.join(_type({'type': one}) for one in kind)}]"
    if kind == "object":
        values = schema.get("additionalProperties")
        return "dict" if values is None else f"dict[str, {_type(values) if isinstance(values, Mapping) else 'Any'}]"
    return _TYPES.get(str(kind), "Any")


_INSTRUCTIONS = (
    "You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags. "
    "You may call one or more functions to assist with the user query. Don't make assumptions about what values to "
    "plug into functions. Here are the available tools: <tools> {tools} </tools>Use the following pydantic model json "
    'schema for each tool call you will make: {"properties": {"name": {"title": "Name", "type": "string"}, '
    '"arguments": {"title": "Arguments", "type": "object"}}, "required": ["name", "arguments"], "title": '
    '"FunctionCall", "type": "object"}}\nFor each function call return a json object with function name and arguments '
    "within <tool_call></tool_call> XML tags as follows:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-dict>}\n</tool_call>'
)
