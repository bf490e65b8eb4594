"""Turns of more than text, as the official `openai` library sees them: calls, reasoning, and its own helpers.

Whatever the answer holds and however it ends, a stream is the whole in pieces.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from zllm_jax.errors import Overloaded
from zllm_jax.testing import ScriptedEngine

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str
    days: int = 1


class Report(pydantic.BaseModel):
    """A structured answer."""

    sunny: bool


TOOLS: Any = [
    openai.pydantic_function_tool(Weather, name="weather"),
    {"type": "function", "function": {"name": "now", "strict": True, "parameters": EMPTY}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par<is", "days": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
HELD = "Let me see. 1 < 2, <tool> and <tool_call are text."


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{address}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as each:
        yield each


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "scripted", "messages": MESSAGES, "tools": TOOLS} | options)


def gathered(chunks: Any) -> tuple[dict[str, Any], str, Any]:
    """The message that the chunks come to, why it ended, and the usage. Each piece is checked on its way."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    reason, usage = "", None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert not reason, "nothing comes behind the finish reason"
            reason = choice.finish_reason or ""
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", "")
            for piece in choice.delta.tool_calls or ():
                if piece.id:
                    assert piece.index == len(message["calls"])
                    message["calls"].append([piece.id, piece.function.name, ""])
                assert piece.index == len(message["calls"]) - 1
                message["calls"][-1][2] += piece.function.arguments
    return message, reason, usage


def as_gathered(choice: Any) -> dict[str, Any]:
    """The same of a whole answer; ids are those of another request."""
    message = choice.message
    calls = [["", one.function.name, one.function.arguments] for one in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning_content", "")
    return {"content": message.content or "", "reasoning": reasoning, "calls": calls}


def both(client: openai.OpenAI, engine: ScriptedEngine, said: str, **options: Any) -> tuple[Any, str]:
    """An answer whole, which must be what its stream comes to; and why it ended."""
    script = {name: options.pop(name) for name in ("thinking", "cached_tokens") if name in options}
    engine.say(said, **script)
    engine.say(said, **script)
    whole = ask(client, **options)
    message, reason, usage = gathered(ask(client, stream=True, stream_options={"include_usage": True}, **options))
    ids = [one[0] for one in message["calls"]]
    assert len(set(ids)) == len(ids)
    for one in message["calls"]:
        one[0] = ""
    assert message == as_gathered(whole.choices[0])
    assert reason == whole.choices[0].finish_reason
    assert usage == whole.usage
    return whole.choices[0].message, reason


def test_text_and_calls(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    message, reason = both(client, engine, f"Let me see.\n{CALL}\n{NOW}", cached_tokens=3)
    assert (message.content, reason) == ("Let me see.", "tool_calls")
    assert [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls] == [
        ("weather", {"city": "Par<is", "days": 2}),
        ("now", {}),
    ]


def test_reasoning_then_text(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for tools in (TOOLS, openai.omit):
        message, reason = both(client, engine, f"Is it {NOW}?\n</think>\n\nYes.", thinking=True, tools=tools)
        assert (message.content, message.reasoning_content, reason) == ("Yes.", f"Is it {NOW}?", "stop")
        assert message.tool_calls is None


def test_reasoning_then_calls(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    message, reason = both(client, engine, f"Hm.\n</think>\n\n{CALL}", thinking=True)
    assert (message.content, message.reasoning_content, reason) == (None, "Hm.", "tool_calls")


def test_reasoning_without_tools_leaves_calls_in_the_text(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    message, reason = both(client, engine, f"Hm.</think>{CALL}", thinking=True, tools=openai.omit)
    assert (message.content, message.tool_calls, reason) == (CALL, None, "stop")


def test_a_stop_sequence_ends_the_text_and_no_call(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    message, reason = both(client, engine, "Warm. Or not.", stop=["Or"])
    assert (message.content, reason) == ("Warm. ", "stop")
    message, reason = both(client, engine, f"So: {CALL}", stop=["Par", "arguments"])
    assert (message.content, len(message.tool_calls), reason) == ("So: ", 1, "tool_calls")


def test_log_probabilities_beside_calls_and_reasoning(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    said = f"Hm.</think>Yes.{NOW}"
    engine.say(said, thinking=True)
    engine.say(said, thinking=True)
    whole = ask(client, logprobs=True)
    entries = [
        entry
        for chunk in ask(client, logprobs=True, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert entries == whole.choices[0].logprobs.content
    assert len(entries) == len(said)


# -- known faults of peers ---------------------------------------------------------------------------------------------


def test_fault_20_no_markup_leaks_into_the_stream(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    message, _ = both(client, engine, f"{HELD}\n{CALL}")
    assert message.content == HELD
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] == "Par<is"


def test_fault_21_a_call_without_arguments_is_one_streamed_too(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    message, reason = both(client, engine, NOW)
    assert [(one.function.name, one.function.arguments) for one in message.tool_calls] == [("now", "{}")]
    assert reason == "tool_calls"


def test_fault_22_reasoning_ends_and_a_call_begins_at_once(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    message, _ = both(client, engine, f"Hm.</think>{NOW}", thinking=True)
    assert (message.reasoning_content, message.content, len(message.tool_calls)) == ("Hm.", None, 1)


@pytest.mark.parametrize("limit", [1, len("Yes.\n") + len(CALL) // 2, len("Yes.\n") + len(CALL) - 1])
def test_fault_23_a_cut_call_is_none_and_the_reason_is_length(
    client: openai.OpenAI, engine: ScriptedEngine, limit: int
) -> None:
    engine.say(f"Yes.\n{CALL}")
    engine.say(f"Yes.\n{CALL}")
    choice = ask(client, max_tokens=limit).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    message, reason, _ = gathered(ask(client, max_tokens=limit, stream=True))
    assert (reason, message["content"]) == ("length", choice.message.content)


def test_fault_23_reasoning_that_is_cut_is_no_content(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    message, reason = both(client, engine, "Hm, let me see", thinking=True, max_tokens=5)
    assert (message.reasoning_content, message.content, reason) == ("Hm, l", "", "length")


def test_fault_57_one_entry_a_token_within_a_character_too(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    said = "世界 👋"
    engine.say(said)
    content = ask(client, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert bytes(byte for entry in content for byte in entry.bytes) == said.encode()
    assert len(content) == len(said.encode())


def test_an_error_behind_a_call_is_an_error(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    said = f"{NOW}\n{CALL}"
    for stream in (False, True):
        engine.say(said, error=Overloaded("no memory left"), error_after=len(NOW) + 30)
        with pytest.raises(openai.APIError, match="no memory left"):
            gathered(ask(client, stream=True)) if stream else ask(client)


# -- the library's helpers ------------------------------------------------------------------------------------------


def test_parse_reads_arguments_as_the_callers_types(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say(CALL)
    answer = client.chat.completions.parse(model="scripted", messages=MESSAGES, tools=TOOLS)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Par<is", days=2)
    (request,) = engine.requests
    assert request.tools[0]["function"]["parameters"]["required"] == ["city", "days"]


def test_parse_with_a_form_and_tools_gives_either(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say('{"sunny": true}')
    engine.say(CALL)
    given: Any = {"model": "scripted", "messages": MESSAGES, "tools": TOOLS, "response_format": Report}
    text, call = (client.chat.completions.parse(**given).choices[0].message for _ in range(2))
    assert (text.parsed, text.tool_calls) == (Report(sunny=True), None)
    assert (call.parsed, len(call.tool_calls or ())) == (None, 1)


def test_parse_of_a_cut_answer_raises(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say('{"sunny": true}')
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="scripted", messages=MESSAGES, response_format=Report, max_completion_tokens=4
        )


def test_the_stream_helper_gathers_calls(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say(f"So:\n{CALL}\n{NOW}")
    with client.chat.completions.stream(model="scripted", messages=MESSAGES, tools=TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(one.name, one.index) for one in done] == [("weather", 0), ("now", 1)]
    assert final.choices[0].message.content == "So:"
    (first, second) = final.choices[0].message.tool_calls or ()
    assert first.function.parsed_arguments == Weather(city="Par<is", days=2)
    assert second.function.arguments == "{}"


def test_the_async_stream_helper(address: str, engine: ScriptedEngine) -> None:
    engine.say('{"sunny": false}')
    engine.say(CALL)

    async def scenario() -> tuple[Any, Any]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:

            async def final(**options: Any) -> Any:
                given: Any = {"model": "scripted", "messages": MESSAGES, **options}
                async with client.chat.completions.stream(**given) as stream:
                    kinds = {event.type async for event in stream}
                    assert "chunk" in kinds
                    return (await stream.get_final_completion()).choices[0].message

            return await final(response_format=Report), await final(tools=TOOLS)

    text, call = asyncio.run(scenario())
    assert text.parsed == Report(sunny=False)
    assert call.tool_calls[0].function.parsed_arguments.city == "Par<is"


def test_an_answer_goes_back_as_the_library_dumps_it(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say(f"Hm.</think>So:\n{CALL}", thinking=True)
    message = ask(client).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "21"}]}
    for dumped in (message.model_dump(), message.model_dump(exclude_none=True)):
        engine.say("Warm.")
        ask(client, messages=[*MESSAGES, dumped, result])
        sent = engine.requests[-1].messages or ()
        assert sent[1]["content"] == "So:"
        assert sent[1]["reasoning_content"] == "Hm."
        assert sent[1]["tool_calls"][0]["function"]["name"] == "weather"
        assert sent[2] == {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21"}
