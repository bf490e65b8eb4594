"""Faults of tool calls that users met in other servers, named after their numbers in docs/proofs.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.talker import Talker
from tests.engine.tool_talk import CHATML, answered, asked, ready
from zllm_jax.dialect import DIALECTS, ChatTemplate
from zllm_jax.dialect.tools import Layout, render_calls
from zllm_jax.fence import compile_fence
from zllm_jax.values import Delta, Envelope, Fence, Status, ToolCall

TYPES = {"s": "string", "arguments": "string", "n": "number", "list": "array", "o": "object", "z": "null"}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "run",
            "parameters": {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}},
        },
    },
)
Say = Callable[..., tuple[list[Delta], Envelope]]


@pytest.fixture(params=["chatml", "glm-4.7", pytest.param("dsml", marks=pytest.mark.slow)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def layout(name: str) -> Layout:
    return DIALECTS[name]().layout


@pytest.fixture
def say(name: str) -> Iterator[Say]:
    """The deltas and the envelope of a turn that says a text, so many characters a token."""
    made: list[Talker] = []

    def make(**options: Any) -> Talker:
        made.append(Talker(**options))
        return made[-1]

    def say(text: str, size: int = 8, *, fenced: bool = True, template: ChatTemplate = CHATML, **options: Any) -> Any:
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        one = ready(make, *pieces, fenced=fenced, decode_steps=1, template=template)
        return answered(one, asked(**{"tools": TOOLS, "tool_dialect": name, "max_tokens": 140, **options}))

    yield say
    for one in made:
        one.engine.close()


def turn(layout: Layout, *given: dict[str, Any], text: str = "Yes.") -> str:
    return text + layout.lead + render_calls(layout, [ToolCall("", "run", arguments) for arguments in given])


def test_fault_20_no_markup_leaks_into_what_is_shown(say: Say, layout: Layout) -> None:
    for size in (3, 11):
        deltas, envelope = say(turn(layout, {"s": "a < b"}, {"n": 1}), size, fenced=False)
        assert "".join(delta.text for delta in deltas) == "Yes."
        assert [call.arguments for call in envelope.calls] == [{"s": "a < b"}, {"n": 1}]


def test_fault_21_a_call_without_arguments_is_one(say: Say, layout: Layout) -> None:
    for size in (2, 200):
        deltas, envelope = say(turn(layout, {}), size)
        assert [call.arguments for call in envelope.calls] == [{}]
        assert "".join(piece.arguments for delta in deltas for piece in delta.calls) == "{}"


def test_fault_22_reasoning_may_end_where_a_call_begins(say: Say, layout: Layout) -> None:
    inside = ChatTemplate(CHATML.source[:-3] + f"~ '{layout.think_open.strip()}\\n' }}}}")
    text = "Hm." + layout.think_close + turn(layout, {"n": 1}, text="")
    for size in (3, 500):
        _, envelope = say(text, size, template=inside)
        assert (envelope.reasoning, envelope.text) == ("Hm.", "")
        assert [call.arguments for call in envelope.calls] == [{"n": 1}]


def test_fault_23_a_call_cut_by_the_limit_is_not_reported_as_one(say: Say, layout: Layout) -> None:
    _, envelope = say(turn(layout, {"s": "abcdefghijkl"}), max_tokens=8)
    assert (envelope.status, envelope.calls) == (Status.TRUNCATED, ())


def test_fault_24_a_parameter_twice_is_no_call_and_cannot_be_generated(say: Say, layout: Layout) -> None:
    good = turn(layout, {"n": 1, "list": [2]})
    twice = good.replace('"list": [2]', '"n": 2') if layout.typed == "json" else good.replace("list", "n")
    _, envelope = say(twice, fenced=False)
    assert envelope.calls == ()
    assert len(envelope.telemetry.malformed_calls) == 1
    assert say(twice)[1].status is Status.FAULTED  # the scripted model ignores masks: the fence has noticed


def test_fault_25_a_parameter_may_be_named_arguments(say: Say, layout: Layout) -> None:
    assert say(turn(layout, {"arguments": "{}"}))[1].calls[0].arguments == {"arguments": "{}"}


def test_fault_26_a_malformed_parameter_never_becomes_a_call(say: Say, layout: Layout) -> None:
    _, envelope = say(turn(layout, {"list": [3]}).replace("[3]", "[3"), fenced=False)
    assert envelope.calls == ()


def test_fault_27_streamed_values_lose_nothing(say: Say, layout: Layout) -> None:
    given = {"n": -1.25e-7, "list": [1, {"k": "]}"}], "o": {"a": {"b": None}}, "z": None}
    for size in (4, 9):
        deltas, envelope = say(turn(layout, given, text=""), size, fenced=False)
        assert json.loads("".join(piece.arguments for delta in deltas for piece in delta.calls)) == given
        assert envelope.calls[0].arguments == given


def test_fault_28_a_misspelt_close_closes_nothing(say: Say, layout: Layout) -> None:
    close = layout.param_close.strip() or layout.call_close.strip("}\n")
    _, envelope = say(turn(layout, {"s": "a"}).replace(close, close[:-3] + ">"), fenced=False)
    assert envelope.calls == ()
    assert say(turn(layout, {"s": "a"}).replace(close, close[:-3] + ">"))[1].status is Status.FAULTED


def test_fault_29_the_schema_types_values(say: Say, layout: Layout) -> None:
    given = {"s": "5", "n": 5}
    assert say(turn(layout, given))[1].calls[0].arguments == given


def test_fault_30_a_call_within_the_reasoning_is_text(say: Say, layout: Layout) -> None:
    inside = ChatTemplate(CHATML.source[:-3] + f"~ '{layout.think_open.strip()}\\n' }}}}")
    thought = "I could say " + turn(layout, {"n": 1}, text="")
    _, envelope = say(thought + layout.think_close + layout.after_think + "No.", template=inside)
    assert (envelope.calls, envelope.text) == ((), "No.")
    assert layout.trigger in envelope.reasoning


def test_fault_31_markup_in_prose_is_no_call(say: Say, layout: Layout) -> None:
    """Without a fence. With one, what opens a call in the text is the beginning of one."""
    text = f"A call begins with {layout.trigger}, and that is all."
    assert say(text, fenced=False)[1].text == text
    assert say(text)[1].status is Status.FAULTED


def test_fault_32_a_long_text_is_streamed_as_it_comes(say: Say, layout: Layout) -> None:
    deltas, _ = say(turn(layout, {"s": "abcdefgh" * 60}), fenced=False)
    pieces = [piece.arguments for delta in deltas for piece in delta.calls if "abc" in piece.arguments]
    assert len(pieces) >= 50
    assert max(map(len, pieces)) < 40


def test_fault_35_the_root_of_a_schema_binds() -> None:
    machine = compile_fence(Fence(schema={"type": "object", "properties": {"a": {"type": "integer"}}})).machine
    assert machine.accepts(b'{"a": 1}')
    assert not any(machine.run(text).state for text in (b"1", b'"a"', b"[", b"null"))
