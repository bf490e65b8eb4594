"""Reasoning apart from the answer, with tools or without, and a fence that holds of the answer only."""

from __future__ import annotations

import pytest

from tests.engine.tool_talk import CALL, CHATML, NOW, USER, Make, answered, asked, ready
from zllm_jax.dialect import ChatTemplate
from zllm_jax.errors import InvalidRequest
from zllm_jax.values import AllowedTools, Fence, NamedTool, Status

MAY_REASON = ChatTemplate(CHATML.source + "{# <think> #}")
REASONS = ChatTemplate(CHATML.source[:-3] + "~ '<think>\n' }}")
SCHEMA = Fence(schema={"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]})
YES = '{"warm": true}'


@pytest.mark.parametrize("template", [MAY_REASON, REASONS], ids=["may", "must"])
def test_reasoning_without_tools_is_no_content(talker: Make, template: ChatTemplate) -> None:
    said = ("" if template is REASONS else "<think>\n") + f"Is it?{NOW}\n</think>\n\nYes, {CALL} is text."
    for size in (1, 5, len(said)):
        one = ready(talker, *(said[i : i + size] for i in range(0, len(said), size)), template=template)
        _, envelope = answered(one, asked(tools=(), max_tokens=300))
        assert (envelope.reasoning, envelope.text) == (f"Is it?{NOW}", f"Yes, {CALL} is text.")
        assert (envelope.calls, envelope.status) == ((), Status.COMPLETED)


def test_a_model_that_may_reason_need_not(talker: Make) -> None:
    one = ready(talker, "Yes.", template=MAY_REASON)
    _, envelope = answered(one, asked(tools=()))
    assert (envelope.reasoning, envelope.text) == ("", "Yes.")


def test_a_model_without_reasoning_says_what_it_says(talker: Make) -> None:
    one = ready(talker, "<think>Hm.</think>Yes.")
    _, envelope = answered(one, asked(tools=()))
    assert (envelope.reasoning, envelope.text) == ("", "<think>Hm.</think>Yes.")


def test_a_prompt_of_plain_text_is_continued_as_it_is(talker: Make) -> None:
    one = ready(talker, "<think>Hm.</think>Yes.", template=MAY_REASON)
    _, envelope = answered(one, asked(tools=(), messages=None, prompt="Is it?\n"))
    assert (envelope.reasoning, envelope.text) == ("", "<think>Hm.</think>Yes.")


def test_reasoning_cut_by_the_limit_is_reasoning(talker: Make) -> None:
    one = ready(talker, "<think>", "Hm", ", so", template=MAY_REASON)
    _, envelope = answered(one, asked(tools=(), max_tokens=2))
    assert (envelope.reasoning, envelope.text, envelope.status) == ("Hm", "", Status.TRUNCATED)


def test_a_stop_sequence_is_looked_for_behind_the_reasoning(talker: Make) -> None:
    one = ready(talker, "<think>", "Stop.", "</think>", "Go. ", "Stop.", " No.", template=MAY_REASON)
    _, envelope = answered(one, asked(tools=(), stop=("Stop.",)))
    assert (envelope.reasoning, envelope.text, envelope.telemetry.finish) == ("Stop.", "Go. ", "stop")


def test_a_turn_that_reasoned_goes_on_where_it_ended(talker: Make) -> None:
    one = ready(talker, "<think>", "Hm.", "</think>", "\n\nYes.", template=MAY_REASON)
    _, envelope = answered(one, asked(tools=()))
    assert envelope.text == "Yes."
    for message in ({"content": "Yes."}, {"content": "Yes.", "reasoning_content": "Hm."}):
        history = (USER, {"role": "assistant", **message}, USER)
        _, later = answered(one, asked(tools=(), messages=history))
        assert later.usage.cached_tokens >= envelope.usage.prompt_tokens + len(envelope.tokens) - 1


@pytest.mark.parametrize("template", [MAY_REASON, REASONS], ids=["may", "must"])
def test_a_fence_holds_of_the_answer_only(talker: Make, template: ChatTemplate) -> None:
    """The scripted model obeys no mask: what a fence forbids ends in a fault."""
    opened = "" if template is REASONS else "<think>"
    good = ready(talker, opened + "Is it? ", "</think>", YES, fenced=True, template=template)
    _, envelope = answered(good, asked(tools=(), fence=SCHEMA))
    assert (envelope.reasoning, envelope.text, envelope.status) == ("Is it? ", YES, Status.COMPLETED)
    bad = ready(talker, opened + "Is it? ", "</think>", "Yes.", fenced=True, template=template)
    assert answered(bad, asked(tools=(), fence=SCHEMA))[1].status is Status.FAULTED


def test_reasoning_that_may_be_left_out_and_reasoning_that_may_not(talker: Make) -> None:
    for template, status in ((MAY_REASON, Status.COMPLETED), (REASONS, Status.FAULTED)):
        one = ready(talker, YES, fenced=True, template=template)
        assert answered(one, asked(tools=(), fence=SCHEMA))[1].status is status


@pytest.mark.parametrize("template", [CHATML, MAY_REASON], ids=["plain", "may"])
def test_a_fence_beside_tools_is_for_the_text(talker: Make, template: ChatTemplate) -> None:
    call = ready(talker, CALL, fenced=True, template=template)
    text = ready(talker, YES, fenced=True, template=template)
    other = ready(talker, "It is.", fenced=True, template=template)
    both = ready(talker, YES, NOW, fenced=True, template=template)
    for choice in ("auto", AllowedTools(("weather",))):
        request = asked(fence=SCHEMA, tool_choice=choice)
        _, envelope = answered(call, request)
        assert ([one.name for one in envelope.calls], envelope.text) == (["weather"], "")
        assert envelope.status is Status.COMPLETED
        _, envelope = answered(text, request)
        assert (envelope.calls, envelope.text, envelope.status) == ((), YES, Status.COMPLETED)
        for one in (other, both):
            assert answered(one, request)[1].status is Status.FAULTED
    forced = asked(fence=SCHEMA, tool_choice=NamedTool("now"))
    assert answered(ready(talker, NOW, fenced=True, template=template), forced)[1].status is Status.COMPLETED
    assert answered(text, forced)[1].status is Status.FAULTED
    none = asked(fence=SCHEMA, tool_choice="none")
    assert answered(text, none)[1].status is Status.COMPLETED
    assert answered(call, none)[1].status is Status.FAULTED


def test_a_text_that_shows_markup_is_no_call(talker: Make) -> None:
    for text in (f'"{NOW}"', '"<think>Hm.</think>"'):
        one = ready(talker, text.replace("\n", ""), template=MAY_REASON, fenced=True)
        fence = Fence(choices=(text.replace("\n", ""),))
        _, envelope = answered(one, asked(fence=fence))
        assert (envelope.text, envelope.calls, envelope.reasoning) == (text.replace("\n", ""), (), "")


def test_what_a_fence_leaves_out_is_said_with_tools_too(talker: Make) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    one = ready(talker, "[1]", fenced=True)
    _, envelope = answered(one, asked(fence=Fence(schema=schema, relax=True)))
    assert [left.partition(":")[0] for left in envelope.telemetry.fence_relaxed] == ["#/uniqueItems"]
    with pytest.raises(InvalidRequest) as refused:
        one.engine.submit(asked(fence=Fence(schema=schema)))
    assert refused.value.param == "fence"


def test_a_lark_like_grammar_leaves_no_room_for_reasoning(talker: Make) -> None:
    grammar = Fence(lark='start: "yes"')
    one = ready(talker, "yes", fenced=True, template=MAY_REASON)
    _, envelope = answered(one, asked(tools=(), fence=grammar))
    assert (envelope.text, envelope.reasoning) == ("yes", "")
    one = ready(talker, "yes", fenced=True, template=REASONS)
    with pytest.raises(InvalidRequest, match="the prompt opens the reasoning"):
        one.engine.submit(asked(tools=(), fence=grammar))


def test_without_fences_a_fence_beside_tools_is_refused(talker: Make) -> None:
    one = ready(talker, YES)
    with pytest.raises(InvalidRequest, match="fence_states is 0") as refused:
        one.engine.submit(asked(fence=SCHEMA))
    assert refused.value.param == "fence"
