"""DSML, the dialect of DeepSeek V3.2 and V4. V4 ships no chat template: its whole conversation is written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zllm_jax.dialect.tools import Layout, ToolSpec, calls_in, canonical_json, render_calls
from zllm_jax.errors import InvalidRequest

_MARK = "｜DSML｜"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"


def dsml_layout(block: str = "tool_calls") -> Layout:
    """The literals of DSML. block: `tool_calls` (V4) or `function_calls` (V3.2)."""
    return Layout(
        name="DSML",
        think_open="<think>",
        think_close="</think>",
        after_think="",
        lead="\n\n",
        block_open=f"<{_MARK}{block}>\n",
        block_close=f"\n</{_MARK}{block}>",
        between_calls="\n",
        call_open=(f'<{_MARK}invoke name="', '">\n'),
        call_close=f"\n</{_MARK}invoke>",
        param_open=f'<{_MARK}parameter name="',
        key_end_string='" string="true">',
        key_end_json='" string="false">',
        param_close=f"</{_MARK}parameter>",
        between_params="\n",
        typed="attribute",
        eos=(EOS,),
        special=(_MARK, "<think>", "</think>", EOS),
    )


@dataclass(frozen=True)
class Dsml:
    """The dialect. thinking: whether turns may reason. keep_reasoning: None keeps earlier reasoning with tools only."""

    layout: Layout = field(default_factory=dsml_layout)
    thinking: bool = True
    keep_reasoning: bool | None = None

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        """What tells the model of `tools`; empty for none."""
        if not tools:
            return ""
        shown = "\n".join(canonical_json(tool.wire["function"]) for tool in tools)
        return _INSTRUCTIONS.replace("{block}", self.layout.trigger[1:-1]).replace("{tools}", shown)

    def result(self, text: str) -> str:
        """A tool's result."""
        if "</tool_result>" in text:
            raise InvalidRequest("a tool's result contains '</tool_result>', which would end it", param="messages")
        return f"<tool_result>{text}</tool_result>"

    def results(self, texts: Sequence[str]) -> str:
        """Results that follow on each other, in the order of the calls."""
        return "\n\n".join(self.result(text) for text in texts)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec] = (), *, generation: bool = True
    ) -> str:
        """The text of a conversation; generation: up to where the assistant's next turn begins."""
        keep = bool(tools) if self.keep_reasoning is None else self.keep_reasoning
        last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        system = "\n\n".join(str(message.get("content") or "") for message in messages if message["role"] == "system")
        told = self.instructions(tools)
        out, order = [BOS, f"{system}\n\n{told}" if told else system], list[str]()
        at = 0
        while at < len(messages):
            message = messages[at]
            role, content = message["role"], str(message.get("content") or "")
            at += 1
            if role == "user":
                out.append(_USER + content)
            elif role == "assistant":
                out.append(self._assistant(message, keep or at - 1 > last_user))
                order = [call.id for call in calls_in(message)]
            elif role == "tool":
                end = next((i for i in range(at, len(messages)) if messages[i]["role"] != "tool"), len(messages))
                results = sorted(messages[at - 1 : end], key=lambda m: _place(order, str(m.get("tool_call_id"))))
                out.append(_USER + self.results([str(m.get("content") or "") for m in results]))
                at = end
        begun = _ASSISTANT + ("<think>" if self.thinking else "</think>")
        return "".join(out) + (begun if generation else "")

    def _assistant(self, message: Mapping[str, Any], reasons: bool) -> str:
        calls = render_calls(self.layout, calls_in(message))
        reasoning = str(message.get("reasoning_content") or "")
        thought = f"<think>{reasoning}" if self.thinking and reasons else ""
        content = str(message.get("content") or "")
        return f"{_ASSISTANT}{thought}</think>{content}{self.layout.lead if calls else ''}{calls}{EOS}"


def _place(order: Sequence[str], call: str) -> int:
    return order.index(call) if call in order else len(order)


_INSTRUCTIONS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{block}>" block like the following:

<{block}>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</{block}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{tools}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""  # noqa: E501  (the vendor's text, line for line)
