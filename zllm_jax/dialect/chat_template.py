"""A checkpoint's own chat template: conversations -> prompt text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zllm_jax.errors import BadTokenizer, InvalidRequest


class ChatTemplate:
    """Jinja source from a checkpoint, run in a sandbox with what Hugging Face gives it.

    names: what else the template may print: `bos_token`, `eos_token`, ...
    """

    def __init__(self, source: str, names: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._names = dict(names or {})

    @cached_property
    def _template(self) -> Template:
        try:
            return _environment().from_string(self.source)
        except TemplateSyntaxError as error:
            raise BadTokenizer(f"the checkpoint's chat template is broken at line {error.lineno}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **names: Any,
    ) -> str:
        """The prompt of a conversation in OpenAI's shape.

        Encode it with `add_bos=None`: a template that prints its BOS gets no second one. Raises `InvalidRequest` when
        the template refuses the messages, `BadTokenizer` when it is itself broken.
        """
        template = self._template
        given = self._names | {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(given | names)
        except TemplateError as error:
            raise InvalidRequest(
                f"the chat template refuses the messages: {error.message}", param="messages"
            ) from error
        except Exception as error:  # the template's code ran on the caller's values: anything may come out of it
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"the chat template fails on the messages: {reason}", param="messages") from error


def require_template(source: str | None, names: Mapping[str, str] | None = None) -> ChatTemplate:
    """The template of a checkpoint that must have one. Raises `InvalidRequest` for a base model."""
    if source is None:
        raise InvalidRequest(
            "the model has no chat template (a base model): give the text as prompt= instead of messages=",
            param="messages",
        )
    return ChatTemplate(source, names)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face does it: not Jinja's own, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
