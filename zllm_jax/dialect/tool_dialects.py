"""Which dialect of tools a checkpoint speaks, and how its conversations with tools are written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from zllm_jax.dialect.chat_template import ChatTemplate
from zllm_jax.dialect.chatml_json import ChatmlJson
from zllm_jax.dialect.dsml import Dsml, dsml_layout
from zllm_jax.dialect.glm_xml import Glm
from zllm_jax.dialect.tokenizer import Tokenizer
from zllm_jax.dialect.tools import (
    Layout,
    ToolSpec,
    calls_in,
    canonical_json,
    check_fits,
    check_survives,
    render_call,
    render_calls,
    tools_of,
)
from zllm_jax.dialect.turns import Message, content_text
from zllm_jax.errors import BadTokenizer, InvalidRequest
from zllm_jax.values import ToolCall

Wire = Mapping[str, Any]


class ToolDialect(Protocol):
    """The abilities of a dialect; its parser and its fence are made from `layout`."""

    @property
    def layout(self) -> Layout: ...

    def instructions(self, tools: Sequence[ToolSpec]) -> str: ...

    def results(self, texts: Sequence[str]) -> str: ...


DIALECTS: Mapping[str, Callable[[], ToolDialect]] = {
    "chatml": ChatmlJson,
    "dsml": Dsml,
    "dsml-v3.2": lambda: Dsml(layout=dsml_layout("function_calls")),
    "glm-4.6": lambda: Glm(lines=True),
    "glm-4.7": lambda: Glm(lines=False),
}


def detect(template: str, spellings: Sequence[str]) -> str | None:
    """The name of the dialect whose marks stand in a chat template, or else among a tokenizer's control tokens."""
    for text in (template, "\0".join(spellings)):
        if "｜DSML｜" in text or "<｜User｜>" in text:
            return "dsml-v3.2" if "function_calls" in text else "dsml"
        if "[gMASK]" in text or "<arg_key>" in text:
            return "glm-4.6" if re.search(r"</arg_key>\s*(\n|\\n)", text) else "glm-4.7"
        if "<|im_start|>" in text:
            return "chatml"
    return None


def markup_ids(tokenizer: Tokenizer, layout: Layout | None = None) -> frozenset[int]:
    """The control tokens that stand in the literals of a layout, or of any: there they are text, and no turn ends."""
    layouts = [layout] if layout is not None else [make().layout for make in DIALECTS.values()]
    literals = [literal for one in layouts for literal in one.literals() if literal not in one.eos]
    found = []
    for token in tokenizer.special_ids - set(tokenizer.eos_ids):
        text = tokenizer.token_bytes(token).decode(errors="replace")
        if text and any(text in literal for literal in literals):
            found.append(token)
    return frozenset(found)


@dataclass(frozen=True, eq=False)
class Spoken:
    """A dialect as one checkpoint speaks it.

    shown: control tokens that are text in it. thinks: whether turns may begin with reasoning. plain: the checkpoint's
    template, which knows tools itself where `native`.
    """

    name: str
    dialect: ToolDialect
    shown: frozenset[int]
    thinks: bool
    plain: ChatTemplate
    native: bool

    @property
    def layout(self) -> Layout:
        return self.dialect.layout

    def render(self, messages: Sequence[Message], tools: Sequence[Wire] | None = None) -> str:
        """The prompt of a conversation, up to where the assistant's next turn begins. Raises `InvalidRequest`."""
        if not tools and not any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
            return self.plain.render(messages)
        if self.native:
            return self.plain.render([_with_objects(message) for message in messages], tools)
        return self.plain.render(lowered(self.dialect, messages, tools_of(tools or ())))

    def thinking(self, prompt_end: str) -> bool | None:
        """Whether a turn behind a prompt that ends so is inside reasoning; None where it may begin with it."""
        end = prompt_end.rstrip()
        if end.endswith(self.layout.think_open.strip()):
            return True
        return None if self.thinks and not end.endswith(self.layout.think_close.strip()) else False


class ToolDialects:
    """The dialects of one checkpoint. That which it was trained on is decided and checked here, once.

    A dialect that is asked for by name must survive the tokenizer; one that is recognised must also have its special
    literals as one token each, as where the model was trained on them.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        spellings = [tokenizer.token_bytes(token).decode(errors="replace") for token in tokenizer.special_ids]
        self.name = detect(template.source, spellings)
        self._why_not = ""
        self._made: dict[str, Spoken] = {}
        if self.name is None:
            self._why_not = "neither its chat template nor its tokenizer shows a dialect of tools that is known"
        else:
            try:
                check_fits(DIALECTS[self.name]().layout, tokenizer)
            except BadTokenizer as error:
                self._why_not = str(error)

    @property
    def fits(self) -> bool:
        """Whether the checkpoint has a dialect of its own."""
        return not self._why_not

    def spoken(self, name: str | None = None) -> Spoken:
        """The dialect of that name; None for the checkpoint's own. Raises `InvalidRequest` where it doesn't fit."""
        known = f"known are {', '.join(DIALECTS)}"
        if name is None:
            if self.name is None or self._why_not:
                raise InvalidRequest(
                    f"this model takes no tools by itself: {self._why_not}; name one as tool_dialect: {known}",
                    param="tools",
                )
            name = self.name
        elif name not in DIALECTS:
            raise InvalidRequest(f"tool_dialect is {name!r}; {known}", param="tool_dialect")
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Spoken:
        dialect = DIALECTS[name]()
        try:
            check_survives(dialect.layout, self._tokenizer)
        except BadTokenizer as error:
            raise InvalidRequest(str(error), param="tool_dialect") from None
        think = dialect.layout.think_open.strip()
        thinks = think in self._template.source or len(self._tokenizer.encode(think, add_bos=False)) == 1
        native = knows_tools(self._template, dialect)
        shown = markup_ids(self._tokenizer, dialect.layout)
        return Spoken(name, dialect, shown, thinks, self._template, native)


def knows_tools(template: ChatTemplate, dialect: ToolDialect) -> bool:
    """Whether a chat template shows tools, and writes calls and results as the dialect does."""
    call = ToolCall("c", "probe_of_tools", {"key": "value"})
    function = {"name": call.name, "arguments": call.arguments}
    parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
    messages: list[Message] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "outcome"},
    ]
    tool = {"type": "function", "function": {"name": call.name, "description": "d", "parameters": parameters}}
    try:
        without, told = template.render(messages), template.render(messages, [tool])
    except InvalidRequest:
        return False
    parts = (render_call(dialect.layout, call), dialect.results(["outcome"]).strip())
    return told.count(call.name) > without.count(call.name) and all(part in told for part in parts)


def lowered(dialect: ToolDialect, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """The same conversation for a template that knows no tools: instructions, calls and results as plain texts."""
    out: list[Message] = []
    if told := dialect.instructions(tools):
        head = content_text(messages[0]) if messages and messages[0].get("role") == "system" else None
        out.append({"role": "system", "content": told if not head else f"{head}\n\n{told}"})
        messages = messages if head is None else messages[1:]
    results = list[str]()
    for number, message in enumerate(messages):
        role, text = message.get("role"), content_text(message) or ""
        if role == "tool":
            results.append(text)
            if number + 1 == len(messages) or messages[number + 1].get("role") != "tool":
                out.append({"role": "user", "content": dialect.results(results)})
                results = []
        elif calls := calls_in(message):
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            out.append({**rest, "content": text + dialect.layout.lead + render_calls(dialect.layout, calls)})
        else:
            out.append(message)
    return out


def _with_objects(message: Message) -> Message:
    """The message with its calls' arguments as objects where they are: templates go through their members."""
    calls = calls_in(message)
    if not calls:
        return message
    made = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}} for one in calls
    ]
    return {**message, "tool_calls": made}


def call_message(call: ToolCall) -> dict[str, Any]:
    """A call in the shape in which clients send it back."""
    arguments = call.arguments if isinstance(call.arguments, str) else canonical_json(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
