"""A near miss in words: what differs, and from which field of the request it came."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zllm_jax.dialect.tokenizer import Tokenizer
from zllm_jax.values import NearMiss

Message = Mapping[str, Any]
Span = tuple[str, int, int]  # of which field, where in the text it begins and ends


def explain(
    miss: NearMiss,
    prompt: np.ndarray,
    tokenizer: Tokenizer,
    messages: Sequence[Message] = (),
    tools: Sequence[Any] = (),
) -> str:
    """Where a prompt i32[S] and a stored state part: the number of the token, the texts there, the field.

    For example: token 41 of 60005 differs, 32 were reused: after "version=2.1; nonce=" it is "f3a9" here and "07bc" in
    the stored state of 59000 tokens; messages[0].content, character 30
    """
    head = _text(tokenizer, prompt[: miss.common])
    text, at = head + _text(tokenizer, prompt[miss.common :]), len(head)
    here, there = _text(tokenizer, miss.here), _text(tokenizer, miss.there)
    return (
        f"token {miss.common} of {len(prompt)} differs, {miss.reused_tokens} were reused: "
        f"after {_quoted(_text(tokenizer, miss.before))} "
        f"it is {_quoted(here) if miss.here else 'the end'} here "
        f"and {_quoted(there) if miss.there else 'the end'} in the stored state of {miss.stored_tokens} tokens; "
        f"{_place(text, at, messages, tools)}"
    )


def _text(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> str:
    """Control tokens are spelled out: a difference may be one."""
    return b"".join(map(tokenizer.token_bytes, map(int, ids))).decode(errors="replace")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _place(text: str, at: int, messages: Sequence[Message], tools: Sequence[Any]) -> str:
    """The field that holds character `at` of the rendered text, or those between which the template wrote it."""
    spans = [*_spans(text, _tool_fields(tools)), *_spans(text, _message_fields(messages))]
    for name, start, stop in spans:
        if start <= at < stop:
            return f"{name}, character {at - start}"
    ahead = max((span for span in spans if span[2] <= at), key=lambda span: span[2], default=None)
    behind = min((span for span in spans if span[1] >= at), key=lambda span: span[1], default=None)
    if ahead is None and behind is None:
        return f"character {at} of the prompt"
    if ahead is None or behind is None:
        return f"before {behind[0]}" if behind is not None else f"after {ahead[0]}"  # type: ignore[index]
    return f"between {ahead[0]} and {behind[0]}"


def _spans(text: str, fields: Iterator[tuple[str, str]]) -> Iterator[Span]:
    """Where the fields stand, each after the one before it; a template may trim them or leave them out."""
    position = 0
    for name, value in fields:
        for form in (value, value.strip()):
            start = text.find(form, position) if form else -1
            if start >= 0:
                position = start + len(form)
                yield name, start, position
                break


def _message_fields(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    for number, message in enumerate(messages):
        for field in ("name", "reasoning_content", "content"):
            yield from _texts(f"messages[{number}].{field}", message.get(field))
        for index, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping):
                where = f"messages[{number}].tool_calls[{index}].function"
                yield from _texts(f"{where}.name", function.get("name"))
                yield from _texts(f"{where}.arguments", function.get("arguments"))


def _texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        yield name, json.dumps(value, ensure_ascii=False)
    elif isinstance(value, Sequence):
        for number, part in enumerate(value):
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                yield f"{name}[{number}].text", part["text"]


def _tool_fields(tools: Sequence[Any]) -> Iterator[tuple[str, str]]:
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if isinstance(function, Mapping):
            for field in ("name", "description", "parameters"):
                yield from _texts(f"tools[{number}].{field}", function.get(field))
