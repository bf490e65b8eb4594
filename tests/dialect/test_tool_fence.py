"""The fence of a dialect agrees with its renderer and its parser: what one writes, the others take."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from tests.dialect.tool_sets import SETS, example
from tests.fence.schema import randomly
from zllm_jax.config import EngineConfig
from zllm_jax.dialect.chatml_json import CHATML_LAYOUT
from zllm_jax.dialect.glm_xml import glm_layout
from zllm_jax.dialect.tool_dialects import DIALECTS
from zllm_jax.dialect.tool_fence import call_machine
from zllm_jax.dialect.tool_parser import ToolParser
from zllm_jax.dialect.tools import Layout, render_calls, tools_of
from zllm_jax.errors import InvalidRequest, UnsupportedGrammar
from zllm_jax.fence import Machine
from zllm_jax.values import NamedTool, ToolCall

LAYOUTS = {name: make().layout for name, make in DIALECTS.items()}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}},
        "unit": {"enum": ["C", "F"]},
        "arguments": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"day": {"type": "integer"}},
}
TOOLS = tools_of(
    [
        {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
        {
            "type": "function",
            "function": {"name": "get", "parameters": {"type": "object", "additionalProperties": False}},
        },
    ]
)
GOOD = [
    ToolCall("", "get_weather", {"city": "Paris", "days": [1, 2]}),
    ToolCall("", "get_weather", {"unit": "F", "city": 'a < b, "c" </ d\n\té', "arguments": True}),
    ToolCall("", "get_weather", {"city": ""}),
    ToolCall("", "get", {}),
]
BAD = [
    ToolCall("", "get_weather", {"days": [1]}),  # the city is required
    ToolCall("", "get_weather", {"city": "Paris", "unit": "K"}),
    ToolCall("", "get_weather", {"city": "Paris", "days": ["1"]}),
    ToolCall("", "get_weather", {"city": "Paris", "more": 1}),
    ToolCall("", "get_time", {}),
]
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def written(layout: Layout, *calls: ToolCall) -> bytes:
    return (layout.lead + render_calls(layout, calls)).encode()


@layouts
def test_what_the_renderer_writes_is_legal(layout: Layout) -> None:
    machine = call_machine(layout, TOOLS, "required")
    for call in GOOD:
        assert machine.accepts(written(layout, call)), call
    assert machine.accepts(written(layout, *GOOD))


@layouts
def test_wrong_calls_are_not(layout: Layout) -> None:
    machine = call_machine(layout, TOOLS, "required")
    for call in BAD:
        assert not machine.accepts(written(layout, call)), call


@layouts
def test_choices(layout: Layout) -> None:
    call, text = written(layout, GOOD[0]), b"It is <b>warm</b>, </ and < too."
    free, none, must = (call_machine(layout, TOOLS, choice) for choice in ("auto", "none", "required"))
    assert [one.accepts(text) for one in (free, none, must)] == [True, True, False]
    assert [one.accepts(text + call) for one in (free, none, must)] == [True, False, False]
    assert must.accepts(call)
    named = call_machine(layout, TOOLS, NamedTool("get"))
    assert named.accepts(written(layout, GOOD[3]))
    assert not named.accepts(call)
    single = call_machine(layout, TOOLS, "required", parallel=False)
    assert single.accepts(call)
    assert not single.accepts(written(layout, GOOD[0], GOOD[3]))


@layouts
def test_markup_in_the_reasoning_is_text(layout: Layout) -> None:
    machine = call_machine(layout, TOOLS, "required", thinking=True)
    close = layout.think_close.strip().encode()
    assert machine.accepts(b"I could write " + written(layout, BAD[4]) + close + written(layout, GOOD[0]))
    assert not machine.accepts(b"I will" + written(layout, GOOD[0]))


@layouts
def test_a_turn_may_begin_with_reasoning_or_not(layout: Layout) -> None:
    call, think = written(layout, GOOD[0]), layout.think_open.encode() + b"I could write "
    close = layout.think_close.strip().encode()
    for choice in ("auto", "required"):
        machine = call_machine(layout, TOOLS, choice, thinking=None)  # type: ignore[arg-type]
        assert machine.accepts(call)
        assert machine.accepts(think + written(layout, BAD[4]) + close + call)
        assert not machine.accepts(think + close + written(layout, BAD[4]))
        assert not machine.accepts(written(layout, BAD[4]))
    free = call_machine(layout, TOOLS, "auto", thinking=None)
    assert free.accepts(b" \n" + think + close + b"Done <think>.")
    assert not free.accepts(think)
    assert not free.accepts(b"So: " + think + written(layout, BAD[4]) + close)  # too late for reasoning


@layouts
def test_a_turn_cannot_end_inside_a_call(layout: Layout) -> None:
    machine = call_machine(layout, TOOLS, "auto")
    text = b"Yes." + written(layout, GOOD[0])
    opened = text.index(layout.trigger.encode()) + len(layout.trigger.encode())
    ended = [machine.ended(machine.run(text[:cut])) for cut in range(opened, len(text))]
    assert not any(ended)
    assert machine.accepts(text)


def arguments_of(machine: Machine, layout: Layout, seed: int) -> list[ToolCall] | None:
    """What the parser reads of a random legal turn; None where chance found no end."""
    text = randomly.text(machine, random.Random(seed), soon=30)
    if text is None:
        return None
    parser = ToolParser(layout, TOOLS, thinking=False)
    parser.feed(text.decode())
    parser.close()
    turn = parser.turn()
    assert not turn.malformed, (text, turn.malformed)
    assert not turn.incomplete, text
    assert turn.calls, text
    return list(turn.calls)


@layouts
def test_the_parser_reads_every_legal_turn(layout: Layout) -> None:
    machine = call_machine(layout, TOOLS, "required")
    schemas: dict[str, Any] = {tool.name: tool.parameters for tool in TOOLS}
    read = 0
    for seed in range(20):
        calls = arguments_of(machine, layout, seed)
        for call in calls or ():
            assert isinstance(call.arguments, dict)
            jsonschema.validate(json.loads(json.dumps(call.arguments)), schemas[call.name])
            read += 1
    assert read >= 5


def test_a_text_that_may_also_be_json_is_told_by_its_spelling() -> None:  # where no type stands beside it
    kinds = {"$ref": "#/$defs/any"}
    parameters = {
        "type": "object",
        "properties": {"v": kinds, "t": {"$ref": "#/$defs/text"}},
        "$defs": {
            "any": {"type": ["string", "number", "null", "array"]},
            "text": {"type": "string", "pattern": "^5?$"},
        },
    }
    tools = tools_of([{"type": "function", "function": {"name": "set", "parameters": parameters}}])
    for layout in (glm_layout(lines=True), glm_layout(lines=False)):
        machine = call_machine(layout, tools, "required")
        for value in ("", "x", "-", "nullable", 'say "5"', '"5"', "5 m", "1.2.3", 5, -0.5, None, [1, "]"], []):
            text = written(layout, ToolCall("", "set", {"v": value}))
            assert machine.accepts(text), value
            parser = ToolParser(layout, tools, thinking=False)
            parser.feed(text.decode())
            assert parser.turn().calls[0].arguments == {"v": value}
        for text in (
            "5",
            "null",
            " 5",
            "[",
            "{}",
            "true",
            "1e3 ",
        ):  # all would be read as something else, or be illegal
            legal = text in ("5", "null")  # as JSON
            assert machine.accepts(written(layout, ToolCall("", "set", {"v": text}))) == legal, text
        assert tools[0].kind("t") == "string"
        assert machine.accepts(written(layout, ToolCall("", "set", {"t": "5"})))


def test_a_tool_that_was_not_offered_cannot_be_required() -> None:
    with pytest.raises(InvalidRequest, match="'get_time' must be called, but is not among the tools"):
        call_machine(CHATML_LAYOUT, TOOLS, NamedTool("get_time"))
    with pytest.raises(InvalidRequest, match="a tool must be called"):
        call_machine(CHATML_LAYOUT, (), "required")


@layouts
def test_a_parameter_that_cannot_be_enforced_is_named(layout: Layout) -> None:
    parameters = {"type": "object", "properties": {"ids": {"type": "array", "uniqueItems": True}}}
    tools = tools_of([{"type": "function", "function": {"name": "pick", "parameters": parameters}}])
    with pytest.raises(UnsupportedGrammar, match=r"the tool pick: .*differ"):
        call_machine(layout, tools, "required")


@layouts
def test_twenty_optional_parameters_cost_few_states(layout: Layout) -> None:
    kinds = ["string", "integer", "boolean", "number"]
    properties = {f"p{i}": {"type": kinds[i % 4]} for i in range(20)}
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    tools = tools_of([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    machine = call_machine(layout, tools, NamedTool("f"), parallel=False)
    assert machine.num_states < 200 + sum(len(text.encode()) for text in layout.literals()) // 2


def check_tools(layout: Layout, name: str) -> None:
    """A set compiles within the default table; what the renderer writes for it is legal and comes back."""
    tools = tools_of(SETS[name])
    machine = call_machine(layout, tools, "auto")
    assert machine.num_states <= EngineConfig().fence_states - 2
    calls = [
        ToolCall("", tool.name, example(dict(tool.parameters), full=full)) for tool in tools for full in (True, False)
    ]
    for call, tool in zip(calls, (one for one in tools for _ in range(2)), strict=True):
        jsonschema.validate(call.arguments, tool.parameters)
        assert machine.accepts(written(layout, call)), (call, SETS[name])
    assert machine.accepts(b"Yes." + written(layout, *calls))
    parser = ToolParser(layout, tools, thinking=False)
    parser.feed(written(layout, *calls).decode())
    parser.close()
    assert [(call.name, call.arguments) for call in parser.turn().calls] == [(one.name, one.arguments) for one in calls]


def test_realistic_tools_compile_and_their_calls_are_legal() -> None:
    assert len(SETS) == 30
    for number, name in enumerate(SETS):
        check_tools(list(LAYOUTS.values())[number % len(LAYOUTS)], name)


@pytest.mark.slow
@layouts
def test_realistic_tools_in_every_layout(layout: Layout) -> None:
    for name in SETS:
        check_tools(layout, name)


def offered(parameters: dict[str, Any], layout: Layout) -> Machine:
    tool = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", **parameters}}}
    return call_machine(layout, tools_of([tool]), "required")


one_by_one = pytest.mark.parametrize(
    "layout",
    [layout for layout in LAYOUTS.values() if layout.param_open],
    ids=[n for n, x in LAYOUTS.items() if x.param_open],
)


@one_by_one
@pytest.mark.parametrize(
    "rule, where",
    [
        ({"minProperties": 2}, "#/minProperties"),
        ({"maxProperties": 1}, "#/maxProperties"),
        ({"type": "string"}, "#/type"),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "#/anyOf"),
        ({"$ref": "#/$defs/more", "$defs": {"more": {"required": ["a"]}}}, "#/$ref"),
        ({"dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
        ({"patternProperties": {"^a": {"type": "null"}}}, "#/patternProperties"),
        ({"properties": {"\ud800": {}}}, "#/properties"),
    ],
)
def test_rules_about_all_parameters_are_never_dropped(layout: Layout, rule: dict[str, Any], where: str) -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}}
    with pytest.raises(UnsupportedGrammar) as refused:
        offered({"properties": properties, **rule}, layout)
    assert refused.value.where == where


@layouts
def test_what_can_never_be_written_is_not_begun(layout: Layout) -> None:
    never = [{"enum": []}, False, {"type": "string", "minLength": 2, "maxLength": 1}, {"enum": ["\ud800"]}]
    never += [{"type": "string", "pattern": f"^{layout.param_close.strip()}$"}] if layout.param_open else []
    for schema in never:
        machine = offered({"properties": {"ok": {"type": "boolean"}, "xyz": schema}}, layout)
        assert machine.accepts(written(layout, ToolCall("", "get", {"ok": True})))
        begun = written(layout, ToolCall("", "get", {"xyz": "-"})).partition(b"xyz")[0]
        assert machine.run(begun + b"x").dead, schema
        with pytest.raises(UnsupportedGrammar):
            offered({"properties": {"xyz": schema}, "required": ["xyz"]}, layout)
