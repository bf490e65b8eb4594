"""Requests with tools: what is asked of the model, what is read of its output, and what comes back in the next turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine.tool_talk import CALL, CHATML, NOW, TOOLS, USER, Make, answered, asked, ready
from zllm_jax.dialect import ChatTemplate, call_message
from zllm_jax.dialect.dsml import dsml_layout
from zllm_jax.dialect.tools import render_calls
from zllm_jax.errors import InvalidRequest
from zllm_jax.values import CallDelta, Delta, Fence, NamedTool, Status, ToolCall


@pytest.mark.parametrize("fenced", [False, True])
def test_text_and_calls_come_apart(talker: Make, fenced: bool) -> None:
    whole = "Let me see.\n" + CALL + NOW
    for size in (2, 7, len(whole)):
        one = ready(talker, *(whole[i : i + size] for i in range(0, len(whole), size)), fenced=fenced)
        _, envelope = answered(one, asked(max_tokens=200))
        assert (envelope.text, envelope.status) == ("Let me see.", Status.COMPLETED)
        assert [(call.name, call.arguments) for call in envelope.calls] == [("weather", {"city": "Oslo"}), ("now", {})]
        assert envelope.telemetry.tool_dialect == "chatml"


def test_arguments_are_streamed_as_they_come(talker: Make) -> None:
    pieces = ("Yes.", "\n<tool_call>\n", '{"name": "weather", "arguments": ', '{"city": "', "Os", "lo", '"}}')
    one = ready(talker, *pieces, decode_steps=1)
    deltas, envelope = answered(one, asked())
    pieces = tuple(piece.arguments for delta in deltas for piece in delta.calls)
    assert pieces == ("", '{"city": "', "Os", "lo", '"}')
    assert envelope.calls == ()  # its end never came


def test_a_call_cut_by_the_limit_is_truncated_and_none(talker: Make) -> None:
    one = ready(talker, NOW, *CALL)
    for limit in range(2, len(CALL)):
        _, envelope = answered(one, asked(max_tokens=limit))
        assert envelope.status is Status.TRUNCATED
        assert [call.name for call in envelope.calls] == ["now"]
        assert "<tool_call>".startswith(envelope.text)  # so much may still have been text


def test_a_call_cut_within_a_character_is_cut_and_not_malformed(talker: Make) -> None:
    whole = render_calls(dsml_layout(), [ToolCall("", "now", {"a": 1})]).encode()
    cut = whole.index("</｜DSML｜invoke".encode()) + 3  # inside its first mark
    one = ready(talker, whole[:cut], whole[cut:], fenced=False)
    _, envelope = answered(one, asked(tool_dialect="dsml", max_tokens=1))
    assert (envelope.status, envelope.calls, envelope.text) == (Status.TRUNCATED, (), "")
    assert envelope.telemetry.malformed_calls == ()


def test_the_ids_of_calls_follow_from_the_request(talker: Make) -> None:
    one = ready(talker, CALL, NOW)
    ids = [[call.id for call in answered(one, asked(request_id=name))[1].calls] for name in ("a", "a", "b")]
    assert ids[0] == ids[1]
    assert len({*ids[0], *ids[2]}) == 4
    one.say(NOW)
    drawn = [answered(one, asked(messages=({"role": "user", "content": text},)))[1].calls[0].id for text in "xyx"]
    assert drawn[0] != drawn[1]


def test_a_stop_sequence_is_looked_for_in_the_text_only(talker: Make) -> None:
    one = ready(talker, "So: ", NOW, "\n<tool_call>\n", CALL[12:])
    _, envelope = answered(one, asked(stop=("Oslo", "arguments", "</tool_call>", ": \n")))
    assert [call.name for call in envelope.calls] == ["now", "weather"]
    assert (envelope.text, envelope.telemetry.finish) == ("So: ", "eos")
    one.say("So be it. ", "Or", " not.", NOW)
    _, envelope = answered(one, asked(stop=("Or not",)))
    assert (envelope.text, envelope.calls, envelope.telemetry.finish) == ("So be it. ", (), "stop")


def test_what_is_no_call_is_told(talker: Make) -> None:
    one = ready(talker, NOW.replace("{}", "{]"), " So.")
    deltas, envelope = answered(one, asked())
    (told,) = envelope.telemetry.malformed_calls
    assert "no JSON" in told
    assert '"now"' in told
    assert any(piece.malformed == told for delta in deltas for piece in delta.calls)
    assert (envelope.calls, envelope.text) == ((), " So.")


def test_calls_that_come_back_continue_what_was_sampled(talker: Make) -> None:
    one = ready(talker, "Let me ", "see.", "\n", CALL, fenced=True)
    _, envelope = answered(one, asked())
    sampled = len(envelope.tokens)
    (call,) = envelope.calls
    spelled = {"id": call.id, "function": {"name": call.name, "arguments": '{ "city" : "Oslo" }'}}
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    for message in (call_message(call), spelled):
        history = (USER, {"role": "assistant", "content": envelope.text, "tool_calls": [message]}, result)
        _, later = answered(one, asked(messages=history))
        assert later.usage.cached_tokens >= envelope.usage.prompt_tokens + sampled - 1
    changed = {"id": call.id, "function": {"name": call.name, "arguments": '{"city": "Rome"}'}}
    history = (USER, {"role": "assistant", "content": envelope.text, "tool_calls": [changed]}, result)
    assert answered(one, asked(messages=history))[1].usage.cached_tokens < later.usage.cached_tokens


def test_another_dialect_is_another_conversation(talker: Make) -> None:
    one = ready(talker, "Warm.")
    _, envelope = answered(one, asked())
    history = (USER, {"role": "assistant", "content": envelope.text}, USER)
    same = one.engine.count_tokens(asked(messages=history))
    other = one.engine.count_tokens(asked(messages=history, tool_dialect="glm-4.7"))
    assert same != other
    assert (
        answered(one, asked(messages=history, tool_dialect="glm-4.7"))[1].usage.cached_tokens
        < envelope.usage.prompt_tokens
    )
    assert answered(one, asked(messages=history))[1].usage.cached_tokens >= envelope.usage.prompt_tokens


def test_choices_are_enforced(talker: Make) -> None:
    """The scripted model obeys no mask: what a fence forbids ends in a fault."""
    one = ready(talker, "It is ", "warm.", fenced=True)
    for choice in ("auto", "none"):
        assert answered(one, asked(tool_choice=choice))[1].status is Status.COMPLETED
    assert answered(one, asked(tool_choice="required"))[1].status is Status.FAULTED
    one = ready(talker, NOW, fenced=True)
    for choice in ("auto", "required", NamedTool("now")):
        assert answered(one, asked(tool_choice=choice))[1].status is Status.COMPLETED
    for choice in ("none", NamedTool("weather")):
        assert answered(one, asked(tool_choice=choice))[1].status is Status.FAULTED
    two = ready(talker, NOW, NOW, fenced=True)
    assert answered(two, asked())[1].status is Status.COMPLETED
    assert answered(two, asked(parallel_tool_calls=False))[1].status is Status.FAULTED


def test_none_leaves_the_output_to_a_fence(talker: Make) -> None:
    one = ready(talker, "<tool_call>", fenced=True)
    request = asked(tool_choice="none", fence=Fence(choices=("<tool_call>",)))
    assert answered(one, request)[1].text == "<tool_call>"


def test_without_fences_calls_are_read_but_cannot_be_forced(talker: Make) -> None:
    one = ready(talker, CALL)
    assert len(answered(one, asked())[1].calls) == 1
    for options in ({"tool_choice": "required"}, {"tool_choice": "none"}, {"parallel_tool_calls": False}):
        with pytest.raises(InvalidRequest, match="fence_states is 0"):
            one.engine.submit(asked(**options))


def test_a_model_without_a_dialect_says_why(talker: Make) -> None:
    one = ready(talker, "x")
    with pytest.raises(InvalidRequest, match=r"'<\|im_end\|>' takes 10 tokens, not 1; name one as tool_dialect"):
        one.engine.submit(asked(tool_dialect=None))
    with pytest.raises(InvalidRequest, match=r"tool_dialect is 'latin'; known are chatml, dsml"):
        one.engine.submit(asked(tool_dialect="latin"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": "required", "tools": ()}, "there are no tools to call"),
        ({"tool_choice": NamedTool("walk")}, r"names 'walk', which is not among the tools \['weather', 'now'\]"),
        ({"tool_choice": "any"}, "must be auto, none, required, a NamedTool or AllowedTools"),
        ({"tool_choice": "required", "fence": Fence(lark='start: "a"')}, "a Lark-like grammar and calls of tools"),
        ({"fence": Fence(lark='start: "a"')}, "use a schema, a regex or choices"),
        ({"ignore_eos": True}, "ignore_eos cannot be used with tools"),
        ({"tools": (*TOOLS, TOOLS[0])}, "two tools have the name 'weather'"),
        ({"tools": ({"type": "function"},)}, r"tools\[0\] must have a function with a name"),
    ],
)
def test_demands_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        asked(**options)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"name": "two words"}, "'two words' is no name of a tool"),
        ({"name": "f", "parameters": []}, None),
        ({"name": "f", "parameters": ["x"]}, "parameters of f must be a JSON Schema"),
        ({"name": "f", "parameters": {"properties": {"x": {"uniqueItems": True}}}}, "the tool f: "),
    ],
)
def test_tools_that_cannot_be_offered_are_refused(talker: Make, tool: dict[str, Any], message: str | None) -> None:
    one = ready(talker, "x", fenced=True)
    request = asked(tools=({"type": "function", "function": tool},))
    if message is None:
        assert one.engine.generate(request).status is Status.COMPLETED
        return
    with pytest.raises(InvalidRequest, match=message):
        one.engine.submit(request)


def test_deltas_keep_the_order_of_what_they_hold(talker: Make) -> None:
    said = "<think>Hm.</think>Yes" + NOW + "and" + NOW
    one = ready(talker, said)
    deltas, envelope = answered(one, asked())
    assert order(deltas) == ["text", "call", "call", "call", "text", "call", "call", "call"]
    assert envelope.text == "<think>Hm.</think>Yesand"  # this template's model doesn't reason
    reasons = ChatTemplate(CHATML.source + "{# <think> #}")
    one = ready(talker, said, template=reasons)
    deltas, envelope = answered(one, asked())
    assert order(deltas) == ["reasoning", "text", "call", "call", "call", "text", "call", "call", "call"]
    assert (envelope.reasoning, envelope.text) == ("Hm.", "Yesand")
    inside = ChatTemplate(CHATML.source[:-3] + "~ '<think>\n' }}")
    one = ready(talker, said.removeprefix("<think>"), template=inside)
    assert answered(one, asked())[1].reasoning == "Hm."


def order(deltas: Sequence[Delta]) -> list[str]:
    kinds = []
    for delta in deltas:
        kinds += ["reasoning"] * bool(delta.reasoning) + ["text"] * bool(delta.text) + ["call"] * len(delta.calls)
    return kinds


def test_call_values_are_plain() -> None:
    call = ToolCall("c", "f", {"é": [1]})
    assert call_message(call)["function"]["arguments"] == '{"é": [1]}'
    assert call_message(ToolCall("c", "f", "no json"))["function"]["arguments"] == "no json"
    assert CallDelta(index=0) == CallDelta(index=0, id="", name="", arguments="", done=False, malformed="")
