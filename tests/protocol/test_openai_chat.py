"""Chat Completions as values: what a body becomes, and what it is refused for."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

from zllm_jax.errors import BudgetExceeded, InvalidRequest, Overloaded, UnknownModel
from zllm_jax.protocol import openai_chat_reply, openai_errors, openai_logprobs
from zllm_jax.protocol.openai_chat import ChatCall as Call
from zllm_jax.protocol.openai_chat import parse_request
from zllm_jax.protocol.openai_chat_reply import Reply
from zllm_jax.testing import ByteTokenizer
from zllm_jax.values import (
    AllowedTools,
    CallDelta,
    Delta,
    Envelope,
    Fence,
    NamedTool,
    Sampling,
    Status,
    Telemetry,
    TokenLogprob,
    ToolCall,
    ToolChoice,
    Usage,
)

USER = {"role": "user", "content": "Hi"}
FUNCTION_CALL = "messages[0].function_call"
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def with_function(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **more}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    several = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": several}}


def parse(**body: Any) -> Call:
    return parse_request({"model": "m", "messages": [USER]} | body, default_max_tokens=100)


def reply(**body: Any) -> Reply:
    return Reply(call=parse(**body), completion_id="id", created=1, token_bytes=ByteTokenizer().token_bytes)


def test_defaults() -> None:
    call = parse()
    assert (call.model, call.stream, call.include_usage, call.limited) == ("m", False, False, False)
    assert call.request.messages == (USER,)
    assert call.request.max_tokens == 100
    assert call.request.sampling == Sampling()


def test_every_parameter_arrives() -> None:
    call = parse(
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        seed=-3,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"65": -100, "7": 1.5},
        logprobs=True,
        top_logprobs=5,
        stop="x",
        ignore_eos=True,
        prompt_cache_key="conversation 1",
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    assert call.request.sampling == Sampling(
        temperature=0,
        top_p=0.5,
        top_k=4,
        min_p=0.1,
        seed=-3,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias=((7, 1.5), (65, -100)),
        logprobs=5,
    )
    assert (call.request.max_tokens, call.limited) == (7, True)
    assert call.request.stop == ("x",)
    assert call.request.ignore_eos
    assert call.request.conversation == "conversation 1"
    assert (call.stream, call.include_usage) == (True, True)


def test_null_is_absent_and_hints_are_taken() -> None:
    nothing = dict.fromkeys(["temperature", "stop", "tools", "seed", "logit_bias", "stream", "max_tokens", "n"])
    hints = {"user": "u", "metadata": {"a": "b"}, "store": False, "n": 1, "tools": [], "tool_choice": "auto"}
    hints |= {"safety_identifier": "s", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}}
    hints |= {"service_tier": "auto", "modalities": ["text"], "verbosity": "medium", "functions": []}
    assert parse(**nothing) == parse() == parse(**hints, response_format={"type": "text"}, parallel_tool_calls=True)


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_how_much_a_model_reasons_is_its_own(effort: str) -> None:
    assert parse(reasoning_effort=effort) == parse()


def test_every_parameter_of_the_official_client_is_known() -> None:
    """Each acts, is a hint, or is refused by name as what it is: none is taken for a mistake."""
    names = get_type_hints(CompletionCreateParamsNonStreaming).keys() - {"model", "messages"}
    assert {"n", "tools", "reasoning_effort", "moderation"} <= names
    for name in names:
        try:
            parse(**{name: object()})
        except InvalidRequest as refused:
            said = str(refused)
        else:
            said = "a hint"
        assert "unknown parameter" not in said, name


def test_refusals_come_back_as_what_was_said() -> None:
    parts = [{"type": "text", "text": "Well, "}, {"type": "refusal", "refusal": "no."}]
    for answer in ({"content": parts}, {"content": "Well, ", "refusal": "no."}, {"refusal": "Well, no."}):
        request = parse(messages=[USER, {"role": "assistant", "content": None, **answer}]).request
        assert request.messages == (USER, {"role": "assistant", "content": "Well, no."})


def test_where_a_cache_might_cut_changes_no_text() -> None:
    hinted = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    hinted[0] |= {"prompt_cache_breakpoint": {"mode": "explicit"}}
    assert parse(messages=[{"role": "user", "content": hinted}]) == parse()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a b", "a b"),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a b"}], "a b"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": " b"}], "a b"),
    ],
)
def test_content_parts_equal_the_text(content: Any, text: str) -> None:
    assert parse(messages=[{"role": "user", "content": content}]) == parse(messages=[{"role": "user", "content": text}])


def test_roles_and_an_answer_sent_back() -> None:
    # What the official client's `message.model_dump()` gives.
    answer = {"role": "assistant", "content": "Hello", "refusal": None, "annotations": [], "audio": None}
    answer |= {"function_call": None, "tool_calls": None}
    call = parse(messages=[{"role": "developer", "content": "d"}, USER | {"name": "Ann"}, answer, USER])
    assert call.request.messages == (
        {"role": "system", "content": "d"},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": "Hello"},
        USER,
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [USER, "Hi"]}, "messages[1]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [USER | {"role": "function"}]}, "messages[0].role"),
        ({"messages": [USER | {"role": "tool"}]}, "messages[0].tool_call_id"),
        ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [USER | {"role": ["user"]}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER | {"content": 3}]}, "messages[0].content"),
        ({"messages": [USER | {"content": ["Hi"]}]}, "messages[0].content[0].type"),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER | {"content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [USER | {"name": 3}]}, "messages[0].name"),
        ({"messages": [USER | {"weight": 1}]}, "messages[0].weight"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].type"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"id": None}]}]}, "messages[0].tool_calls[0].id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 2**40}, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 2**70}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": True}, "frequency_penalty"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "1"}}, "logit_bias"),
        ({"logit_bias": {"1" * 30: 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": True}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"pace": 1}}, "stream_options.pace"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"n": "2"}, "n"),
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "color": 1}}]}, "tools[0].function.color"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed("sometimes", "f")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "g")}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "f") | {"mode": "auto"}}, "tool_choice.mode"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]}, FUNCTION_CALL),
        ({"messages": [USER | {"refusal": "No."}]}, "messages[0].refusal"),
        ({"messages": [USER | {"content": [{"type": "refusal", "refusal": "No."}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER | {"content": [{"type": "text", "text": "a", "bold": 1}]}]}, "messages[0].content[0].bold"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"reasoning_effort": "little"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"audio": {"voice": "v", "format": "wav"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "ebnf": ""}}},
            "response_format.json_schema.ebnf",
        ),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"prediction": {}}, "prediction"),
        ({"prompt_cache_key": 3}, "prompt_cache_key"),
        ({"temprature": 1}, "temprature"),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, dict) else None,
)
def test_refusals_name_the_parameter(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(**body)
    assert refused.value.param == param
    assert len(str(refused.value)) < 600
    error = openai_errors.error_object(refused.value)["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_body_is_an_object(body: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        parse_request(body, default_max_tokens=1)


@pytest.mark.parametrize(
    ("status", "reason"),
    [(Status.COMPLETED, "stop"), (Status.TRUNCATED, "length"), (Status.REFUSED, "content_filter")],
)
def test_finish_reasons(status: Status, reason: str) -> None:
    envelope = Envelope(request_id="r", status=status, text="a")
    assert openai_errors.failure(envelope) is None
    assert reply().completion(envelope)["choices"][0]["finish_reason"] == reason
    (last,) = reply().chunks(Delta(envelope=envelope))
    assert last["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("status", [Status.TRANSPORT_FAILURE, Status.REJECTED, Status.CANCELED, Status.FAULTED])
def test_other_statuses_release_nothing(status: Status) -> None:
    body = openai_errors.failure(Envelope(request_id="r", status=status, text="secret", error="why"))
    assert body is not None
    assert body["error"]["message"] == f"the call ended as {status.value}: why"
    assert body["error"]["code"] == status.value.lower()


def test_a_deadline_is_called_one() -> None:
    envelope = Envelope(request_id="r", status=Status.TRANSPORT_FAILURE, telemetry=Telemetry(deadline_exceeded=True))
    body = openai_errors.failure(envelope)
    assert body is not None
    assert body["error"]["code"] == "deadline_exceeded"


def test_usage_counts_cached_tokens_once() -> None:
    usage = openai_chat_reply.usage_object(Usage(prompt_tokens=10, cached_tokens=8, generated_tokens=3))
    assert usage["prompt_tokens"] == 10
    assert usage["total_tokens"] == 13
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}


def test_tools_and_what_was_called_before_arrive() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "21"}]}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Ask f."}
    request = parse(messages=[USER, called, result], tools=[TOOL], parallel_tool_calls=False).request
    assert request.tools == (TOOL,)
    assert (request.tool_choice, request.parallel_tool_calls) == ("auto", False)
    assert request.messages == (
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "Ask f.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21"},
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, NamedTool("f")),
        (allowed("auto", "f"), AllowedTools(("f",))),
        (allowed("required", "f"), AllowedTools(("f",), required=True)),
    ],
)
def test_every_form_of_tool_choice(choice: Any, expected: ToolChoice) -> None:
    assert parse(tools=[TOOL], tool_choice=choice).request.tool_choice == expected


def test_the_form_of_an_answer() -> None:
    def form(**given: Any) -> Fence | None:
        return parse(response_format=given).request.fence

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert form(type="text") is None
    assert form(type="json_object") == Fence(schema={"type": "object"})
    assert form(type="json_schema", json_schema={"name": "a", "schema": schema, "strict": True}) == Fence(schema=schema)
    lenient = form(type="json_schema", json_schema={"name": "a", "schema": schema, "strict": False})
    assert lenient == Fence(schema=schema, relax=True)


def test_calls_are_told_whole_and_in_pieces() -> None:
    call = ToolCall("call_1", "f", {"a": "é", "b": [1]})
    envelope = Envelope(request_id="r", status=Status.COMPLETED, reasoning="Hm.", calls=(call,))
    (choice,) = reply(tools=[TOOL]).completion(envelope)["choices"]
    function = {"name": "f", "arguments": '{"a": "é", "b": [1]}'}
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    pieces = (
        CallDelta(index=0, id="call_1", name="f"),
        CallDelta(index=0, arguments='{"a": "é", '),
        CallDelta(index=0, arguments='"b": [1]}', done=True),
    )
    chunks = list(reply(tools=[TOOL]).chunks(Delta(reasoning="Hm.", calls=pieces, envelope=envelope)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"reasoning_content": "Hm."}
    told = [delta["tool_calls"][0] for delta in deltas[1:-1]]
    assert told[0] == {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert "".join(one["function"]["arguments"] for one in told) == function["arguments"]
    assert all(one.keys() == {"index", "function"} for one in told[1:])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_cut_answer_is_no_call() -> None:
    call = ToolCall("call_1", "f", {})
    envelope = Envelope(request_id="r", status=Status.TRUNCATED, calls=(call,))
    assert reply(tools=[TOOL]).completion(envelope)["choices"][0]["finish_reason"] == "length"


def test_logprobs_one_entry_a_token_and_no_infinity() -> None:
    half = TokenLogprob(token=0xC3, logprob=-math.inf, top=((0xC3, -math.inf), (65, -1.0)))
    (chunk,) = reply(logprobs=True, top_logprobs=2).chunks(Delta(text="", tokens=(0xC3,), logprobs=(half,)))
    (entry,) = chunk["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("\ufffd", [0xC3], openai_logprobs.MIN_LOGPROB)
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
        ("\ufffd", openai_logprobs.MIN_LOGPROB),
        ("A", -1.0),
    ]


def test_a_delta_without_text_becomes_no_chunk() -> None:
    assert list(reply().chunks(Delta(tokens=(0xC3,)))) == []


@pytest.mark.parametrize(
    ("error", "kind", "code", "param"),
    [
        (BudgetExceeded(3, 4, 5), "invalid_request_error", "context_length_exceeded", "max_tokens"),
        (UnknownModel("no such model"), "invalid_request_error", "model_not_found", None),
        (Overloaded("full"), "rate_limit_error", "overloaded", None),
        (KeyError("private detail"), "server_error", "internal_error", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_error_objects(error: Exception, kind: str, code: str, param: str | None) -> None:
    body = openai_errors.error_object(error)["error"]
    assert (body["type"], body["code"], body["param"]) == (kind, code, param)
    assert ("private" in body["message"]) is False
