"""Reading calls: whatever the cuts, whatever stands in the values, whatever models get wrong (faults 20 to 32)."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from zllm_jax.dialect.chatml_json import CHATML_LAYOUT
from zllm_jax.dialect.dsml import dsml_layout
from zllm_jax.dialect.tool_dialects import DIALECTS
from zllm_jax.dialect.tool_parser import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    Event,
    ParsedTurn,
    ReasoningDelta,
    TextDelta,
    ToolParser,
)
from zllm_jax.dialect.tools import Layout, ToolSpec, call_id, render_calls
from zllm_jax.errors import InvalidRequest
from zllm_jax.values import ToolCall

LAYOUTS = {name: make().layout for name, make in DIALECTS.items()}
TYPES: dict[str, Any] = {"s": "string", "text": "string", "arguments": "string", "n": "number", "b": "boolean"}
TYPES |= {"list": "array", "o": "object", "z": "null"}
TOOLS = [ToolSpec("run", "", {"properties": {key: {"type": value} for key, value in TYPES.items()}}), ToolSpec("a.b-c")]
PIECES = [
    "<",
    "</",
    "\n",
    '"',
    "\\",
    "é",
    "漢",
    "😀",
    " ",
    "}",
    "</div>",
    "<tool",
    "</arg_",
    "</｜DSML｜par",
    "x",
    "{",
    "\t",
]


def joined(events: list[Event]) -> list[Event]:
    """`events` with neighbouring deltas of a kind as one."""
    out = list[Event]()
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            out[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and event.index == last.index:
            out[-1] = ArgumentsDelta(event.index, last.json + event.json)
        else:
            out.append(event)
    return out


def read(layout: Layout, *pieces: str, thinking: bool | None = False) -> tuple[ParsedTurn, list[Event]]:
    parser = ToolParser(layout, TOOLS, scope="r", thinking=thinking)
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.close()
    return parser.turn(), joined(events)


def random_value(rng: random.Random, kind: str) -> Any:
    text = "".join(rng.choices(PIECES, k=rng.randint(0, 6)))
    values = {"string": text, "number": rng.choice([0, -1.5, 10**20]), "boolean": True, "null": None}
    values |= {"array": [text, 1, []], "object": {"k": text, "": {}}}
    return values[kind]


def random_calls(rng: random.Random) -> list[ToolCall]:
    calls = []
    for index in range(rng.randint(1, 3)):
        keys = rng.sample(list(TYPES), k=rng.randint(0, len(TYPES)))
        calls.append(ToolCall(call_id("r", index, "run"), "run", {key: random_value(rng, TYPES[key]) for key in keys}))
    return calls


def check_identity(layout: Layout, seed: int) -> None:
    rng = random.Random(seed)
    calls, content = random_calls(rng), rng.choice(["", "Sure <b>", "a\n"])
    text = content + layout.lead + render_calls(layout, calls)
    turn, events = read(layout, *text)
    assert (turn.text, turn.malformed, turn.incomplete) == (content, (), False)
    assert [list(call.arguments.items()) for call in turn.calls] == [list(c.arguments.items()) for c in calls]  # type: ignore[union-attr]
    assert list(turn.calls) == calls
    assert render_calls(layout, turn.calls) == render_calls(layout, calls)
    deltas = [event.json for event in events if isinstance(event, ArgumentsDelta)]
    assert [json.loads(delta) for delta in deltas] == [call.arguments for call in calls]


@pytest.mark.parametrize("name", LAYOUTS)
def test_rendered_calls_come_back(name: str) -> None:
    for seed in range(60):
        check_identity(LAYOUTS[name], seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_many_rendered_calls_come_back(name: str) -> None:
    for seed in range(2_000):
        check_identity(LAYOUTS[name], seed)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_cut_reads_the_same(name: str) -> None:  # faults 20, 21, 22, 27
    layout = LAYOUTS[name]
    calls = [ToolCall("", "run", {"s": "a < b </ c\n", "list": [1, "}"], "n": 2}), ToolCall("", "run", {})]
    think = f"{layout.think_open}Use {layout.trigger} x{layout.think_close}{layout.after_think}"
    texts = [think + "Hello" + layout.lead + render_calls(layout, calls), think.rstrip() + render_calls(layout, calls)]
    texts += [f"See {layout.trigger}: it opens a call", texts[0].replace("2", "2 2"), texts[0][:-30]]
    for text in texts:
        whole = read(layout, text, thinking=None)
        assert read(layout, *text, thinking=None) == whole
        for cut in range(len(text)):
            assert read(layout, text[:cut], text[cut:], thinking=None) == whole, text[:cut]
    turn, _ = read(layout, texts[0], thinking=None)
    assert turn.reasoning == f"Use {layout.trigger} x"
    assert turn.text == "Hello"
    assert len(turn.calls) == 2
    assert turn.calls[1].arguments == {}
    assert len(read(layout, texts[1], thinking=None)[0].calls) == 2
    assert read(layout, texts[2], thinking=None)[0].text == texts[2]  # fault 31


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_cut_call_is_no_call(name: str) -> None:  # fault 23
    layout = LAYOUTS[name]
    text = render_calls(layout, [ToolCall("", "run", {"s": "abc"})])
    end = text.index(layout.call_close.strip("}\n")) + len(layout.call_close.strip("}\n"))
    for cut in range(text.index("run") + 6, end):
        turn, events = read(layout, text[:cut])
        assert (turn.calls, turn.incomplete) == ((), True), text[:cut]
        assert not any(isinstance(event, CallEnd) for event in events)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_long_string_is_streamed(name: str) -> None:  # fault 32
    layout = LAYOUTS[name]
    text = render_calls(layout, [ToolCall("", "run", {"s": "abc" * 1000})])
    parser = ToolParser(layout, TOOLS, thinking=False)
    events = [event for piece in text[: text.index("abc") + 2000] for event in parser.feed(piece)]
    assert sum(len(event.json) for event in events if isinstance(event, ArgumentsDelta)) >= 1990


@pytest.mark.parametrize("name", ["dsml", "glm-4.6", "glm-4.7"])
def test_a_closing_tag_in_json_is_text(name: str) -> None:
    layout = LAYOUTS[name]
    close = layout.param_close.strip()
    given = {"list": [f"a{close}b", '\\" < ', "[" + close], "o": {close: 1}, "n": 3}
    escaped = render_calls(layout, [ToolCall("", "run", given)])
    assert escaped.count(close) == len(given)
    for text in (escaped, escaped.replace("<\\/", "</")):
        whole = read(layout, text)
        assert whole[0].calls[0].arguments == given
        assert read(layout, *text) == whole


def test_a_closing_tag_in_a_value() -> None:  # faults 24, 28
    for layout in LAYOUTS.values():
        close = layout.param_close.strip() or "</tool_call>"
        call = ToolCall(call_id("r", 0, "run"), "run", {"s": f"a{close}b"})
        if layout is CHATML_LAYOUT:
            assert read(layout, *render_calls(layout, [call]))[0].calls == (call,)
        else:
            with pytest.raises(InvalidRequest, match="'s'"):
                render_calls(layout, [call])
    misspelt = render_calls(dsml_layout(), [ToolCall("", "run", {"s": "a"})]).replace(
        "</｜DSML｜parameter", "</｜DSML｜param"
    )
    assert read(dsml_layout(), misspelt)[0].incomplete


@pytest.mark.parametrize("name", ["dsml", "glm-4.6", "glm-4.7", "chatml"])
def test_malformed_is_never_a_call(name: str) -> None:  # faults 24, 26
    layout = LAYOUTS[name]
    good = render_calls(layout, [ToolCall("", "run", {"n": 12, "list": [3]}), ToolCall("", "run", {"n": 5})])
    second = '"list": [3]' if name == "chatml" else "list"
    for bad in (
        good.replace("[3]", "[3"),
        good.replace(second, second.replace("list", "n"), 1),
        good.replace("12", "NaN"),
    ):
        turn, _ = read(layout, *bad)
        assert [call.arguments for call in turn.calls] in ([{"n": 5}], []), bad
        assert turn.malformed
        assert turn.malformed[0].reason
        assert "run" in turn.malformed[0].text
        assert turn == read(layout, bad)[0]


def test_the_schema_types_the_values() -> None:  # faults 25, 29
    for name in ("glm-4.6", "glm-4.7"):
        values = {"s": "5", "n": 5, "arguments": "{}", "other": [1], "free": "five"}
        turn, _ = read(LAYOUTS[name], *render_calls(LAYOUTS[name], [ToolCall("", "run", values)]))
        assert turn.calls[0].arguments == values


def test_an_unknown_tool_is_reported() -> None:
    for layout in LAYOUTS.values():
        turn, events = read(layout, render_calls(layout, [ToolCall("", "other", {})]))
        assert turn.calls[0].name == "other"
        assert [event.known for event in events if isinstance(event, CallBegin)] == [False]


@pytest.mark.parametrize("name", ['"g\tt"', r'"g\xt"'])
def test_a_name_that_is_no_json_is_malformed(name: str) -> None:
    turn, _ = read(CHATML_LAYOUT, f'<tool_call>\n{{"name": {name}, "arguments": {{}}}}\n</tool_call>')
    assert (len(turn.malformed), turn.calls) == (1, ())


def test_a_call_that_is_cut_in_its_opening_is_incomplete() -> None:
    text = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get">\n'
    for cut in range(text.index("get"), len(text)):
        turn, _ = read(dsml_layout(), text[:cut])
        assert turn.incomplete
        assert not turn.malformed
