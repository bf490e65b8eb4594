"""The official `openai` library as the other side, over a real socket: sync and async, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from zllm_jax.errors import Overloaded
from zllm_jax.server import create_app
from zllm_jax.testing import ScriptedEngine
from zllm_jax.values import Status

HELLO = "Grüße, 世界 👋!"
MESSAGES = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "scripted", "messages": MESSAGES} | options)


def joined(chunks: list[Any]) -> tuple[str, str | None]:
    """Text and finish reason of a stream."""
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason


def test_whole(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say(HELLO, cached_tokens=7)
    answer = ask(client, temperature=0.5, seed=3, max_completion_tokens=64)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == HELLO
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 7
    assert answer.usage.completion_tokens == len(HELLO.encode())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    (request,) = engine.requests
    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say hello."},
    )
    assert (request.max_tokens, request.sampling.temperature, request.sampling.seed) == (64, 0.5, 3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 5},
        {"stop": ["世", "!"]},
        {"logprobs": True, "top_logprobs": 2},
        {"max_tokens": 5, "logprobs": True},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_stream_equals_whole(client: openai.OpenAI, engine: ScriptedEngine, options: dict[str, Any]) -> None:
    engine.say(HELLO, cached_tokens=7)
    engine.say(HELLO, cached_tokens=7)
    whole = ask(client, **options)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}, **options))
    text, finish_reason = joined(chunks)
    assert (text, finish_reason) == (whole.choices[0].message.content, whole.choices[0].finish_reason)
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {(chunk.id, chunk.created, chunk.model) for chunk in chunks} == {
        (chunks[0].id, chunks[0].created, "scripted")
    }
    if options.get("logprobs"):
        streamed = [
            entry for c in chunks if c.choices and c.choices[0].logprobs for entry in c.choices[0].logprobs.content
        ]
        assert streamed == whole.choices[0].logprobs.content
        assert len(streamed) == whole.usage.completion_tokens  # one entry a token, inside a character too
        assert bytes(byte for entry in streamed for byte in entry.bytes).decode(errors="replace") == text
    else:
        assert whole.choices[0].logprobs is None


def test_the_stream_helper(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say(HELLO)
    with client.chat.completions.stream(model="scripted", messages=MESSAGES) as stream:  # type: ignore[arg-type]
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds[-1] == "content.done"
    assert final.choices[0].message.content == HELLO


def test_async(address: str, engine: ScriptedEngine) -> None:
    for _ in range(3):
        engine.say(HELLO)

    async def scenario() -> tuple[str | None, str, str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            whole = await ask(client)  # type: ignore[arg-type]

            async def streamed() -> str:
                stream = await ask(client, stream=True)  # type: ignore[arg-type]
                return joined([chunk async for chunk in stream])[0]

            first, second = await asyncio.gather(streamed(), streamed())
            return whole.choices[0].message.content, first, second

    assert asyncio.run(scenario()) == (HELLO, HELLO, HELLO)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_http_errors(client: openai.OpenAI, engine: ScriptedEngine, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, model="other", stream=stream)
    assert unknown.value.code == "model_not_found"

    with pytest.raises(openai.BadRequestError) as tools:
        ask(client, tools=[{"type": "web_search"}], stream=stream)
    assert tools.value.param == "tools[0].type"

    with pytest.raises(openai.BadRequestError) as budget:
        ask(client, max_tokens=5000, stream=stream)
    assert budget.value.code == "context_length_exceeded"
    assert "4096" in budget.value.message

    engine.say(error=Overloaded("32 requests wait already"))
    with pytest.raises(openai.RateLimitError) as overloaded:
        ask(client, stream=stream)
    assert int(overloaded.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "code"), [(Status.FAULTED, 500), (Status.TRANSPORT_FAILURE, 504)])
def test_a_call_that_failed_at_once(
    client: openai.OpenAI, engine: ScriptedEngine, status: Status, code: int, stream: bool
) -> None:
    engine.say("", status=status)
    with pytest.raises(openai.InternalServerError) as failed:
        ask(client, stream=stream)
    assert failed.value.status_code == code


def test_a_failure_on_the_way_is_an_error_event(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say("abc", status=Status.REJECTED)
    engine.say("abc", error=Overloaded("no memory left"), error_after=2)
    for expected, message in (("abc", "REJECTED"), ("ab", "no memory left")):
        chunks = ask(client, stream=True)
        seen = [next(chunks).choices[0].delta.content for _ in range(1 + len(expected))]
        assert "".join(seen) == expected
        with pytest.raises(openai.APIError, match=message):
            next(chunks)


def test_without_a_limit_a_call_gets_what_fits(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.budget_tokens = 60
    engine.say("x" * 100)
    answer = ask(client)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 60


def test_api_key(engine: ScriptedEngine, run_app: Any) -> None:
    engine.say(HELLO)
    with (
        run_app(create_app(engine, api_key="sesame")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
    ):
        with pytest.raises(openai.AuthenticationError) as refused:
            ask(client)
        assert refused.value.code == "invalid_api_key"
        assert ask(client.with_options(api_key="sesame")).choices[0].message.content == HELLO
