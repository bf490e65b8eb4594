"""The dialects by the names of the models that were trained on them: what they are told, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from zllm_jax.dialect.chatml_json import ChatmlJson
from zllm_jax.dialect.dsml import Dsml, dsml_layout
from zllm_jax.dialect.glm_xml import Glm
from zllm_jax.dialect.hermes import Hermes
from zllm_jax.dialect.tool_parser import ToolParser
from zllm_jax.dialect.tools import Layout, ToolSpec, tools_of
from zllm_jax.dialect.turns import Message, content_text
from zllm_jax.errors import InvalidRequest


class Renderer(Protocol):
    """A dialect that writes whole conversations."""

    @property
    def layout(self) -> Layout: ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation: bool = True
    ) -> str: ...


_MAKERS: Mapping[str, Callable[[bool], Renderer]] = {
    "deepseek-v4": lambda thinking: Dsml(thinking=thinking),
    "deepseek-v3.2": lambda thinking: Dsml(layout=dsml_layout("function_calls"), thinking=thinking),
    "glm-4.6": lambda thinking: Glm(lines=True, thinking=thinking),
    "glm-4.7": lambda thinking: Glm(lines=False, thinking=thinking),
    "qwen3": lambda thinking: ChatmlJson(thinking=thinking),
    "hermes-2-pro": lambda _: Hermes(),
}
NAMES = tuple(_MAKERS)


@dataclass(frozen=True)
class NamedDialect:
    """How one family of models writes conversations with tools. No tokenizer and no checkpoint is needed."""

    name: str

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        thinking: bool = True,
    ) -> str:
        """The prompt of a conversation; messages and tools as Chat Completions has them.

        add_generation_prompt: end with what opens the assistant's next turn. thinking: whether that turn may reason.
        Raises `InvalidRequest` for what the dialect cannot write.
        """
        plain = [{**message, "content": _text(message, number)} for number, message in enumerate(messages)]
        return _MAKERS[self.name](thinking).render(plain, tools_of(tools), generation=add_generation_prompt)

    def parser(
        self, tools: Sequence[Mapping[str, Any]] = (), *, scope: str = "", thinking: bool | None = None
    ) -> ToolParser:
        """Of one turn. scope: what the ids of calls are made from. thinking: as `ToolParser` has it."""
        return ToolParser(_MAKERS[self.name](True).layout, tools_of(tools), scope=scope, thinking=thinking)


def get_dialect(name: str) -> NamedDialect:
    """The dialect of a family of models. Raises `InvalidRequest` for a name that is none of `NAMES`."""
    if name not in _MAKERS:
        raise InvalidRequest(f"there is no dialect {name!r}; known are {', '.join(NAMES)}", param="tool_dialect")
    return NamedDialect(name)


def _text(message: Message, number: int) -> str:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages[{number}] must be an object with a role", param=f"messages[{number}]")
    text = content_text(message)
    if text is None:
        raise InvalidRequest(f"messages[{number}].content has a part that is no text", param=f"messages[{number}]")
    return text
