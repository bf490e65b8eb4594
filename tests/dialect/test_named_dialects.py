"""The door to the dialects: by a model's name, from wire shapes to prompt texts and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zllm_jax.dialect import get_dialect
from zllm_jax.dialect.named import NAMES
from zllm_jax.errors import InvalidRequest

DATA = Path(__file__).parent.parent / "data" / "dialects"
TOOLS = json.loads((DATA / "qwen3.json").read_text())["cases"][0]["tools"]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Weather "}, {"type": "text", "text": "in Paris?"}]},
]
CALL = {"name": "get_weather", "arguments": {"city": 'Pa"ris <é>\n', "days": [1, 2]}}


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_was_rendered_is_read_back(name: str) -> None:
    dialect = get_dialect(name)
    before = dialect.render(MESSAGES, TOOLS)
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": CALL}]}
    after = dialect.render([*MESSAGES, turn], TOOLS, add_generation_prompt=False)
    begun = dialect.render(MESSAGES, TOOLS, add_generation_prompt=False)
    assert before.startswith(begun)
    assert after.startswith(begun)
    assert "Weather in Paris?" in begun
    parser = dialect.parser(TOOLS)
    for piece in after[len(begun) :]:
        parser.feed(piece)
    parser.close()
    (call,) = parser.turn().calls
    assert (call.name, call.arguments) == (CALL["name"], CALL["arguments"])
    assert list(call.arguments) == list(CALL["arguments"])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hermes-2-pro"])
def test_thinking_changes_how_the_next_turn_opens(name: str) -> None:
    dialect = get_dialect(name)
    assert dialect.render(MESSAGES) != dialect.render(MESSAGES, thinking=False)


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"no dialect 'klingon'; known are deepseek-v4, "):
        get_dialect("klingon")
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content has a part that is no text"):
        get_dialect("qwen3").render([{"role": "user", "content": [{"type": "image_url"}]}])
    with pytest.raises(InvalidRequest, match=r"messages\[0\] must be an object with a role"):
        get_dialect("qwen3").render([{"content": "hello"}])


@pytest.mark.parametrize(
    "parameters, said",
    [
        ([], "must be a JSON Schema"),
        ({"properties": [1]}, "properties must be an object of schemas, got \\[1\\]"),
        ({"properties": {"a": 5}}, "the schema of 'a' must be an object, true or false, got 5"),
        ({"properties": {"a": {}}, "required": "a"}, "required must be a list of names, got 'a'"),
        ({"properties": {"a": {}}, "required": [["a"]]}, "required must be a list of names"),
    ],
)
def test_parameters_that_are_no_schema_are_refused(parameters: Any, said: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters or [0]}}
    with pytest.raises(InvalidRequest, match=said) as refused:
        get_dialect("glm-4.7").parser([tool])
    assert refused.value.param == "tools[0]"
