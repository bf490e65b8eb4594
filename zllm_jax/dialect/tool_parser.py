"""A model's output -> reasoning, text and calls, piece by piece; the same whatever the pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from zllm_jax.dialect.json_scan import JsonScan
from zllm_jax.dialect.tools import TOOL_NAME, Layout, ToolSpec, call_id, canonical_json
from zllm_jax.values import ToolCall


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """More of the text to show."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call has begun. It may still turn out malformed or cut. known: whether a tool of that name was offered."""

    index: int
    id: str
    name: str
    known: bool


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    json: str


@dataclass(frozen=True)
class CallEnd:
    """A call is whole: its deltas, joined, are a JSON object."""

    index: int


@dataclass(frozen=True)
class CallMalformed:
    """What began as a call is none and must not be run. text: all of it, as the model wrote it."""

    index: int
    reason: str
    text: str


Event = ReasoningDelta | TextDelta | CallBegin | ArgumentsDelta | CallEnd | CallMalformed


@dataclass(frozen=True)
class ParsedTurn:
    """A whole turn. calls: the complete ones only. incomplete: whether the output ended inside a call."""

    reasoning: str
    text: str
    calls: tuple[ToolCall, ...]
    malformed: tuple[CallMalformed, ...]
    incomplete: bool


_JSON_PART = re.compile(r'"(?:[^"\\]|\\.)*"|"|<|[^"<]+', re.DOTALL)  # a whole string, the beginning of one, or else


class _Malformed(Exception):
    pass


TextStands = Literal["beside", "instead", "alone"]
_Words = Literal["start", "thinking", "after_think", "either", "text", "all"]
_State = _Words | Literal["call", "name", "json", "params", "key", "value", "bad"]
_ANSWERS: Mapping[TextStands, _State] = {"beside": "text", "instead": "either", "alone": "all"}
_TEXT: frozenset[_State] = frozenset({"start", "after_think", "either", "text", "all"})


class ToolParser:
    """Reads one turn of `layout`. Not shared between turns.

    What opens a call is its opening literal followed by what a call begins with; anywhere else, and in the reasoning,
    markup is text. A raw value ends at the first whole closing literal and nowhere else; in JSON the JSON decides, so a
    closing literal inside a string is part of it. A value that may be JSON or a text is JSON if it begins with a
    bracket. White space between literals may differ from the canonical one; values and keys are never trimmed.

    thinking: True where the prompt ends inside reasoning, None where the turn may begin with it, False where it can't.
    text: where it stands: "beside" calls, "instead" of them (markup in it is text, and so is all that follows), or
    "alone" (there are no calls). scope: what ids are derived from (`call_id`).
    """

    def __init__(
        self,
        layout: Layout,
        tools: Sequence[ToolSpec] = (),
        *,
        scope: str = "",
        thinking: bool | None = None,
        text: TextStands = "beside",
    ) -> None:
        self._layout, self._tools, self._scope = layout, {tool.name: tool for tool in tools}, scope
        self._answer: _State = _ANSWERS[text]
        self._state: _State = self._answer if thinking is False else "thinking" if thinking else "start"
        self._buffer, self._raw = "", ""
        self._reasoning, self._text = list[str](), list[str]()
        self._calls, self._malformed = list[ToolCall](), list[CallMalformed]()
        self._index, self._name, self._key, self._kind = -1, "", "", ""
        self._arguments, self._value, self._keys = list[str](), list[str](), set[str]()
        self._scan, self._scanned = JsonScan(), 0
        self._incomplete, self._ended = False, False
        self._steps: dict[str, Callable[[], Iterator[Event] | None]] = {
            "start": self._start,
            "thinking": self._thinking,
            "after_think": self._after_think,
            "either": self._either,
            "all": self._all,
            "text": self._plain,
            "call": self._between,
            "name": self._called,
            "json": self._json,
            "params": self._params,
            "key": self._keyed,
            "value": self._valued,
            "bad": self._skip,
        }
        self._open = layout.trigger
        self._call_open = layout.call_open[0]

    def feed(self, piece: str) -> list[Event]:
        """What `piece` of the output brings."""
        self._buffer += piece
        return self._run()

    def close(self) -> list[Event]:
        """What was held back, now that the output has ended."""
        self._ended = True
        events = self._run()
        if self._state in _TEXT:
            events += self._say(self._take(len(self._buffer)))
        elif self._state == "thinking":
            events += self._think(self._take(len(self._buffer)))
        elif self._state == "bad":
            events += self._report(self._raw + self._take(len(self._buffer)))
        else:
            self._incomplete = True
        return events

    def turn(self) -> ParsedTurn:
        """All there was; after `close`."""
        reasoning, text = "".join(self._reasoning), "".join(self._text)
        return ParsedTurn(reasoning, text, tuple(self._calls), tuple(self._malformed), self._incomplete)

    def _run(self) -> list[Event]:
        events = list[Event]()
        while True:
            try:
                more = self._steps[self._state]()
                if more is None:
                    return events
                events.extend(more)
            except _Malformed as error:
                self._reason, self._state = str(error), "bad"

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        if self._state != "thinking" and self._state not in _TEXT:
            self._raw += taken
        return taken

    def _eat(self, pattern: str) -> str | None:
        """The text that matches `pattern` at the head, white space before it dropped; None where it doesn't."""
        found = re.compile(r"\s*" + pattern).match(self._buffer)
        return self._take(found.end()).strip() if found else None

    def _begins(self, literal: str) -> bool | None:
        """Whether `literal` comes next behind white space; None where more must come to tell."""
        rest = self._buffer.lstrip()
        if rest.startswith(literal):
            return True
        return None if not self._ended and literal.startswith(rest) else False

    def _cut_in(self, *literals: str) -> bool:
        """Whether the output has ended within one of `literals`, or before them."""
        return self._ended and any(literal.startswith(self._buffer.lstrip()) for literal in literals)

    def _say(self, text: str) -> Iterator[Event]:
        if text:
            self._text.append(text)
            yield TextDelta(text)

    def _think(self, text: str) -> Iterator[Event]:
        if text:
            self._reasoning.append(text)
            yield ReasoningDelta(text)

    # reasoning and text

    def _start(self) -> Iterator[Event] | None:
        literal, rest = self._layout.think_open.strip(), self._buffer.lstrip(" \t\r\n")
        if not rest.startswith(literal) and literal.startswith(rest) and not self._ended:
            return None
        begins = rest.startswith(literal)
        if begins:
            self._take(len(self._buffer) - len(rest) + len(literal))
        self._state = "thinking" if begins else self._answer
        return iter(())

    def _thinking(self) -> Iterator[Event] | None:
        literal = self._layout.think_close
        lead = literal[: len(literal) - len(literal.lstrip())]
        if not self._reasoning and lead:  # the line break that follows the opening tag
            if not self._buffer:
                return None
            if self._buffer.startswith(lead) and not self._buffer.startswith(literal):
                if len(self._buffer) < len(literal) and literal.startswith(self._buffer) and not self._ended:
                    return None
                self._take(len(lead))
        cut, size, found = self._find(literal, literal.strip())
        said = self._take(cut)
        if found:
            self._take(size)
            self._state = "after_think"
        return self._think(said) if said or found else None

    def _after_think(self) -> Iterator[Event] | None:
        gap = self._layout.after_think
        if not self._ended and len(self._buffer) < len(gap) and gap.startswith(self._buffer):
            return None
        same = next((n for n in range(len(gap)) if self._buffer[n : n + 1] != gap[n]), len(gap))
        lead = self._layout.lead + self._open  # a call's lead is no part of this gap where nothing else precedes it
        if not (gap and gap in lead and lead.startswith(self._buffer[: len(lead)]) and self._layout.block_open):
            self._take(same)
        self._state = self._answer
        return iter(())

    def _either(self) -> Iterator[Event] | None:
        """Where text stands instead of calls: what comes first decides."""
        opens = self._begins(self._open)
        if opens is None:
            return None
        self._state = "text" if opens else "all"
        self._take(len(self._buffer) - len(self._buffer.lstrip()) if opens else 0)
        return iter(())

    def _all(self) -> Iterator[Event] | None:
        return self._say(self._take(len(self._buffer))) if self._buffer else None

    def _find(self, *literals: str) -> tuple[int, int, bool]:
        """Where the first of `literals` begins, its length, True; else how much can't be the beginning of any."""
        places = [(at, -len(one)) for one in literals if (at := self._buffer.find(one)) >= 0]
        safe = len(self._buffer) if self._ended else min(_safe(self._buffer, one) for one in literals)
        if places and min(places)[0] <= safe:
            at, size = min(places)
            return at, -size, True
        return safe, 0, False

    def _plain(self) -> Iterator[Event] | None:
        lead = self._layout.lead
        cut, size, found = self._find(lead + self._open, self._open)
        if not found:
            said = self._take(cut)
            return self._say(said) if said else None
        follows = self._follows(self._buffer[cut + size :])
        if follows is None and not self._ended:
            said = self._take(cut)
            return self._say(said) if said else None
        said = self._take(cut + size if follows is False else cut)
        if follows is not False:
            self._state, self._raw = "call", ""
            if self._layout.block_open:
                self._take(size)
            else:
                self._take(size - len(self._open))
        return self._say(said) if said else iter(())

    def _follows(self, rest: str) -> bool | None:
        """Whether `rest`, behind an opening literal, begins a call; None where more must come to tell."""
        rest = rest.lstrip()
        if self._layout.block_open:
            head = self._call_open
        elif self._layout.typed == "json":
            head = "{"
        else:
            name = TOOL_NAME.match(rest)
            after = rest[name.end() :].lstrip() if name else rest
            ends = (self._layout.param_open, self._layout.call_close)
            if name and any(after.startswith(end) for end in ends):
                return True
            return None if not rest or (name and any(end.startswith(after) for end in ends)) else False
        return True if rest.startswith(head) else None if head.startswith(rest) else False

    # calls

    def _between(self) -> Iterator[Event] | None:
        """Before a call, or before the end of the block."""
        if self._layout.block_open:
            close = self._begins(self._layout.block_close.strip())
            if close:
                self._eat(re.escape(self._layout.block_close.strip()))
                self._state = "text"
                return iter(())
            opens = self._begins(self._call_open)
            if not opens and (opens is None or close is None):
                return None
            if not opens:
                self._state = "text"
                return iter(())
        self._index += 1
        self._raw, self._name, self._arguments, self._keys = "", "", [], set()
        self._eat(re.escape(self._call_open if self._layout.block_open else self._open))
        self._state = "name"
        return iter(())

    def _called(self) -> Iterator[Event] | None:
        if self._layout.typed == "json":
            found = re.match(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)', self._buffer)
            if not found:
                return self._unordered()
            name, size = _read(found[1]), found.end()
            self._scan, self._state = JsonScan(), "json"
        else:
            stop = '"' if self._layout.call_open[1].startswith('"') else "<"
            at = self._buffer.find(stop)
            if at < 0:
                return None
            name, size = self._buffer[:at].strip(), at
            if stop == '"':
                if len(self._buffer) < at + 2:
                    return None
                size = at + 2 if self._buffer[at : at + 2] == '">' else at
            if size == at and stop == '"':
                raise _Malformed("the name of the tool is not followed by '\">'")
            self._state = "params"
        self._take(size)
        return self._begin(name)

    def _unordered(self) -> Iterator[Event] | None:
        """A JSON call whose members come otherwise than name, arguments: read whole, once its end is there."""
        if '"arguments"' not in self._buffer or re.match(r'\s*\{\s*"name"\s*:', self._buffer):
            close = self._buffer.find(self._layout.call_close.strip("}\n"))
            if close < 0:
                return None
            raise _Malformed('a call must be {"name": ..., "arguments": {...}}')
        scan = JsonScan()
        end = scan.feed(self._buffer.lstrip())
        if scan.broken:
            raise _Malformed(f"no JSON: {scan.broken}")
        if end is None:
            return None
        size = len(self._buffer) - len(self._buffer.lstrip()) + end
        value = _read(self._buffer[:size])
        if not isinstance(value, dict) or set(value) != {"name", "arguments"} or not isinstance(value["name"], str):
            raise _Malformed('a call must be {"name": ..., "arguments": {...}}')
        self._take(size)
        self._buffer = canonical_json(value["arguments"]) + "}" + self._buffer
        self._scan, self._state = JsonScan(), "json"
        return self._begin(value["name"])

    def _begin(self, name: str) -> Iterator[Event]:
        if not TOOL_NAME.fullmatch(name):
            raise _Malformed(f"{name!r} is no name of a tool")
        self._name = name
        return iter((CallBegin(self._index, call_id(self._scope, self._index, name), name, name in self._tools),))

    def _json(self) -> Iterator[Event] | None:
        if not self._scan.started and not self._buffer.startswith("{"):
            raise _Malformed("arguments must be a JSON object")
        if self._scan.done:
            rest = self._begins("}")
            if rest is None:
                return None
            closed = re.match(r"\s*\}\s*" + re.escape(self._layout.call_close.strip("}\n")), self._buffer)
            wanted = "}" + self._layout.call_close.strip("}\n")
            if not closed:
                if wanted.startswith(re.sub(r"\s", "", self._buffer)):
                    return None
                raise _Malformed(f"arguments must be followed by {self._layout.call_close!r}")
            self._take(closed.end())
            return self._finish()
        if not self._buffer:
            return None
        if self._scan.broken:
            raise _Malformed(f"arguments are no JSON: {self._scan.broken}")
        end = self._scan.feed(self._buffer)
        if self._scan.broken:
            return self._argue(self._take(self._scan.good))
        return self._argue(self._take(len(self._buffer) if end is None else end))

    def _argue(self, text: str) -> Iterator[Event]:
        self._arguments.append(text)
        yield ArgumentsDelta(self._index, text)

    def _finish(self) -> Iterator[Event]:
        value = _read("".join(self._arguments))
        if not isinstance(value, dict):
            raise _Malformed("arguments must be a JSON object")
        self._calls.append(ToolCall(call_id(self._scope, self._index, self._name), self._name, value))
        self._state = "call" if self._layout.block_open else "text"
        return iter((CallEnd(self._index),))

    def _params(self) -> Iterator[Event] | None:
        """Before a parameter, or before the end of the call."""
        close = self._layout.call_close.strip()
        opens, closes = self._begins(self._layout.param_open), self._begins(close)
        if opens:
            self._eat(re.escape(self._layout.param_open))
            self._state = "key"
            return iter(())
        if closes:
            self._eat(re.escape(close))
            rest = "}" if self._arguments else "{}"
            return iter((*self._argue(rest), *self._finish()))
        if opens is None or closes is None or self._cut_in(self._layout.param_open, close):
            return None
        raise _Malformed(f"{self._layout.param_open!r} or {close!r} must come next")

    def _keyed(self) -> Iterator[Event] | None:
        ends = (self._layout.key_end_string, self._layout.key_end_json)
        heads = [end.split("\n")[0].split("=")[0] for end in ends]
        at = self._buffer.find(heads[0])
        if at < 0:
            return None
        for end, kind in zip(ends, ("string", "json"), strict=True):
            found = re.match(r"\s*".join(re.escape(part) for part in _parts(end)), self._buffer[at:])
            if found:
                key = self._take(at + found.end())[:at]
                return self._named(key, kind)
        tail = self._buffer[at:]
        if any(_joined(end).startswith(_joined(tail)) for end in ends):
            return None
        raise _Malformed(f"a parameter's name must be followed by {ends[0]!r} or {ends[1]!r}")

    def _named(self, key: str, kind: str) -> Iterator[Event]:
        if key in self._keys:
            raise _Malformed(f"the parameter {key!r} comes twice")
        if self._layout.typed == "schema":
            tool = self._tools.get(self._name)
            kind = tool.kind(key) if tool else "either"
        self._keys.add(key)
        self._key, self._kind, self._value, self._scanned, self._state = key, kind, [], 0, "value"
        head = ("{" if not self._arguments else ", ") + canonical_json(key) + ": "
        return self._argue(head + ('"' if kind == "string" else ""))

    def _valued(self) -> Iterator[Event] | None:
        close = self._layout.param_close.strip()
        first = self._value[0][:1] if self._value else self._buffer[:1]
        if self._kind == "json" or (self._kind == "either" and first in ("[", "{")):
            return self._json_valued(close)
        cut, size, found = self._find(close)
        if not found and (self._ended or not cut):
            return None
        text = self._take(cut)
        if not found:
            return self._argue(canonical_json(text)[1:-1]) if self._kind == "string" else self._keep(text)
        self._take(size)
        self._state = "params"
        if self._kind == "string":
            return self._argue(canonical_json(text)[1:-1] + '"')
        return self._typed("".join([*self._value, text]))

    def _json_valued(self, close: str) -> Iterator[Event] | None:
        """The same of JSON, in whose strings a closing literal is text."""
        for part in _JSON_PART.finditer(self._buffer, self._scanned):
            if part[0] == "<" and self._buffer.startswith(close, part.start()):
                text = self._take(part.start())
                self._take(len(close))
                self._state = "params"
                return self._typed(text)
            if part[0] == '"' or (part[0] == "<" and close.startswith(self._buffer[part.start() :])):
                return None  # within a string, or within what may close
            self._scanned = part.end()
        return None

    def _keep(self, text: str) -> Iterator[Event]:
        """Of JSON nothing is told before all of it is known to be JSON."""
        self._value.append(text)
        return iter(())

    def _typed(self, text: str) -> Iterator[Event]:
        try:
            value = _read(text)
        except _Malformed as error:
            if self._kind == "either":
                return self._argue(canonical_json(text))
            raise _Malformed(f"the parameter {self._key!r}: {error}") from error
        as_text = self._kind == "either" and isinstance(value, str)
        return self._argue(canonical_json(text) if as_text else text)

    def _skip(self) -> Iterator[Event] | None:
        """Over a malformed call, to its end."""
        close = self._layout.call_close.strip("}\n")
        at = (self._raw + self._buffer).find(close)
        if at < 0:
            return None
        self._take(max(at + len(close) - len(self._raw), 0))
        events = list(self._report(self._raw))
        self._state = "call" if self._layout.block_open else "text"
        return iter(events)

    def _report(self, text: str) -> Iterator[Event]:
        event = CallMalformed(self._index, self._reason, text)
        self._malformed.append(event)
        yield event


def _safe(text: str, literal: str) -> int:
    """How much of `text` stands before its longest suffix that may begin `literal`."""
    for size in range(min(len(literal) - 1, len(text)), 0, -1):
        if literal.startswith(text[-size:]):
            return len(text) - size
    return len(text)


def _parts(literal: str) -> list[str]:
    return [part for part in re.split(r"\n|(?<=>)(?=<)", literal) if part]


def _joined(text: str) -> str:
    return re.sub(r"\s", "", text)


def _read(text: str) -> Any:
    """JSON as the standard has it: no NaN, no name twice. Raises `_Malformed`."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"no JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name comes twice")
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
