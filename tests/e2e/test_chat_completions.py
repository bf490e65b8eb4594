"""The official `openai` library against a real model: tools, schemas, and a stream that is the whole in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.server.conftest import running
from zllm_jax import Engine
from zllm_jax.server import create_app

MESSAGES = [{"role": "user", "content": "What is the weather in Paris, and what is 3 + 4?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
SUM = {"type": "object", "properties": {"of": {"enum": ["3+4", "4+3"]}}, "required": ["of"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "sum", "description": "A sum.", "parameters": SUM}},
]
FEW = {"type": "function", "function": {"name": "sum"}}
CHOICES: dict[str, Any] = {
    "required": "required",
    "named": FEW,
    "allowed": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FEW]}},
}


class Person(pydantic.BaseModel):
    """What `parse` asks for."""

    name: str = pydantic.Field(max_length=20)
    born: int = pydantic.Field(ge=1000, le=2999)


@pytest.fixture(scope="module")
def url(fenced: Engine) -> Iterator[str]:
    with running(create_app(fenced)) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True) as made:
        yield made


def ask(client: openai.OpenAI, fenced: Engine, **options: Any) -> Any:
    given = {"model": fenced.model_name, "messages": MESSAGES, "seed": 3, "max_tokens": 120} | options
    return client.chat.completions.create(**given)


def streamed(chunks: Any) -> tuple[dict[str, Any], str, Any]:
    """The message that the chunks come to, why it ended, and the usage."""
    message: dict[str, Any] = {"content": "", "calls": []}
    reason, usage = "", None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            message["content"] += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                if piece.id:
                    assert piece.index == len(message["calls"])
                    message["calls"].append({"id": piece.id, "name": piece.function.name, "arguments": ""})
                message["calls"][piece.index]["arguments"] += piece.function.arguments or ""
    return message, reason, usage


@pytest.mark.parametrize(
    "name", ["allowed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("required", "named"))]
)
def test_fault_55_a_call_that_is_asked_for_comes_whole_and_streamed(
    client: openai.OpenAI, fenced: Engine, name: str
) -> None:
    options = {"tools": TOOLS, "tool_choice": CHOICES[name], "parallel_tool_calls": False}
    whole = ask(client, fenced, **options)
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "sum":
        assert arguments["of"] in SUM["properties"]["of"]["enum"]
    else:
        assert name == "required"
        assert 1 <= arguments["days"] <= 7
    chunks = ask(client, fenced, stream=True, stream_options={"include_usage": True}, **options)
    message, reason, usage = streamed(chunks)
    assert reason == "tool_calls"
    (piece,) = message["calls"]
    assert (piece["name"], json.loads(piece["arguments"])) == (call.function.name, arguments)
    assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.slow
def test_a_form_beside_tools_gives_calls_or_the_form(client: openai.OpenAI, fenced: Engine) -> None:
    tools = [{**one, "function": {**one["function"], "strict": True}} for one in TOOLS]
    found = []
    for seed in range(4):
        answer = client.chat.completions.parse(
            model=fenced.model_name,
            messages=MESSAGES,
            tools=tools,
            response_format=Person,
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=120,
        )
        message = answer.choices[0].message
        found.append(message.parsed is None)
        assert (message.parsed is None) == bool(message.tool_calls)
        assert message.tool_calls or 1000 <= message.parsed.born <= 2999
    assert False in found


def test_several_answers_compute_their_prompt_once(client: openai.OpenAI, fenced: Engine) -> None:
    fenced.forget()
    messages = [{"role": "user", "content": "Tell me of a river, a mountain and a town. " * 8}]
    before = fenced.report()["counters"]["cached_tokens"]
    answer = ask(client, fenced, messages=messages, n=3, max_tokens=6)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    # But for the token that predicts the next.
    assert fenced.report()["counters"]["cached_tokens"] - before == 2 * (answer.usage.prompt_tokens - 1)
    texts = [choice.message.content for choice in answer.choices]
    again = ask(client, fenced, messages=messages, n=3, max_tokens=6)
    assert [choice.message.content for choice in again.choices] == texts
    assert ask(client, fenced, messages=messages, max_tokens=6).choices[0].message.content == texts[0]


@pytest.mark.slow
def test_fault_55_no_call_may_come_where_none_is_allowed(client: openai.OpenAI, fenced: Engine) -> None:
    answer = ask(client, fenced, tools=TOOLS, tool_choice="none", max_tokens=24)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_the_stream_helper_gathers_calls(client: openai.OpenAI, fenced: Engine) -> None:
    given: dict[str, Any] = {"model": fenced.model_name, "messages": MESSAGES, "seed": 5, "max_tokens": 120}
    with client.chat.completions.stream(**given, tools=TOOLS, tool_choice=FEW, parallel_tool_calls=False) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"chunk", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final.choices[0].message.tool_calls[0].function.name == "sum"


def test_parse_gives_the_callers_own_type(client: openai.OpenAI, fenced: Engine) -> None:
    answer = client.chat.completions.parse(
        model=fenced.model_name, messages=MESSAGES, seed=3, max_tokens=120, response_format=Person
    )
    person = answer.choices[0].message.parsed
    assert person is not None
    assert 1000 <= person.born <= 2999


def test_a_conversation_goes_on_behind_its_call(client: openai.OpenAI, fenced: Engine) -> None:
    options = {"tools": TOOLS, "tool_choice": FEW, "parallel_tool_calls": False}
    first = ask(client, fenced, **options)
    answered = first.choices[0].message
    result = {"role": "tool", "tool_call_id": answered.tool_calls[0].id, "content": "7"}
    again = [*MESSAGES, answered.model_dump(exclude_none=True), result]
    second = ask(client, fenced, messages=again, tools=TOOLS, max_tokens=8)
    known = first.usage.prompt_tokens + first.usage.completion_tokens
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert known - 2 <= cached <= known  # not the last token, and not EOS: no state has been computed behind them


def test_what_cannot_be_enforced_is_refused_by_its_name(client: openai.OpenAI, fenced: Engine) -> None:
    unique = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "several", "schema": unique}}
    with pytest.raises(openai.BadRequestError, match="#/uniqueItems") as refused:
        ask(client, fenced, response_format=form)
    assert refused.value.param == "response_format"
    tool = {
        "type": "function",
        "function": {"name": "several", "parameters": {"type": "object", "properties": {"a": unique}}},
    }
    with pytest.raises(openai.BadRequestError, match="the tool several") as refused:
        ask(client, fenced, tools=[tool])
    assert refused.value.param == "tools"


@pytest.mark.slow
def test_async(url: str, fenced: Engine) -> None:
    async def once() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await client.chat.completions.create(
                model=fenced.model_name,
                messages=MESSAGES,
                tools=TOOLS,
                tool_choice=FEW,
                parallel_tool_calls=False,
                seed=3,
                max_tokens=120,
            )

    assert asyncio.run(once()).choices[0].message.tool_calls[0].function.name == "sum"
