"""Responses through the official `openai` library, over a real socket: whole and streamed, kept and continued."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.types import ASGIApp

from tests.server.conftest import official
from zllm_jax.server import create_app
from zllm_jax.testing import ScriptedEngine
from zllm_jax.values import Status

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


def said(response: Any) -> dict[str, Any]:
    """A response without what differs from one to the next: ids and times."""
    given = json.loads(response.to_json())
    given.pop("id"), given.pop("created_at")
    for item in given["output"]:
        item.pop("id"), item.pop("call_id", None)
    return given  # type: ignore[no-any-return]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"text": "Grüße, 世界!"}, {}),
    "calls": ({"text": f"Let me see.{CALL}"}, {"tools": TOOLS}),
    "thinking": ({"text": "Well...</think>Yes.", "thinking": True}, {}),
    "thinking, calls": ({"text": f"Hm</think>\n\n{CALL}\n{CALL}", "thinking": True}, {"tools": TOOLS}),
    "cut": ({"text": "Grüße, 世界!"}, {"max_output_tokens": 5}),
    "cut call": ({"text": CALL}, {"tools": TOOLS, "max_output_tokens": 60}),
    "logprobs": ({"text": "ab世"}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    "empty": ({"text": ""}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI, engine: ScriptedEngine, name: str) -> None:
    script, options = CASES[name]
    engine.say(**script, cached_tokens=7)
    engine.say(**script, cached_tokens=7)
    whole = client.responses.create(model="scripted", input="Hi", **options)
    events = list(client.responses.create(model="scripted", input="Hi", stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final: Any = events[-1]
    assert said(final.response) == said(whole)
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == [item.to_dict() for item in final.response.output]
    assert whole.usage is not None
    assert whole.usage.input_tokens_details.cached_tokens == 7
    cut = name.startswith("cut")
    assert (whole.status, final.type) == (
        ("incomplete", "response.incomplete") if cut else ("completed", "response.completed")
    )
    if cut:
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"


def test_the_stream_helper(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say(f"Let me see.{CALL}")
    with client.responses.stream(model="scripted", input="Hi", tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert "response.function_call_arguments.done" in kinds
    message, call = final.output
    assert (message.type, call.type) == ("message", "function_call")
    assert call.status == "completed"
    assert json.loads(call.arguments) == {"city": "Paris"}


def test_a_call_that_the_limit_cut_is_not_whole(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say(CALL)
    events = list(client.responses.create(model="scripted", input="Hi", tools=TOOLS, max_output_tokens=60, stream=True))
    assert "response.function_call_arguments.done" not in {event.type for event in events}
    last: Any = events[-1]
    assert [item.status for item in last.response.output] == ["incomplete"]


@pytest.mark.parametrize("stored", [True, False])
def test_a_chain_goes_on_after_a_restart(
    engine: ScriptedEngine,
    run_app: Callable[[ASGIApp], contextlib.AbstractContextManager[str]],
    tmp_path: Path,
    stored: bool,
) -> None:
    path = tmp_path / "responses.sqlite"
    engine.say(CALL)
    with run_app(create_app(engine, history=path)) as url, official(url) as client:
        first = client.responses.create(
            model="scripted", input="Hi", instructions="Be brief.", tools=TOOLS, store=stored, prompt_cache_key="k"
        )
    result: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"}  # type: ignore[union-attr]
    again: dict[str, Any] = {"model": "scripted", "input": [result], "previous_response_id": first.id}
    engine.say("It is sunny.")
    with run_app(create_app(engine, history=path)) as url, official(url) as client:
        if not stored:
            with pytest.raises(openai.BadRequestError, match="not stored") as refused:
                client.responses.create(**again)
            assert refused.value.param == "previous_response_id"
            return
        second = client.responses.create(**again)
        assert second.output_text == "It is sunny."
        assert said(client.responses.retrieve(first.id)) == said(first)
        items = client.responses.input_items.list(second.id, order="asc").data
        assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
        assert client.responses.input_items.list(second.id, limit=1).data[0].type == "function_call_output"
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
    _, request = engine.requests
    assert request.conversation == "k"
    assert [message["role"] for message in request.messages or ()] == ["user", "assistant", "tool"]


def test_counting_is_exact(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.say("ok")
    given: dict[str, Any] = {"model": "scripted", "input": "Hi", "instructions": "Be brief."}
    counted = client.responses.input_tokens.count(**given)
    usage = client.responses.create(**given).usage
    assert usage is not None
    assert counted.input_tokens == usage.input_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": TOOLS}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 5000}, None),
    ],
)
def test_refusals_name_the_parameter(client: openai.OpenAI, options: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "scripted", "input": "Hi"} | options)
    if param is not None:
        assert refused.value.param == param


def test_failures(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="Hi")
    engine.say("", status=Status.FAULTED)
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="scripted", input="Hi")
    engine.say("abc", status=Status.REJECTED)
    with pytest.raises(openai.InternalServerError, match="REJECTED"):
        client.responses.create(model="scripted", input="Hi")
    engine.say("abc", status=Status.REJECTED)
    events: list[Any] = list(client.responses.create(model="scripted", input="Hi", stream=True))
    assert events[-1].type == "response.failed"
    assert "REJECTED" in events[-1].response.error.message


def test_the_oldest_turns_are_left_out_where_asked_for(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    history: list[Any] = [{"role": role, "content": "x" * 900} for _ in range(4) for role in ("user", "assistant")]
    given: dict[str, Any] = {"model": "scripted", "input": [*history, {"role": "user", "content": "Hi"}]}
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**given)
    engine.say("ok")
    assert client.responses.create(**given, truncation="auto", max_output_tokens=20).output_text == "ok"
    (request,) = engine.requests
    assert len(request.messages or ()) == 5


def test_cancelling_ends_a_stream(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.step_s = 0.02
    engine.say("x" * 500)
    events: list[Any] = []
    for event in client.responses.create(model="scripted", input="Hi", stream=True):
        events.append(event)
        if len(events) == 8:
            assert client.responses.cancel(events[0].response.id).status == "cancelled"
    assert events[-1].response.status == "cancelled"
    assert engine.wait_ended(1)[0].status is Status.CANCELED
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(events[0].response.id)


@pytest.mark.parametrize("number", range(3))
def test_codex_is_served(address: str, engine: ScriptedEngine, shared_dir: Path, number: int) -> None:
    import httpx

    engine.budget_tokens = 1_000_000
    recorded = json.loads((shared_dir / "reference" / "clients" / "codex.json").read_bytes())[number]
    engine.say("fine")
    body = recorded["body"] | {"model": "scripted"}
    response = httpx.post(f"{address}/v1/responses", json=body, headers={"accept": "text/event-stream"}, timeout=60)
    assert response.status_code == 200
    assert response.text.rstrip().splitlines()[-2] == "event: response.completed"
    assert "multi_agent_v1.close_agent" in {tool["function"]["name"] for tool in engine.requests[0].tools}
