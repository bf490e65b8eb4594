"""Messages, the way back: the events of a stream in their order, and the message that they add up to."""

from __future__ import annotations

from typing import Any

import pytest

from zllm_jax.errors import BudgetExceeded, InvalidRequest, Overloaded, UnknownModel, ZllmError
from zllm_jax.protocol import anthropic_errors
from zllm_jax.protocol.anthropic_messages import parse_request
from zllm_jax.protocol.anthropic_messages_reply import SIGNATURE, Reply, message
from zllm_jax.values import CallDelta, Delta, Envelope, Status, Telemetry, ToolCall, Usage

USAGE = Usage(prompt_tokens=10, cached_tokens=7, generated_tokens=5)
CALL = ToolCall("call_1", "f", {"a": 1})
CALLED = (
    CallDelta(index=0, id="call_1", name="f"),
    CallDelta(index=0, arguments='{"a"'),
    CallDelta(index=0, arguments=": 1}"),
    CallDelta(index=0, done=True),
)


def reply(**body: Any) -> Reply:
    call = parse_request({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]} | body)
    return Reply(call, "msg_1")


def ended(status: Status = Status.COMPLETED, **given: Any) -> Envelope:
    return Envelope(request_id="msg_1", status=status, **{"usage": USAGE} | given)


def events(*deltas: Delta, **body: Any) -> list[dict[str, Any]]:
    one = reply(**body)
    return [one.opening(), *(event for delta in deltas for event in one.events(delta))]


def outline(told: list[dict[str, Any]]) -> list[str]:
    """Each event in a word: blocks by their type, pieces by theirs, with the index."""
    made = []
    for event in told:
        inner = event.get("content_block") or event.get("delta") or {}
        made.append(
            " ".join(str(one) for one in (event["type"], event.get("index"), inner.get("type")) if one is not None)
        )
    return made


def test_each_kind_is_a_block_of_its_own_and_the_order_is_exact() -> None:
    told = events(
        Delta(reasoning="Hm"),
        Delta(reasoning="."),
        Delta(text="Let me", calls=CALLED[:2]),
        Delta(calls=CALLED[2:]),
        Delta(text="Done"),
        Delta(envelope=ended(calls=(CALL,))),
    )
    assert outline(told) == [
        "message_start",
        "content_block_start 0 thinking",
        "content_block_delta 0 thinking_delta",
        "content_block_delta 0 thinking_delta",
        "content_block_delta 0 signature_delta",
        "content_block_stop 0",
        "content_block_start 1 text",
        "content_block_delta 1 text_delta",
        "content_block_stop 1",
        "content_block_start 2 tool_use",
        "content_block_delta 2 input_json_delta",
        "content_block_delta 2 input_json_delta",
        "content_block_stop 2",
        "content_block_start 3 text",
        "content_block_delta 3 text_delta",
        "content_block_stop 3",
        "message_delta",
        "message_stop",
    ]
    assert message(told) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE},
            {"type": "text", "text": "Let me"},
            {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
            {"type": "text", "text": "Done"},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 7,
            "output_tokens": 5,
        },
    }


def test_an_answer_of_nothing() -> None:
    told = events(Delta(tokens=(0xC3,)), Delta(envelope=ended()))
    assert outline(told) == ["message_start", "message_delta", "message_stop"]
    assert message(told)["content"] == []


@pytest.mark.parametrize(
    ("envelope", "reason", "sequence"),
    [
        (ended(), "end_turn", None),
        (ended(telemetry=Telemetry(finish="stop", stop_text="END")), "stop_sequence", "END"),
        (ended(calls=(CALL,)), "tool_use", None),
        (ended(Status.TRUNCATED), "max_tokens", None),
        (ended(Status.TRUNCATED, calls=(CALL,)), "max_tokens", None),
        (ended(Status.REFUSED), "refusal", None),
        # The limit was lowered to what the context left, and this is what stopped it.
        (
            ended(Status.TRUNCATED, usage=Usage(prompt_tokens=10, generated_tokens=4)),
            "model_context_window_exceeded",
            None,
        ),
    ],
)
def test_stop_reasons(envelope: Envelope, reason: str, sequence: str | None) -> None:  # known faults 51, 54
    made = message(events(Delta(text="a"), Delta(envelope=envelope)))
    assert (made["stop_reason"], made["stop_sequence"]) == (reason, sequence)


def test_the_prompts_counts_add_up() -> None:  # known fault 41
    for cached in (0, 7, 9):
        usage = Usage(prompt_tokens=10, cached_tokens=cached, generated_tokens=1)
        counts = message(events(Delta(envelope=ended(usage=usage))))["usage"]
        assert counts["cache_read_input_tokens"] == cached
        assert sum(counts[name] for name in counts if name.endswith("input_tokens")) == 10


def test_a_call_that_the_limit_cut_is_no_whole_one() -> None:  # known fault 23
    cut = (CALLED[0], CallDelta(index=0, arguments='{"a": 1, "b": "hal'))
    told = events(Delta(calls=cut), Delta(envelope=ended(Status.TRUNCATED)))
    assert outline(told)[-3:] == ["content_block_stop 0", "message_delta", "message_stop"]
    made = message(told)
    assert made["stop_reason"] == "max_tokens"
    assert made["content"] == [{"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}}]


def test_a_call_that_is_none() -> None:  # known fault 26
    never_begun = Delta(calls=(CallDelta(index=0, malformed="no JSON: ..."),))
    assert message(events(never_begun, Delta(envelope=ended())))["content"] == []
    begun = Delta(calls=(*CALLED[:2], CallDelta(index=0, malformed="no JSON: ...")))
    with pytest.raises(ZllmError, match="no JSON"):
        events(begun)


@pytest.mark.parametrize(
    ("config", "thinking"),
    [
        ({"type": "adaptive"}, [{"type": "thinking", "thinking": "Hm", "signature": SIGNATURE}]),
        (
            {"type": "adaptive", "display": "omitted"},
            [{"type": "thinking", "thinking": "", "signature": SIGNATURE}],
        ),
        ({"type": "disabled"}, []),
    ],
)
def test_thinking_is_shown_as_asked(config: dict[str, Any], thinking: list[Any]) -> None:
    made = message(events(Delta(reasoning="Hm", text="a"), Delta(envelope=ended()), thinking=config))
    assert made["content"] == [*thinking, {"type": "text", "text": "a"}]


def test_a_prompt_computed_ahead_has_no_answer() -> None:
    made = message(events(Delta(text="a"), Delta(envelope=ended(Status.TRUNCATED)), max_tokens=0))
    assert (made["content"], made["stop_reason"], made["usage"]["output_tokens"]) == ([], "max_tokens", 0)


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (BudgetExceeded(5000, 4, 4096), "invalid_request_error", "prompt is too long: 5000 tokens > 4095 maximum"),
        (InvalidRequest("is odd", param="top_p"), "invalid_request_error", "top_p: is odd"),
        (InvalidRequest("cannot be kept", param="fence"), "invalid_request_error", "output_config.format: cannot"),
        (UnknownModel("no such model"), "not_found_error", "no such model"),
        (Overloaded("full"), "rate_limit_error", "full"),
        (KeyError("private detail"), "api_error", "internal error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_error_objects(error: Exception, kind: str, says: str) -> None:
    body = anthropic_errors.error_object(error)
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["error"]["message"].startswith(says)
