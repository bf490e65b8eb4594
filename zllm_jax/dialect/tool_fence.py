"""From a dialect's literals and a list of tools to the machine of exactly the turns that call them rightly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zllm_jax.dialect.tools import Layout, ToolSpec, parameter_schema
from zllm_jax.errors import InvalidRequest, UnsupportedGrammar
from zllm_jax.fence import DEAD, ByteAutomaton, Condition, Machine, regular
from zllm_jax.fence.machine import USED_BITS
from zllm_jax.fence.schema import inhabited, json_schema, text_language
from zllm_jax.fence.structure import Branch, Structure
from zllm_jax.values import AllowedTools, NamedTool, ToolChoice


def call_machine(
    layout: Layout,
    tools: Sequence[ToolSpec],
    choice: ToolChoice = "auto",
    *,
    parallel: bool = True,
    thinking: bool | None = False,
    text: Machine | None = None,
) -> Machine:
    """The machine of a turn.

    choice: "auto" is free text until a call opens; "none" is text in which none can; "required" is at least one call
    and nothing else; `NamedTool` likewise, of one tool; `AllowedTools` leaves tools out. parallel: whether a second
    call may follow. thinking: True for a turn that begins inside the reasoning, in which markup is text; None for one
    that may begin with it.
    text: what text must be. Then "auto" is either such a text or calls, and "none" is such a text, in which markup is
    text. What begins as reasoning or as a call is that.

    A call's fixed text, its name and its parameters' names are forced; each parameter comes at most once, and the end
    of a call only after those that are required. Parameters that a tool doesn't list are not written. Raises
    `InvalidRequest` for a tool that was not offered, `UnsupportedGrammar` for a schema that cannot be enforced.
    """
    offered, choice = _offered(tools, choice)
    if choice != "none" and choice != "auto" and not offered:
        wanted = repr(choice.name) if isinstance(choice, NamedTool) else "a tool"
        raise InvalidRequest(f"{wanted} must be called, but is not among the tools", param="tool_choice")
    return _Turn(layout, offered, parallel, text).machine(choice, thinking)


def _offered(tools: Sequence[ToolSpec], choice: ToolChoice) -> tuple[list[ToolSpec], ToolChoice]:
    """The tools that may be called, and the choice among them."""
    if isinstance(choice, AllowedTools):
        return [tool for tool in tools if tool.name in choice.names], "required" if choice.required else "auto"
    return [tool for tool in tools if not isinstance(choice, NamedTool) or tool.name == choice.name], choice


class _Turn:
    def __init__(self, layout: Layout, tools: Sequence[ToolSpec], parallel: bool, text: Machine | None) -> None:
        self._layout, self._tools, self._parallel, self._fenced_text = layout, tools, parallel, text
        self._structure = Structure()
        self._types: dict[tuple[tuple[str, int], ...], int] = {}  # where a parameter's name has ended
        self._behind_tags: dict[int, int] = {}  # by where it goes on, where a text's closing tag has ended

    def machine(self, choice: ToolChoice, thinking: bool | None) -> Machine:
        layout, structure = self._layout, self._structure
        trigger = layout.trigger.encode()
        if choice == "none" or not self._tools:
            if self._fenced_text is not None:
                return structure.machine(self._fenced([], self._fenced_text, thinking))
            return structure.machine(self._turn({trigger: DEAD}, [], thinking))
        end = structure.state(accepting=True)
        between = structure.state(accepting=not layout.block_open)
        openings = [self._call(tool, between) for tool in self._tools]
        again = _behind(layout.between_calls, openings) if self._parallel else []
        close = [Branch(layout.block_close.encode(), end)] if layout.block_open else []
        structure.fork(between, [*again, *close])
        first = _behind(layout.block_open, openings)
        if choice != "auto":
            return structure.machine(self._turn(None, _behind(layout.lead, first), thinking))
        inside = self._forced([_without(trigger, branch) for branch in first])
        if self._fenced_text is not None:
            return structure.machine(self._fenced([Branch(trigger, inside)], self._fenced_text, thinking))
        return structure.machine(self._turn({trigger: inside}, [], thinking))

    def _fenced(self, calls: Sequence[Branch], text: Machine, thinking: bool | None) -> int:
        """A state in which a turn begins: one of the texts `calls`, or else a text of `text`."""
        layout, structure = self._layout, self._structure
        texts = structure.embedded(text)
        answer = structure.one_of(calls, texts)
        if thinking is False:
            return answer
        close = layout.think_close.strip().encode()
        reasoning = structure.until({close: self._behind_gap(answer)}, accepting=False)
        if thinking:
            return reasoning
        return structure.one_of([*calls, Branch(layout.think_open.strip().encode(), reasoning)], texts)

    def _behind_gap(self, answer: int) -> int:
        """What goes on as `answer` behind what a reader drops after the reasoning, or behind the beginning of that."""
        for byte in reversed(self._layout.after_think.encode()):
            before = self._structure.state()
            self._structure.fork(before, [Branch(bytes([byte]), answer)], beside=answer)
            answer = before
        return answer

    def _turn(self, triggers: Mapping[bytes, int] | None, forced: Sequence[Branch], thinking: bool | None) -> int:
        """A state in which a turn begins: free text up to `triggers`, or without them one of the texts `forced`."""
        layout, structure = self._layout, self._structure

        def begin(first: Branch | None = None) -> int:
            if triggers is not None:
                return structure.until(triggers, accepting=True, first=first)
            reasons = [] if first is None else [first, *([_with(first, _LINE + first.text)] if layout.lead else [])]
            return self._forced([*forced, *reasons])

        if thinking is False:
            return begin()
        reasoning = structure.until({layout.think_close.strip().encode(): begin()}, accepting=False)
        return reasoning if thinking else begin(Branch(layout.think_open.strip().encode(), reasoning))

    def _forced(self, branches: Sequence[Branch]) -> int:
        state = self._structure.state()
        self._structure.fork(state, branches)
        return state

    def _call(self, tool: ToolSpec, after: int) -> Branch:
        """What opens a call of this tool; all that follows in it is written."""
        layout = self._layout
        opening = layout.call_open[0] + tool.name + layout.call_open[1]
        try:
            if layout.typed == "json":
                closing = self._forced([Branch(layout.call_close.encode(), after)])
                return Branch(opening.encode(), self._structure.json(_closed(tool.parameters), closing))
            return self._parameters(tool, opening, after)
        except UnsupportedGrammar as error:
            raise UnsupportedGrammar(f"the tool {tool.name}: {error.reason}", where=error.where) from None

    def _parameters(self, tool: ToolSpec, opening: str, after: int) -> Branch:
        layout, structure = self._layout, self._structure
        shared = "" if layout.call_open[1] else layout.param_open[0]  # what a name ends with where nothing else ends it
        properties = list(tool.parameters.get("properties") or {})
        required = set(tool.parameters.get("required") or ())
        _check_writable(layout, tool.parameters)
        if len(properties) > USED_BITS or not required <= set(properties):
            missing = sorted(required - set(properties))
            why = f"{missing} are required, but not listed" if missing else f"more than {USED_BITS} parameters"
            raise UnsupportedGrammar(why, where="#/required" if missing else "#/properties")
        bits = {name: 1 << i for i, name in enumerate(properties)}
        close = Branch(
            layout.call_close.encode(), pop=True, condition=Condition(need=sum(bits[name] for name in required))
        )
        start = structure.frame()
        later = structure.state()
        closing = self._forced([Branch(layout.param_close.encode(), later)])
        names = structure.state()
        members = {name: self._parameter(tool, name, bits[name], later, closing) for name in properties}
        written = {name: branch for name, branch in members.items() if branch is not None}
        if lacking := sorted(required - written.keys()):
            raise UnsupportedGrammar(
                f"no value of this required parameter can be written in {layout.name}",
                where=f"#/properties/{lacking[0]}",
            )
        try:
            structure.fork(names, list(written.values()), assured=True)
        except ValueError as error:
            raise UnsupportedGrammar(f"two names of parameters: {error}", where="#/properties") from None
        left = Condition(some_clear=sum(bits[name] for name in written))
        more = [Branch(layout.param_open.encode(), names, left)] if written else []
        structure.fork(later, [*_behind(layout.between_params, more), close])
        structure.fork(start, [_without(shared.encode(), one) for one in (*more, close)])
        structure.leave()
        return Branch((opening + shared).encode(), start, push=after)

    def _parameter(self, tool: ToolSpec, name: str, bit: int, after: int, closing: int) -> Branch | None:
        """The name of a parameter; None where no value of it can be written. closing: where its end is written, before
        `after`.

        Once its name has ended, parameters of equal types go on in the same states.
        """
        layout = self._layout
        schema = parameter_schema(tool.parameters, name)
        if layout.typed == "schema":
            ends = [(layout.key_end_json[1:], self._untyped(schema, after, closing))]
        else:
            texts, others = text_language(schema), {"allOf": [schema, {"not": {"type": "string"}}]}
            ends = [(layout.key_end_json[1:], self._structure.json(others, closing))] if inhabited(others) else []
            if texts is not None:
                ends.append((layout.key_end_string[1:], self._text(texts, after)))
        key = tuple((text, value) for text, value in ends if value != DEAD)
        if not key:
            return None
        if key not in self._types:
            self._types[key] = self._forced([Branch(text.encode(), value) for text, value in key])
        opening = name + layout.key_end_json[0]
        return Branch(opening.encode(), self._types[key], Condition(some_clear=bit), bit)

    def _untyped(self, schema: dict[str, Any], after: int, closing: int) -> int:
        """A value of which nothing but its text says whether it is JSON: what reads as JSON is no text."""
        texts, others = text_language(schema), {"allOf": [schema, {"not": {"type": "string"}}]}
        if texts is None:
            return self._structure.json(others, closing) if inhabited(others) else DEAD
        if not inhabited(others):
            return self._text(texts, after)
        scalars, composites = ({"allOf": [schema, kind]} for kind in (_SCALARS, _COMPOSITES))
        texts = regular.difference(texts, regular.fullmatch_regex(_READ_AS_JSON))
        if inhabited(scalars):
            texts = regular.union(texts, _scalars(scalars))
        text = self._text(texts, after)
        if not inhabited(composites):
            return text
        json = self._structure.json(composites, closing)
        return json if text == DEAD else self._structure.either(text, json)

    def _text(self, texts: ByteAutomaton, after: int) -> int:
        """What ends the value for a reader is the tag; the white space behind it is written, too."""
        close = self._layout.param_close
        tag = close.rstrip()
        if after not in self._behind_tags:
            self._behind_tags[after] = (
                self._forced([Branch(close[len(tag) :].encode(), after)]) if tag != close else after
            )
        return self._structure.text(texts, tag.encode(), self._behind_tags[after])


def _check_writable(layout: Layout, parameters: Mapping[str, Any]) -> None:
    """Raises `UnsupportedGrammar` for rules about all parameters together, which are written one by one."""
    names, required = parameters.get("properties") or {}, set(parameters.get("required") or ())
    kinds = parameters.get("type", "object")
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise UnsupportedGrammar(f"parameters are an object, not {kinds!r}", where="#/type")
    few, many = parameters.get("minProperties", 0), parameters.get("maxProperties", len(names))
    rules = [keyword for keyword in _TOGETHER if keyword in parameters]
    rules += ["minProperties"] if few > len(required) else []
    rules += ["maxProperties"] if many < len(names) else []
    if rules:
        raise UnsupportedGrammar(f"{layout.name} writes parameters one by one, by properties", where=f"#/{rules[0]}")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UnsupportedGrammar(f"the name {name!r} is no Unicode", where="#/properties") from None


_LINE = b"\n"
_SCALARS, _COMPOSITES = {"type": ["number", "boolean", "null"]}, {"type": ["array", "object"]}
# What a parser that looks for JSON first would not take as a text; and more, as JSON's brackets are not regular.
_READ_AS_JSON = r"\s*([\[{][\s\S]*|(-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null)\s*)"
# Keywords that say something about all parameters together.
_TOGETHER = (
    *("$ref", "$dynamicRef", "const", "enum", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
)
# Keywords by which names may come that `properties` doesn't list.
_NAMING = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "patternProperties")


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of all arguments, without unlisted ones where nothing but `properties` says which there are."""
    listed = parameters.keys().isdisjoint(_NAMING)
    return {"type": "object", **({"additionalProperties": False} if listed else {}), **parameters}


def _scalars(schema: dict[str, Any]) -> ByteAutomaton:
    machine = json_schema(schema).machine
    return ByteAutomaton(machine.edges, machine.accepting, machine.start)


def _behind(text: str, branches: Sequence[Branch]) -> list[Branch]:
    """The branches with a fixed text before each."""
    return [_with(branch, text.encode() + branch.text) for branch in branches]


def _without(text: bytes, branch: Branch) -> Branch:
    """The branch behind a text that it begins with."""
    return _with(branch, branch.text.removeprefix(text))


def _with(branch: Branch, text: bytes) -> Branch:
    return Branch(text, branch.to, branch.condition, branch.use, branch.push, branch.pop)
