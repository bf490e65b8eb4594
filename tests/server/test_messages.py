"""The official `anthropic` library as the other side, over a real socket: sync and async, whole and streamed."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import pydantic
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from zllm_jax.errors import Overloaded
from zllm_jax.server import create_app
from zllm_jax.server.calls import Calls
from zllm_jax.server.messages import Messages
from zllm_jax.testing import ScriptedEngine
from zllm_jax.values import NamedTool, Status

RunApp = Callable[[ASGIApp], AbstractContextManager[str]]
HELLO = "Grüße, 世界 👋!"
HM = "Hm, <tool_call> is markup.\n</think>\n\n"
ASKED: list[Any] = [{"role": "user", "content": "Say hello."}]
TOOLS: list[Any] = [
    {"name": "weather", "description": "The weather.", "input_schema": {"type": "object"}},
    {"name": "time", "input_schema": {"type": "object"}},
]


def called(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


TWO_CALLS = "I look.\n" + called("weather", city="Orléans", days=[1, 2]) + "\n" + called("time")


@pytest.fixture
def url(engine: ScriptedEngine, run_app: RunApp) -> Iterator[str]:
    """Where `engine` is served, with ids that are equal whenever they may be."""
    with run_app(create_app(engine, new_id=lambda: "0123")) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True) as each:
        yield each


def options(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": ASKED, "max_tokens": 512} | more


def test_whole(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.say(HELLO, cached_tokens=7)
    # The library has no sampling parameters any more; older ones have, and other clients.
    sampling = {"temperature": 0.5, "seed": 3}
    answer = client.messages.create(**options(system="Be brief.", extra_body=sampling))
    assert answer.content == [anthropic.types.TextBlock(type="text", text=HELLO)]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    assert answer.id == "msg_0123"
    assert answer._request_id == "req_0123"
    (request,) = engine.requests
    assert request.messages == ({"role": "system", "content": "Be brief."}, *ASKED)
    assert (request.max_tokens, request.sampling.temperature, request.sampling.seed) == (512, 0.5, 3)
    usage = answer.usage
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (7, len(HELLO.encode()))
    assert usage.input_tokens + 7 == engine.count_tokens(request)


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({}, {"text": HELLO}),
    "nothing": ({}, {"text": ""}),
    "limit": ({"max_tokens": 5}, {"text": HELLO}),
    "stop": ({"stop_sequences": ["世", "!"]}, {"text": HELLO}),
    "calls": ({"tools": TOOLS}, {"text": TWO_CALLS}),
    "thinking": ({"tools": TOOLS}, {"text": HM + TWO_CALLS, "thinking": True}),
    "thinking omitted": (
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"text": HM + HELLO, "thinking": True},
    ),
    "text after a call": ({"tools": TOOLS}, {"text": called("time") + " and so on"}),
    "stop beside calls": ({"tools": TOOLS, "stop_sequences": ["look"]}, {"text": TWO_CALLS}),
    "thinking cut": ({"max_tokens": 10}, {"text": HM, "thinking": True}),
    "refused": ({}, {"text": HELLO, "status": Status.REFUSED}),
    "prompt only": ({"max_tokens": 0}, {"text": HELLO}),
} | {f"call cut at {limit}": ({"tools": TOOLS, "max_tokens": limit}, {"text": TWO_CALLS}) for limit in (20, 61, 75, 88)}


@pytest.mark.parametrize("name", SAME)
def test_the_streams_final_message_is_the_whole_one(
    client: anthropic.Anthropic, engine: ScriptedEngine, name: str
) -> None:
    asked, script = SAME[name]
    for _ in range(2):
        engine.say(cached_tokens=4, **script)
    whole = client.messages.create(**options(**asked))
    with client.messages.stream(**options(**asked)) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.model_dump() == whole.model_dump()
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    starts, stops = kinds.count("content_block_start"), kinds.count("content_block_stop")
    assert starts == stops == len(whole.content)


def raw_events(url: str, **more: Any) -> list[tuple[str, dict[str, Any]]]:
    response = httpx.post(f"{url}/v1/messages?beta=true", json=options(stream=True, **more))
    assert response.headers["content-type"].startswith("text/event-stream")
    made = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        made.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return made


def test_the_order_of_events_is_exact(url: str, engine: ScriptedEngine) -> None:
    engine.say(HM + TWO_CALLS, thinking=True)
    told = raw_events(url, tools=TOOLS)
    assert all(name == data["type"] for name, data in told)
    names = [name for name, _ in told]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-2:] == ["message_delta", "message_stop"]
    open_, types = None, []
    for name, data in told[2:-2]:
        if name == "content_block_start":
            assert open_ is None
            open_ = data["index"]
            assert open_ == len(types)
            types.append(data["content_block"]["type"])
        else:
            assert data["index"] == open_
            open_ = None if name == "content_block_stop" else open_
    assert open_ is None
    assert types == ["thinking", "text", "tool_use", "tool_use"]


def test_calls(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.say(TWO_CALLS)
    answer = client.messages.create(**options(tools=TOOLS))
    said, weather, time = answer.content
    assert (answer.stop_reason, said.text) == ("tool_use", "I look.")
    assert (weather.name, weather.input) == ("weather", {"city": "Orléans", "days": [1, 2]})
    assert (time.name, time.input) == ("time", {})
    assert weather.id != time.id


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "time"}, NamedTool("time")),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_every_form_of_tool_choice(
    client: anthropic.Anthropic, engine: ScriptedEngine, choice: Any, expected: Any, alone: bool
) -> None:
    engine.say("x")
    more = {"disable_parallel_tool_use": alone} if choice["type"] != "none" else {}
    client.messages.create(**options(tools=TOOLS, tool_choice=choice | more))
    (request,) = engine.requests
    assert request.tool_choice == expected
    assert request.parallel_tool_calls is not (alone and bool(more))


def test_an_answer_goes_back_as_it_came(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.say(HM + TWO_CALLS, thinking=True)
    engine.say("Fine.")
    first = client.messages.create(**options(tools=TOOLS))
    *_, weather, time = first.content
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": weather.id, "content": "21"},
        {"type": "tool_result", "tool_use_id": time.id, "content": "none", "is_error": True},
    ]
    again = [*ASKED, first.to_param(), {"role": "user", "content": results}]
    client.messages.create(**options(messages=again, tools=TOOLS))
    asked, answered, *told = engine.requests[1].messages or ()
    assert asked == ASKED[0]
    assert answered["content"] == "I look."
    assert answered["reasoning_content"] == engine.envelopes[0].reasoning
    assert [call["id"] for call in answered["tool_calls"]] == [weather.id, time.id]
    assert [one["content"] for one in told] == ["21", "Error: none"]


class Place(pydantic.BaseModel):
    """What `parse` asks for."""

    city: str
    days: int


def test_parse_gives_the_callers_own_type(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    for _ in range(3):
        engine.say('{"city": "Rome", "days": 2}')
    answer = client.messages.parse(**options(output_format=Place))
    assert answer.parsed_output == Place(city="Rome", days=2)
    fence = engine.requests[0].fence
    assert fence is not None
    assert fence.schema["required"] == ["city", "days"]  # type: ignore[index]
    with client.messages.stream(**options(output_format=Place)) as stream:
        assert stream.get_final_message().parsed_output == Place(city="Rome", days=2)
    back = [*ASKED, answer.to_param(), *ASKED]
    client.messages.create(**options(messages=back))


def test_counting_is_exact(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.say(HELLO)
    asked = {"system": "Be brief.", "tools": TOOLS}
    counted = client.messages.count_tokens(model="scripted", messages=ASKED, **asked)  # type: ignore[arg-type]
    assert counted.input_tokens == client.messages.create(**options(**asked)).usage.input_tokens
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="other", messages=ASKED)
    with pytest.raises(anthropic.BadRequestError, match="messages is empty"):
        client.messages.count_tokens(model="scripted", messages=[])


def test_async(url: str, engine: ScriptedEngine) -> None:
    for _ in range(3):
        engine.say(TWO_CALLS)

    async def scenario() -> list[Any]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:

            async def streamed() -> Any:
                async with client.messages.stream(**options(tools=TOOLS)) as stream:
                    return await stream.get_final_message()

            count = await client.messages.count_tokens(model="scripted", messages=ASKED)
            assert count.input_tokens > 0
            return [await client.messages.create(**options(tools=TOOLS)), *await asyncio.gather(streamed(), streamed())]

    whole, *streams = asyncio.run(scenario())
    assert whole.stop_reason == "tool_use"
    assert [one.model_dump() for one in streams] == [whole.model_dump()] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_more_than_the_context_leaves_is_lowered_and_said(
    client: anthropic.Anthropic, engine: ScriptedEngine, stream: bool
) -> None:  # known fault 45
    engine.budget_tokens = 60
    left = 60 - client.messages.count_tokens(model="scripted", messages=ASKED).input_tokens
    engine.say("x" * 100)
    raw = client.messages.with_raw_response.create(**options(max_tokens=32_000, stream=stream), timeout=60)
    assert raw.headers["zllm-max-tokens"] == str(left)
    if stream:
        reasons = [event.delta.stop_reason for event in raw.parse() if event.type == "message_delta"]
    else:
        answer = raw.parse()
        reasons = [answer.stop_reason]
        assert answer.usage.output_tokens == left
    assert reasons == ["model_context_window_exceeded"]
    engine.say("x")
    raw = client.messages.with_raw_response.create(**options(max_tokens=left))
    assert "zllm-max-tokens" not in raw.headers


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_http_errors(client: anthropic.Anthropic, engine: ScriptedEngine, stream: bool) -> None:
    with pytest.raises(anthropic.NotFoundError, match="is not served here") as unknown:
        client.messages.create(**options(model="other", stream=stream))
    assert unknown.value.request_id == "req_0123"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.role"):
        client.messages.create(**options(messages=[{"role": "tool", "content": "?"}], stream=stream))
    engine.budget_tokens = 10
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 17 tokens > 9 maximum"):
        client.messages.create(**options(stream=stream))
    engine.budget_tokens = 4096
    engine.say(error=Overloaded("32 requests wait already"))
    with pytest.raises(anthropic.RateLimitError) as overloaded:
        client.messages.create(**options(stream=stream))
    assert int(overloaded.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"model": "scripted", "max_tokens": 5}', "messages is missing"),
        (b'{"model": "scripted", "messages": [{"role": "user", "content": "?"}]}', "max_tokens is missing"),
    ],
)
def test_malformed_bodies(url: str, body: bytes, says: str) -> None:  # known fault 54
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path.endswith("tokens") and "max_tokens" in says:
            continue
        response = httpx.post(url + path, content=body)
        assert response.status_code == 400
        told = response.json()
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
        assert says in told["error"]["message"]
        assert response.headers["request-id"] == "req_0123"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "code"), [(Status.FAULTED, 500), (Status.TRANSPORT_FAILURE, 504)])
def test_a_call_that_failed_at_once(
    client: anthropic.Anthropic, engine: ScriptedEngine, status: Status, code: int, stream: bool
) -> None:
    engine.say("", status=status)
    with pytest.raises(anthropic.InternalServerError) as failed:
        client.messages.create(**options(stream=stream))
    assert failed.value.status_code == code


def test_a_failure_on_the_way_is_an_error_event(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.say("abc", status=Status.REJECTED)
    engine.say("abc", error=Overloaded("no memory left"), error_after=2)
    for expected, reason in (("abc", "REJECTED"), ("ab", "no memory left")):
        with client.messages.stream(**options()) as stream:
            assert "".join(itertools.islice(stream.text_stream, len(expected))) == expected
            with pytest.raises(anthropic.APIStatusError, match=reason):
                stream.until_done()


def test_a_call_that_is_none_is_not_given_out(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    broken = '<tool_call>\n{"name": "time", "arguments": {"a": 1, "a": 2}}\n</tool_call>'
    for _ in range(2):
        engine.say(broken)
    with pytest.raises(anthropic.InternalServerError, match="is none"):
        client.messages.create(**options(tools=TOOLS))
    with client.messages.stream(**options(tools=TOOLS)) as stream, pytest.raises(anthropic.APIStatusError) as failed:
        stream.get_final_message()
    assert "is none" in str(failed.value)


def names_of_a_slow_stream(engine: ScriptedEngine) -> list[str]:
    """What a stream is told that may be silent for less long than a token takes."""
    endpoint = Messages(Calls(engine=engine, clock=lambda: 0.0), ping_s=0.03)
    app = Starlette(routes=[Route("/v1/messages", endpoint.respond, methods=["POST"])])

    async def ask() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return (await client.post("/v1/messages", json=options(stream=True))).text

    lines = asyncio.run(ask()).split("\n")
    return [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]


def test_a_silent_stream_is_kept_alive() -> None:
    engine = ScriptedEngine(step_s=0.1)
    engine.say("ab")
    names = names_of_a_slow_stream(engine)
    begins, ends = names.index("content_block_start"), names.index("content_block_stop")
    assert names[0] == "message_start"
    assert set(names[1:begins]) == {"ping"}
    assert begins > 2  # more than the one that every stream has
    assert "ping" in names[begins:ends]
    assert names[-1] == "message_stop"


def test_what_fails_behind_a_ping_is_an_event() -> None:
    engine = ScriptedEngine(step_s=0.1)
    engine.say("a", error=Overloaded("too late for a status"))
    names = names_of_a_slow_stream(engine)
    assert (names[0], set(names[1:-1]), names[-1]) == ("message_start", {"ping"}, "error")
    assert engine.envelopes[0].status is Status.FAULTED


def test_claude_code_is_served(client: anthropic.Anthropic, url: str, engine: ScriptedEngine, shared_dir: Path) -> None:
    # known faults 43, 44, 45, 47
    engine.budget_tokens = 200_000
    recorded = json.loads((shared_dir / "reference" / "clients" / "claude-code.json").read_bytes())
    for one in recorded:
        engine.say(HELLO)
        address = f"{url}{one['path']}?{one['query']}"
        response = httpx.post(address, json=one["body"] | {"model": "scripted"}, headers=one["headers"])
        assert response.status_code == 200, response.text
        assert response.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
        counted = {name: one["body"][name] for name in ("system", "messages", "tools", "thinking")}
        assert client.messages.count_tokens(model="scripted", **counted).input_tokens == engine.count_tokens(
            engine.requests[-1]
        )
    first, second, third = (request.messages or () for request in engine.requests)
    assert second[: len(first)] == first  # the system message came in blocks, and comes as a string
    assert third[: len(first)] == first
    assert third[len(first)]["content"] == 2 * second[len(first)]["content"]  # two turns merged
    assert third[len(first) + 1] == second[len(first) + 1]
    assert engine.requests[0].tools == engine.requests[1].tools == engine.requests[2].tools


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_call(url: str, engine: ScriptedEngine, stream: bool) -> None:
    engine.step_s = 0.05
    engine.say("x" * 400)
    where = urlsplit(url)
    raw = json.dumps(options(stream=stream)).encode()
    head = f"POST /v1/messages HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-length: {len(raw)}\r\n\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=10) as gone:
        gone.sendall(head.encode() + raw)
        if stream:
            assert gone.recv(4096).startswith(b"HTTP/1.1 200")
        while not engine.requests:
            time.sleep(0.01)
    (envelope,) = engine.wait_ended(1)
    assert envelope.status is Status.CANCELED
    assert len(envelope.tokens) < 100
