"""Several answers to one prompt: each as it would be alone, side by side, and ended together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import openai
import pytest

from tests.server.test_disconnect import connect
from zllm_jax.errors import Overloaded
from zllm_jax.protocol.openai_chat import parse_request
from zllm_jax.server.calls import Calls
from zllm_jax.server.choices import open_choices
from zllm_jax.testing import ScriptedEngine
from zllm_jax.values import Status

MESSAGES = [{"role": "user", "content": "Say something."}]
SAID = ("First.", "The second one.", "3")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{address}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as each:
        yield each


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "scripted", "messages": MESSAGES, "n": 3} | options)


def test_whole(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for number, text in enumerate(SAID):
        engine.say(text, cached_tokens=5 if number == 0 else 20)
    answer = ask(client, seed=7)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == list(enumerate(SAID))
    assert answer.usage.prompt_tokens == engine.count_tokens(engine.requests[0])  # once
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert answer.usage.completion_tokens == sum(map(len, SAID))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    first, *others = engine.requests
    assert first.share_prompt
    assert not any(one.share_prompt for one in others)


def test_streamed_choices_interleave_and_equal_the_whole(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for text in SAID * 2:
        engine.say(text)
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    order = [choice.index for chunk in chunks for choice in chunk.choices]
    assert sum(a != b for a, b in pairwise(order)) > 10
    for choice in whole.choices:
        pieces = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [choice.finish_reason]
        assert pieces[0].delta.role == "assistant"


def test_the_stream_helper(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for text in SAID:
        engine.say(text)
    with client.chat.completions.stream(model="scripted", messages=MESSAGES, n=3) as stream:  # type: ignore[arg-type]
        stream.until_done()
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == list(SAID)


def test_each_choice_has_a_seed_that_follows_from_the_requests() -> None:
    def seeds(**body: Any) -> list[int | None]:
        call = parse_request({"model": "m", "messages": MESSAGES, **body}, default_max_tokens=9, request_id="id")
        return [choice.request.sampling.seed for choice in call.choices()]

    three = seeds(n=3, seed=7)
    assert three == seeds(n=3, seed=7)
    assert three[:2] == seeds(n=2, seed=7)
    assert three[:1] == seeds(seed=7) == [7]
    assert len(set(three)) == 3
    assert seeds(n=2) == [None, None]
    assert all(seed is not None and 0 <= seed < 2**64 for seed in seeds(n=16, seed=-3)[1:])


def test_calls_of_different_choices_have_different_ids(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for _ in range(3):
        engine.say('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    answer = ask(client, tools=[TOOL])
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels_all(address: str, engine: ScriptedEngine, stream: bool) -> None:
    engine.step_s = 0.02
    for _ in range(3):
        engine.say("x" * 400)
    with connect(address, {"model": "scripted", "messages": MESSAGES, "n": 3, "stream": stream}) as one:
        if stream:
            seen = b""
            while b'"index":2,"delta":{"content":"x"}' not in seen:
                seen += one.recv(4096)
        else:
            while len(engine.requests) < 3:
                pass
    ended = engine.wait_ended(3)
    assert [envelope.status for envelope in ended] == [Status.CANCELED] * 3
    assert all(len(envelope.tokens) < 300 for envelope in ended)


def test_one_that_fails_fails_the_request(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.step_s = 0.02
    scripts: tuple[dict[str, Any], ...] = ({"error": Overloaded("no room for it")}, {"status": Status.FAULTED})
    for failing, expected in zip(scripts, (openai.RateLimitError, openai.InternalServerError), strict=True):
        before = len(engine.envelopes)
        engine.say("x" * 400)
        engine.say("y", **failing)
        engine.say("z" * 400)
        with pytest.raises(expected):
            ask(client)
        ended = engine.wait_ended(before + 3)[before:]
        assert sorted(envelope.status for envelope in ended)[:2] == [Status.CANCELED] * 2


def test_one_that_fails_ends_the_stream_with_an_error(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.step_s = 0.01
    engine.say("x" * 400)
    engine.say("yy", error=Overloaded("no room for it"), error_after=1)
    engine.say("z" * 400)
    with pytest.raises(openai.APIError, match="no room for it"):
        list(ask(client, stream=True))
    assert len(engine.wait_ended(3)) == 3


def test_a_reader_that_stops_holds_few_deltas_and_closing_ends_all() -> None:
    engine = ScriptedEngine()
    for _ in range(3):
        engine.say("x" * 1000)
    body = {"model": "scripted", "messages": MESSAGES, "n": 3}
    call = parse_request(body, default_max_tokens=1000)

    async def scenario() -> None:
        calls = Calls(engine=engine, clock=lambda: 0.0)
        _, deltas = await open_choices(calls, call.choices())
        async with aclosing(deltas):
            for _ in range(12):
                await anext(deltas)
            await asyncio.sleep(0.1)

    asyncio.run(scenario())
    assert len(engine.envelopes) == 3
    assert sum(len(envelope.tokens) for envelope in engine.envelopes) < 30


def test_a_choice_of_no_token_is_one(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    for text in ("", "b", ""):
        engine.say(text)
    assert [choice.message.content for choice in ask(client).choices] == ["", "b", ""]


def test_refusals_come_once(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, max_tokens=5000, stream=True)
    assert json.loads(refused.value.response.content)["error"]["code"] == "context_length_exceeded"
