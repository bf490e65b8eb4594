"""Calls as JSON in ChatML, as Qwen3 and Hermes write them; also for a ChatML model without tools, as SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zllm_jax.dialect.tools import Layout, ToolSpec, calls_in, canonical_json, render_calls

CHATML_LAYOUT = Layout(
    name="ChatML JSON",
    think_open="<think>\n",
    think_close="\n</think>",
    after_think="\n\n",
    lead="\n",
    block_open="",
    block_close="",
    between_calls="\n",
    call_open=('<tool_call>\n{"name": "', '", "arguments": '),
    call_close="}\n</tool_call>",
    param_open="",
    key_end_string="",
    key_end_json="",
    param_close="",
    between_params="",
    typed="json",
    eos=("<|im_end|>",),
    special=("<|im_end|>",),
)


@dataclass(frozen=True)
class ChatmlJson:
    """The dialect. default_system: the system text where the conversation has none."""

    layout: Layout = CHATML_LAYOUT
    thinking: bool = True
    default_system: str = ""

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        """What tells the model of `tools`; empty for none."""
        shown = "".join("\n" + canonical_json(tool.wire) for tool in tools)
        return _INSTRUCTIONS.replace("{tools}", shown) if tools else ""

    def result(self, text: str) -> str:
        """A tool's result."""
        return f"<tool_response>\n{text}\n</tool_response>"

    def results(self, texts: Sequence[str]) -> str:
        """Results that follow on each other."""
        return "\n".join(self.result(text) for text in texts)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec] = (), *, generation: bool = True
    ) -> str:
        """The text of a conversation; generation: up to where the assistant's next turn begins."""
        last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        has_system = bool(messages) and messages[0]["role"] == "system"
        system = str(messages[0].get("content") or "") if has_system else self.default_system
        told = self.instructions(tools)
        head = "\n\n".join(part for part in (system, told) if part)
        out, before = [chatml_turn("system", head)] if head else [], ""
        for number, message in enumerate(messages):
            role, content = message["role"], str(message.get("content") or "")
            if role == "tool":
                if before == "tool":
                    out[-1] = out[-1].removesuffix("<|im_end|>\n") + f"\n{self.result(content)}<|im_end|>\n"
                else:
                    out.append(chatml_turn("user", self.result(content)))
            elif role == "assistant":
                out.append(chatml_turn(role, self._assistant(message, number > last_user, number == len(messages) - 1)))
            elif number or role != "system":
                out.append(chatml_turn(role, content))
            before = role
        quiet = "" if self.thinking else "<think>\n\n</think>\n\n"
        return "".join(out) + ("<|im_start|>assistant\n" + quiet if generation else "")

    def _assistant(self, message: Mapping[str, Any], reasons: bool, last: bool) -> str:
        reasoning = str(message.get("reasoning_content") or "").strip("\n")
        content = str(message.get("content") or "")
        thought = ""
        if reasons and (reasoning or last):
            thought, content = f"<think>\n{reasoning}\n</think>\n\n", content.lstrip("\n")
        calls = render_calls(self.layout, calls_in(message))
        return thought + content + (self.layout.lead if calls and content else "") + calls


def chatml_turn(role: str, text: str) -> str:
    """A turn of ChatML."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
