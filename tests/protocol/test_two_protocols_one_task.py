"""The same conversation through Chat Completions and through Messages is the same conversation."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zllm_jax.protocol import anthropic_messages, openai_chat

_TEXT = st.text(max_size=12)
_SAID = st.text(min_size=1, max_size=12)
_INPUT = st.dictionaries(_TEXT, _TEXT | st.integers() | st.lists(st.booleans(), max_size=2), max_size=3)
_CALL = st.tuples(_SAID, st.sampled_from(("f", "g")), _INPUT)
_STEP = st.one_of(
    st.tuples(st.just("user"), st.lists(_TEXT, max_size=3)),
    st.tuples(st.just("system"), st.lists(_TEXT, max_size=3)),
    st.tuples(st.just("results"), st.lists(st.tuples(_SAID, st.lists(_TEXT, max_size=2)), min_size=1, max_size=2)),
    st.tuples(
        st.just("assistant"),
        st.fixed_dictionaries(
            {"thinking": _TEXT, "texts": st.lists(_TEXT, max_size=2), "calls": st.lists(_CALL, max_size=2)}
        ),
    ),
)
_HISTORY = st.lists(_STEP, max_size=6)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def in_parts(texts: list[str], marked: bool) -> list[dict[str, Any]]:
    mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
    return [{"type": "text", "text": text, **mark} for text in texts]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_chat(history: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for kind, what in history:
        if kind == "results":
            messages += [{"role": "tool", "tool_call_id": i, "content": in_parts(texts, False)} for i, texts in what]
        elif kind == "assistant":
            message = {"role": kind, "content": "".join(what["texts"]), "reasoning_content": what["thinking"]}
            calls = [
                {"id": i, "type": "function", "function": {"name": name, "arguments": as_json(arguments)}}
                for i, name, arguments in what["calls"]
            ]
            messages.append(message | {"tool_calls": calls} if calls else message)
        else:
            messages.append({"role": kind, "content": in_parts(what, False)})
    return messages


def as_messages(history: list[Any], marked: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for kind, what in history:
        if kind == "results":
            blocks = [
                {"type": "tool_result", "tool_use_id": i, "content": in_parts(texts, marked)} for i, texts in what
            ]
            messages.append({"role": "user", "content": blocks})
        elif kind == "assistant":
            blocks = [{"type": "thinking", "thinking": what["thinking"], "signature": "s"}] if what["thinking"] else []
            blocks += in_parts(what["texts"], marked)
            blocks += [{"type": "tool_use", "id": i, "name": name, "input": given} for i, name, given in what["calls"]]
            messages.append({"role": "assistant", "content": blocks})
        else:
            messages.append({"role": kind, "content": in_parts(what, marked)})
    return messages


@given(st.lists(_SAID, max_size=2), _HISTORY, st.booleans())
def test_a_history_is_the_same_through_both(system: list[str], history: list[Any], marked: bool) -> None:
    end = {"role": "user", "content": "So?"}
    ahead = [{"role": "system", "content": in_parts(system, False)}] if system else []
    chat = openai_chat.parse_request(
        {
            "model": "m",
            "messages": [*ahead, *as_chat(history), end],
            "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        },
        default_max_tokens=10,
    )
    messages = anthropic_messages.parse_request(
        {
            "model": "m",
            "max_tokens": 10,
            "system": in_parts(system, marked),
            "messages": [*as_messages(history, marked), end],
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        }
    )
    assert messages.request == chat.request  # arguments are texts in it, so that the order of keys counts, too
