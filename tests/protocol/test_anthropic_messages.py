"""Messages as values: what a body becomes, and what it is refused for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol.anthropic_messages import MessagesCall, parse_prompt, parse_request
from zllm_jax.protocol.anthropic_messages_history import ERROR_PREFIX
from zllm_jax.values import Fence, Message, NamedTool, Sampling, ToolChoice

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}
TOOL_SHOWN = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def parse(**body: Any) -> MessagesCall:
    return parse_request({"model": "m", "max_tokens": 100, "messages": [USER]} | body)


def read(*messages: Any, **body: Any) -> tuple[Message, ...]:
    return parse(messages=[*messages, USER], **body).request.messages[:-1]


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def thinking(said: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": "any"}


def use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": arguments}


def called(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_defaults() -> None:
    call = parse()
    assert (call.model, call.stream, call.limited, call.thinking, call.prewarm) == ("m", False, False, "shown", False)
    assert call.request.messages == (USER,)
    assert call.request.max_tokens == 100
    assert call.request.sampling == Sampling()


def test_every_parameter_arrives() -> None:
    call = parse(
        system="Be brief.",
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        seed=3,
        stop_sequences=["x", "yz"],
        stream=True,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    )
    request = call.request
    assert request.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=4, seed=3)
    assert request.stop == ("x", "yz")
    assert request.tools == (TOOL_SHOWN,)
    assert (request.tool_choice, request.parallel_tool_calls) == (NamedTool("f"), False)
    assert request.messages == ({"role": "system", "content": "Be brief."}, USER)
    assert call.stream


def test_hints_and_null_change_nothing() -> None:
    hints: dict[str, Any] = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "speed": "fast",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "betas": ["any-2099-01-01"],
        "mcp_servers": [],
        **CACHED,
    }
    nothing = dict.fromkeys(["system", "temperature", "tools", "tool_choice", "thinking", "stream", "container"])
    assert parse(**hints) == parse() == parse(**nothing)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("auto", "auto"), ("any", "required"), ("none", "none")],
)
def test_tool_choice(choice: str, expected: ToolChoice) -> None:
    assert parse(tools=[TOOL], tool_choice={"type": choice}).request.tool_choice == expected
    assert parse(tools=[TOOL], tool_choice={"type": choice}).request.parallel_tool_calls


def test_the_protocols_own_tools_are_left_out() -> None:
    own = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, {"type": "mcp_toolset"}]
    assert parse(tools=[*own, TOOL, own[0]]).request.tools == (TOOL_SHOWN,)
    assert parse(tools=own).request.tools == ()


def test_what_tools_have_beside_their_schema() -> None:
    more = {"type": "custom", "defer_loading": True, "strict": True, "eager_input_streaming": True, **CACHED}
    assert parse(tools=[TOOL | more]) == parse(tools=[TOOL])
    (shown,) = parse(tools=[TOOL | {"input_examples": [{"a": 1}]}]).request.tools
    assert shown["function"]["parameters"] == {**SCHEMA, "examples": [{"a": 1}]}


def test_the_form_of_an_answer() -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    assert parse(output_config=form).request.fence == Fence(schema=SCHEMA)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"type": "adaptive", "display": "omitted"}, "omitted"),
        ({"type": "adaptive", "display": "summarized"}, "shown"),
        ({"type": "disabled"}, "hidden"),
    ],
)
def test_whether_thinking_is_shown(config: dict[str, Any], expected: str) -> None:
    assert parse(thinking=config).thinking == expected


def test_a_limit_of_nothing_computes_the_prompt() -> None:
    call = parse(max_tokens=0)
    assert (call.prewarm, call.request.max_tokens) == (True, 1)


def test_a_count_needs_no_limit_and_may_end_anywhere() -> None:
    body = {"model": "m", "messages": [USER, {"role": "assistant", "content": "Hello"}], "system": "S", "tools": [TOOL]}
    counted = parse_prompt(body).request
    asked = parse_request(body | {"max_tokens": 5, "messages": [*body["messages"], USER]}).request  # type: ignore[misc]
    assert counted.messages == asked.messages[:-1]  # type: ignore[index]
    assert counted.tools == asked.tools


@pytest.mark.parametrize(
    "content",
    ["a b", [text("a b")], [text("a b", **CACHED)], [text("a"), text(" b", citations=None)]],
    ids=["text", "block", "cached block", "two blocks"],
)
def test_a_text_is_the_same_in_blocks(content: Any) -> None:
    assert parse(system=content) == parse(system="a b")
    for role in ("user", "assistant", "system"):
        assert read({"role": role, "content": content}) == ({"role": role, "content": "a b"},)
    result = {"type": "tool_result", "tool_use_id": "1", "content": content}
    assert read({"role": "user", "content": [result]}) == ({"role": "tool", "tool_call_id": "1", "content": "a b"},)


def test_an_empty_system_is_none() -> None:
    assert parse(system="") == parse(system=[]) == parse()


def test_a_volatile_header_stays_a_line_of_its_own() -> None:
    header = "x-anthropic-billing-header: version=1; nonce=f3a9"
    system, *_ = parse(system=[text(header), text("You are brief.")]).request.messages or ()
    assert system["content"] == f"{header}\nYou are brief."


def test_interleaved_thinking_and_calls_keep_their_order() -> None:  # known fault 6
    blocks = [
        thinking("one"),
        text("say"),
        use("1", b=1, a="é"),
        thinking("two"),
        use("2"),
        use("3"),
        text("end"),
    ]
    assert read({"role": "assistant", "content": blocks}) == (
        {
            "role": "assistant",
            "reasoning_content": "one",
            "content": "say",
            "tool_calls": [called("1", '{"b": 1, "a": "é"}')],
        },
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "two",
            "tool_calls": [called("2", "{}"), called("3", "{}")],
        },
        {"role": "assistant", "content": "end"},
    )


def test_merged_and_adjacent_assistant_turns() -> None:  # known fault 44
    merged = {"role": "assistant", "content": [text("one"), text("two"), use("1")]}
    alone = {"role": "assistant", "content": "three"}
    assert read(merged, alone) == (
        {"role": "assistant", "content": "onetwo", "tool_calls": [called("1", "{}")]},
        alone,
    )


def test_sealed_and_empty_thinking_say_nothing() -> None:
    blocks = [{"type": "redacted_thinking", "data": "xyz"}, thinking(""), text("a")]
    assert read({"role": "assistant", "content": blocks}) == ({"role": "assistant", "content": "a"},)
    assert read({"role": "assistant", "content": []}) == ({"role": "assistant", "content": ""},)


def test_results_come_before_what_the_user_says() -> None:
    content = [
        text("and"),
        {"type": "tool_result", "tool_use_id": "1", "content": "21", "is_error": False},
        {"type": "tool_result", "tool_use_id": "2", "content": [text("no "), text("file")], "is_error": True},
        {"type": "tool_result", "tool_use_id": "3"},
        text(" so?"),
    ]
    assert read({"role": "user", "content": content}) == (
        {"role": "tool", "tool_call_id": "1", "content": "21"},
        {"role": "tool", "tool_call_id": "2", "content": f"{ERROR_PREFIX}no file"},
        {"role": "tool", "tool_call_id": "3", "content": ""},
        {"role": "user", "content": "and so?"},
    )


def test_found_tools_are_named() -> None:
    found = [{"type": "tool_reference", "tool_name": name} for name in ("f", "g")]
    result = {"type": "tool_result", "tool_use_id": "1", "content": found}
    assert read({"role": "user", "content": [result]}) == ({"role": "tool", "tool_call_id": "1", "content": "f\ng\n"},)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, USER]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "I"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "I"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER | {"name": "n"}]}, "messages[0].name"),
        (said(IMAGE), "messages[0].content[0]"),
        (
            said({"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}),
            "messages[0].content[0].content[0]",
        ),
        (said({"type": "tool_result", "content": "I"}), "messages[0].content[0].tool_use_id"),
        (said(use("1")), "messages[0].content[0]"),
        (said({"type": "text"}), "messages[0].content[0].text"),
        (said(text("I", style="bold")), "messages[0].content[0].style"),
        (said(use("1") | {"input": "{}"}, role="assistant"), "messages[0].content[0].input"),
        (said({"type": ["text"]}), "messages[0].content[0]"),
        (said("I", role="system"), "messages[0].content[0]"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"system": 3}, "system"),
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"stream": 1}, "stream"),
        ({"thinking": {"type": "wild"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL | {"parameters": {}}]}, "tools[0].parameters"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"style": "terse"}}, "output_config.style"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_parameter(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(**body)
    assert refused.value.param == param


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference", "image")
_NAMES = (
    "text",
    "thinking",
    "data",
    "id",
    "name",
    "input",
    "tool_use_id",
    "content",
    "is_error",
    "tool_name",
    "citations",
)
_BLOCK = st.builds(
    lambda kind, rest: {**rest, "type": kind},
    st.sampled_from(_TYPES) | _JSON,
    st.dictionaries(st.sampled_from(_NAMES), _JSON, max_size=4),
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant", "system")) | _JSON, "content": _JSON | st.lists(_BLOCK, max_size=4)}
)
_PARAMETERS = (
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "stop_sequences",
    "temperature",
    "max_tokens",
)
_BODY = _JSON | st.builds(
    lambda messages, rest: {"model": "m", "max_tokens": 5, "messages": messages, **rest},
    _JSON | st.lists(_MESSAGE, max_size=3),
    st.dictionaries(st.sampled_from(_PARAMETERS), _JSON | st.lists(_BLOCK, max_size=2), max_size=2),
)


@given(_BODY)
def test_any_json_is_understood_or_refused(body: Any) -> None:
    try:
        call = parse_request(body)
    except InvalidRequest:
        return
    assert call.request.messages
