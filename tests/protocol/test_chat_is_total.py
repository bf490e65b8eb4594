"""Whatever JSON a client sends becomes a call or is refused by the name of a parameter: nothing else is raised."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol import openai_chat, openai_errors
from zllm_jax.protocol.openai_chat import parse_request

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
WORDS = st.sampled_from(
    (
        *("auto", "none", "required", "function", "allowed_tools", "text", "refusal", "json_object", "json_schema"),
        *("system", "developer", "user", "assistant", "tool", "custom", "medium", "f"),
    )
)
NAMES = st.sampled_from(
    (
        *("type", "function", "name", "arguments", "parameters", "schema", "json_schema", "strict", "allowed_tools"),
        *("mode", "tools", "role", "content", "text", "refusal", "tool_calls", "tool_call_id", "id", "5"),
    )
)
VALUES = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
)
FUNCTION = st.fixed_dictionaries({"name": WORDS}, optional={"parameters": VALUES, "description": VALUES})
TOOL = st.fixed_dictionaries({"type": st.just("function") | WORDS, "function": FUNCTION | VALUES})
CALL = st.fixed_dictionaries({"id": WORDS, "type": st.just("function"), "function": FUNCTION | VALUES})
PART = st.fixed_dictionaries({"type": WORDS}, optional={"text": VALUES, "refusal": VALUES})
MESSAGE = st.fixed_dictionaries(
    {"role": WORDS},
    optional={
        "content": st.text(max_size=4) | st.lists(PART | VALUES, max_size=2) | VALUES,
        "tool_calls": st.lists(CALL | VALUES, max_size=2),
        "tool_call_id": VALUES,
        "refusal": VALUES,
        "name": VALUES,
    },
)
GOOD = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
PARAMETERS = sorted((openai_chat._READ | openai_chat._HINTS | openai_chat._NEUTRAL.keys()) - GOOD.keys())


def check(body: Any) -> bool:
    """Whether the body became a call."""
    try:
        call = parse_request(body, default_max_tokens=16, request_id="r")
    except InvalidRequest as refused:
        error = openai_errors.error_object(refused)["error"]
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 1000
        assert error["param"] is not None or not isinstance(body, dict)
        return False
    assert len(call.choices()) == call.num_choices
    return True


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_any_json(body: Any) -> None:
    check(body)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(PARAMETERS), VALUES, max_size=4))
def test_any_value_of_any_parameter(given: dict[str, Any]) -> None:
    check(GOOD | given)


@settings(max_examples=200, deadline=None)
@given(st.lists(MESSAGE, max_size=3), st.lists(TOOL, max_size=2), VALUES | WORDS, VALUES)
def test_any_messages_and_tools(messages: list[Any], tools: list[Any], choice: Any, form: Any) -> None:
    check({"model": "m", "messages": messages, "tools": tools})
    check(GOOD | {"tools": tools, "tool_choice": choice, "response_format": form})


def test_the_check_tells_calls_from_refusals() -> None:
    assert check(GOOD)
    assert not check(GOOD | {"n": 0})
