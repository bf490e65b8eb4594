"""A fence beside tools, and behind reasoning: exactly the turns whose text is of the fence, or that are calls."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from tests.dialect.test_tool_fence import BAD, GOOD, TOOLS, layouts
from tests.fence.schema import randomly
from zllm_jax.dialect.chatml_json import CHATML_LAYOUT
from zllm_jax.dialect.tool_fence import call_machine
from zllm_jax.dialect.tool_parser import ParsedTurn, TextStands, ToolParser
from zllm_jax.dialect.tools import Layout, render_calls
from zllm_jax.fence import Machine, compile_fence
from zllm_jax.values import AllowedTools, Fence, NamedTool, ToolChoice

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"said": {"type": "string"}, "more": {"type": "array", "items": {"type": "integer"}}},
    "required": ["said"],
    "additionalProperties": False,
}
ANSWERS = ('{"said": "yes"}', '{"said": "<tool_call>", "more": [1, 2]}', '{"said": "<think>, <｜DSML｜tool_calls>\\n"}')
WRONG = ("yes", "", '{"said": 1}', '{"said": "yes"} ', '{"said": "yes"}\n')


def machine_of(fence: Fence) -> Machine:
    return compile_fence(fence).machine


OBJECT = machine_of(Fence(schema=SCHEMA))


def read(layout: Layout, text: str, stands: TextStands, *, thinking: bool | None, piece: int = 1 << 20) -> ParsedTurn:
    parser = ToolParser(layout, TOOLS, thinking=thinking, text=stands)
    for start in range(0, len(text), piece):
        parser.feed(text[start : start + piece])
    parser.close()
    return parser.turn()


@layouts
def test_either_a_text_of_the_schema_or_calls(layout: Layout) -> None:
    machine = call_machine(layout, TOOLS, "auto", text=OBJECT)
    for text in ANSWERS:
        assert machine.accepts(text.encode()), text
        assert read(layout, text, "instead", thinking=False) == ParsedTurn("", text, (), (), False)
    for text in WRONG:
        assert not machine.accepts(text.encode()), text
    calls = render_calls(layout, GOOD)
    assert machine.accepts(calls.encode())
    assert [(one.name, one.arguments) for one in read(layout, calls, "instead", thinking=False).calls] == [
        (one.name, one.arguments) for one in GOOD
    ]
    for wrong in BAD:
        assert not machine.accepts(render_calls(layout, [wrong]).encode())
    for text in ANSWERS:
        assert not machine.accepts(text.encode() + calls.encode())
        assert not machine.accepts(calls.encode() + text.encode())


@layouts
def test_a_forced_call_leaves_no_text_and_none_leaves_no_call(layout: Layout) -> None:
    calls = render_calls(layout, GOOD[:1])
    for choice in ("required", NamedTool("get_weather"), AllowedTools(("get_weather",), required=True)):
        forced = call_machine(layout, TOOLS, choice, text=OBJECT)  # type: ignore[arg-type]
        assert forced.digest == call_machine(layout, TOOLS, choice).digest  # type: ignore[arg-type]
        assert forced.accepts((layout.lead + calls).encode())
        assert not forced.accepts(ANSWERS[0].encode())
    none = call_machine(layout, TOOLS, "none", text=OBJECT)
    assert none.digest == call_machine(layout, (), text=OBJECT).digest
    assert not none.accepts(calls.encode())
    for text in ANSWERS:
        assert none.accepts(text.encode())
        assert read(layout, text, "alone", thinking=False) == ParsedTurn("", text, (), (), False)
    some = call_machine(layout, TOOLS, AllowedTools(("get",)), text=OBJECT)
    assert some.accepts(ANSWERS[0].encode())
    assert some.accepts(render_calls(layout, GOOD[3:]).encode())
    assert not some.accepts(calls.encode())


@layouts
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_reasoning_before_it_is_free(layout: Layout, choice: ToolChoice) -> None:
    opened, closed = layout.think_open.strip(), layout.think_close.strip()
    stands: TextStands = "instead" if choice == "auto" else "alone"
    thought = "I could write " + render_calls(layout, BAD[4:]) + ' or {"said": 1}'
    for thinking, before in ((True, ""), (None, opened), (None, None)):
        machine = call_machine(layout, TOOLS, choice, thinking=thinking, text=OBJECT)
        for answer in ANSWERS:
            for gap in {"", layout.after_think, layout.after_think[:1]} if before is not None else {""}:
                turn = answer if before is None else before + thought + closed + gap + answer
                assert machine.accepts(turn.encode()), turn
                for piece in (1, 3, len(turn)):
                    found = read(layout, turn, stands, thinking=thinking, piece=piece)
                    assert (found.text, found.calls) == (answer, ()), turn
                    assert found.reasoning == ("" if before is None else thought)
        for wrong in WRONG:
            turn = wrong if before is None else before + thought + closed + wrong
            assert not machine.accepts(turn.encode()), turn
        call = ("" if before is None else before + thought + closed) + render_calls(layout, GOOD[:1])
        assert machine.accepts(call.encode()) == (choice == "auto")


@layouts
def test_the_parser_reads_every_legal_turn(layout: Layout) -> None:
    machine = call_machine(layout, TOOLS, "auto", text=OBJECT)
    read_texts = 0
    for seed in range(12):
        text = randomly.text(machine, random.Random(seed), soon=30)
        if text is None:
            continue
        turn = read(layout, text.decode(), "instead", thinking=False, piece=1 + seed % 5)
        assert not turn.malformed, text
        assert not turn.incomplete, text
        assert bool(turn.calls) != OBJECT.accepts(turn.text.encode()), text
        assert not turn.calls or not turn.text, text
        read_texts += 1
    assert read_texts >= 5


def is_one_of(text: str, fence: Machine, opening: str) -> bool:
    """What a turn of a fence that may be a text must be, by the words of the contract."""
    return fence.accepts(text.encode()) and not text.lstrip(" \t\r\n").startswith(opening)


# Texts over an alphabet of pieces: those of a fence, those that open calls and reasoning, and what is neither.
PIECES = ("a", "<", "<tool", "<tool_call>", "<think>", "\n", " ")
FENCES = {
    "no text in common": Fence(regex="a+"),
    "the beginning of a call": Fence(regex="(a|<tool)*"),
    "all of its opening": Fence(choices=("<tool_call>", "a", "<tool", "<tool_call>a")),
    "white space before it": Fence(regex="[ \\n]*(a|<tool_call>a|<)?"),
    "anything": Fence(regex="[^]*"),
    "no text at all": Fence(regex="a*"),
    "a free schema": Fence(schema={"enum": [1, True]}, whitespace="free"),
}


@pytest.mark.parametrize("fence", FENCES.values(), ids=FENCES)
def test_every_short_turn_is_legal_or_not_as_the_fence_says(fence: Fence) -> None:
    inner = machine_of(fence)
    for choice, opening in (("auto", "<tool_call>"), ("none", "\0")):
        machine = call_machine(CHATML_LAYOUT, TOOLS, choice, text=inner)  # type: ignore[arg-type]
        stands: TextStands = "instead" if choice == "auto" else "alone"
        for size in range(5):
            for pieces in product(PIECES, repeat=size):
                text = "".join(pieces)
                legal = is_one_of(text, inner, opening)
                assert machine.accepts(text.encode()) == legal, text
                if legal:
                    assert read(CHATML_LAYOUT, text, stands, thinking=False, piece=1).text == text


@pytest.mark.parametrize("fence", FENCES.values(), ids=FENCES)
def test_behind_reasoning_too(fence: Fence) -> None:
    inner, gap = machine_of(fence), CHATML_LAYOUT.after_think
    machine = call_machine(CHATML_LAYOUT, TOOLS, "auto", thinking=True, text=inner)
    for size in range(5):
        for pieces in product(PIECES, repeat=size):
            text = "".join(pieces)
            dropped = next(n for n in (2, 1, 0) if text.startswith(gap[:n]))
            legal = is_one_of(text[dropped:], inner, "<tool_call>")
            assert machine.accepts(b"Hm.\n</think>" + text.encode()) == legal, text
            if legal:
                found = read(CHATML_LAYOUT, "Hm.\n</think>" + text, "instead", thinking=True, piece=1)
                assert (found.reasoning, found.text) == ("Hm.", text[dropped:])


@pytest.mark.parametrize("fence", FENCES.values(), ids=FENCES)
def test_from_every_position_the_turn_can_be_completed(fence: Fence) -> None:
    machine = call_machine(CHATML_LAYOUT, TOOLS, "auto", thinking=None, text=machine_of(fence))
    for seed in range(5):
        randomly.text(machine, random.Random(seed), soon=20)  # raises where nothing may follow


def test_a_fence_costs_its_own_states_and_few_more() -> None:
    alone = call_machine(CHATML_LAYOUT, TOOLS, "auto").num_states
    both = call_machine(CHATML_LAYOUT, TOOLS, "auto", thinking=None, text=OBJECT).num_states
    assert both < alone + OBJECT.num_states + 60
