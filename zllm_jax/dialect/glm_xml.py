"""The dialect of GLM 4.5/4.6 (a line for each tag) and 4.7 (no line breaks). The schema says what is a string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zllm_jax.dialect.tools import Layout, ToolSpec, calls_in, canonical_json, render_calls


def glm_layout(lines: bool) -> Layout:
    """The literals of GLM. lines: True for 4.5 and 4.6, False for 4.7."""
    gap = "\n" if lines else ""
    return Layout(
        name="GLM XML",
        think_open="<think>",
        think_close="</think>",
        after_think=gap,
        lead=gap,
        block_open="",
        block_close="",
        between_calls=gap,
        call_open=("<tool_call>", gap),
        call_close="</tool_call>",
        param_open="<arg_key>",
        key_end_string=f"</arg_key>{gap}<arg_value>",
        key_end_json=f"</arg_key>{gap}<arg_value>",
        param_close=f"</arg_value>{gap}",
        between_params="",
        typed="schema",
        eos=("<|observation|>", "<|user|>", "<|endoftext|>"),
        special=("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
    )


@dataclass(frozen=True)
class Glm:
    """The dialect. lines: as `glm_layout` has it. keep_reasoning: also that before the last user message."""

    lines: bool = True
    thinking: bool = True
    keep_reasoning: bool = False

    @property
    def layout(self) -> Layout:
        return glm_layout(self.lines)

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        """What tells the model of `tools`; empty for none."""
        if not tools:
            return ""
        shown = "\n".join(canonical_json(tool.wire) for tool in tools)
        gap = "\n" if self.lines else ""
        pair = "<arg_key>{{arg-key-{0}}}</arg_key>{1}<arg_value>{{arg-value-{0}}}</arg_value>{1}"
        form = f"<tool_call>{{function-name}}{gap}{pair.format(1, gap)}{pair.format(2, gap)}...{gap}</tool_call>"
        return _INSTRUCTIONS.replace("{form}", form).replace("{tools}", shown)

    def result(self, text: str) -> str:
        """A tool's result."""
        gap = "\n" if self.lines else ""
        return f"{gap}<tool_response>{gap}{text}{gap}</tool_response>"

    def results(self, texts: Sequence[str]) -> str:
        """Results that follow on each other."""
        return "".join(self.result(text) for text in texts)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec] = (), *, generation: bool = True
    ) -> str:
        """The text of a conversation; generation: up to where the assistant's next turn begins."""
        gap = "\n" if self.lines else ""
        last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        out = ["[gMASK]<sop>"]
        if told := self.instructions(tools):
            out.append("<|system|>\n" + told)
        before = ""
        for number, message in enumerate(messages):
            role, content = message["role"], str(message.get("content") or "")
            if role == "user":
                quiet = "/nothink" if self.lines and not self.thinking and not content.endswith("/nothink") else ""
                out.append(f"<|user|>{gap}{content}{quiet}")
            elif role == "system":
                out.append(f"<|system|>{gap}{content}")
            elif role == "assistant":
                out.append("<|assistant|>" + self._assistant(message, self.keep_reasoning or number > last_user))
            elif role == "tool":
                out.append(("" if before == "tool" else "<|observation|>") + self.result(content))
            before = role
        return "".join(out) + ("<|assistant|>" + self._generation() if generation else "")

    def _generation(self) -> str:
        if self.lines:
            return "" if self.thinking else "\n<think></think>"
        return "<think>" if self.thinking else "</think>"

    def _assistant(self, message: Mapping[str, Any], reasons: bool) -> str:
        gap = "\n" if self.lines else ""
        reasoning = str(message.get("reasoning_content") or "").strip() if reasons else ""
        thought = f"<think>{reasoning}</think>" if self.lines or reasoning else "</think>"
        content = str(message.get("content") or "").strip()
        calls = render_calls(self.layout, calls_in(message))
        return gap + thought + (gap + content if content else "") + (gap + calls if calls else "")


_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, output the function name and arguments within the following XML format:
{form}"""
