"""What all tool dialects share: calls, tools, and a dialect's literals as data, from which it writes and reads."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from zllm_jax.dialect.tokenizer import Tokenizer
from zllm_jax.errors import BadTokenizer, InvalidRequest, UnsupportedGrammar
from zllm_jax.fence.schema import inhabited, text_language
from zllm_jax.values import ToolCall

TOOL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]*")
Kind = Literal["string", "json", "either"]


@dataclass(frozen=True)
class ToolSpec:
    """A tool on offer. parameters: JSON Schema of its arguments. wire: the client's own object, which is shown."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    wire: Mapping[str, Any] = field(default_factory=dict)
    _kinds: dict[str, Kind] = field(default_factory=dict, compare=False, repr=False)

    def kind(self, parameter: str) -> Kind:
        """Whether the schema lets `parameter` be a string only, anything but a string, or either."""
        properties = self.parameters.get("properties")
        if not isinstance(properties, Mapping) or parameter not in properties:
            return "either"
        if parameter not in self._kinds:
            self._kinds[parameter] = _kind(parameter_schema(self.parameters, parameter))
        return self._kinds[parameter]


@dataclass(frozen=True)
class Layout:
    """The literals of a dialect: what its renderer writes, its parser reads and a grammar forces.

    A turn is reasoning, `think_close`, content, and calls: `lead block_open call (between_calls call)* block_close`. A
    call is `call_open[0] NAME call_open[1]`, its arguments, `call_close`. The arguments are parameters joined by
    `between_params`, each `param_open KEY key_end VALUE param_close`; or one JSON object where `param_open` is empty.

    lead: what separates content and calls. key_end_string, key_end_json: behind the key, by the type of its value.
    after_think: what follows `think_close` before content. typed: what tells a string from JSON: "attribute" the
    key's end, "schema" the tool's schema, "json" the JSON itself.
    eos: texts that end a turn. special: literals that must be one token each where the model was trained on them.
    """

    name: str
    think_open: str
    think_close: str
    after_think: str
    lead: str
    block_open: str
    block_close: str
    between_calls: str
    call_open: tuple[str, str]
    call_close: str
    param_open: str
    key_end_string: str
    key_end_json: str
    param_close: str
    between_params: str
    typed: Literal["attribute", "schema", "json"]
    eos: tuple[str, ...]
    special: tuple[str, ...] = ()

    @property
    def trigger(self) -> str:
        """The text that opens a region of calls: its first line."""
        return (self.block_open or self.call_open[0]).split("\n")[0]

    def literals(self) -> tuple[str, ...]:
        """Every fixed text, in the order of a turn."""
        parts = (self.think_open, self.think_close, self.lead, self.block_open, *self.call_open, self.param_open)
        rest = (self.key_end_string, self.key_end_json, self.param_close, self.between_params, self.call_close)
        return tuple(part for part in (*parts, *rest, self.between_calls, self.block_close, *self.eos) if part)


def render_call(layout: Layout, call: ToolCall) -> str:
    """The text of one call. Raises `InvalidRequest` for a name or a value that the dialect cannot write."""
    if not TOOL_NAME.fullmatch(call.name):
        raise InvalidRequest(f"{call.name!r} is no name of a tool: letters, digits and _ . : / - only", param="tools")
    return layout.call_open[0] + call.name + layout.call_open[1] + _body(layout, call) + layout.call_close


def render_calls(layout: Layout, calls: Sequence[ToolCall]) -> str:
    """The text of a turn's calls, without `lead`; empty for none."""
    if not calls:
        return ""
    texts = [render_call(layout, call) for call in calls]
    return layout.block_open + layout.between_calls.join(texts) + layout.block_close


def _body(layout: Layout, call: ToolCall) -> str:
    if layout.typed == "json":
        return call.arguments if isinstance(call.arguments, str) else canonical_json(call.arguments)
    given = {"arguments": call.arguments} if isinstance(call.arguments, str) else call.arguments
    return layout.between_params.join(_parameter(layout, call.name, key, value) for key, value in given.items())


def _parameter(layout: Layout, tool: str, key: str, value: Any) -> str:
    text = value if isinstance(value, str) else canonical_json(value)
    close, key_close = layout.param_close.strip(), layout.key_end_string.split("\n")[0]
    if not isinstance(value, str):
        text = text.replace(close, close.replace("/", "\\/", 1))  # it can only stand in a string, which may escape it
    if close in text:
        raise InvalidRequest(
            f"the parameter {key!r} of a call of {tool} contains {close!r}, which would end it: "
            f"the dialect {layout.name} has no way to escape it",
            param="messages",
        )
    if key_close.split("=")[0] in key:
        raise InvalidRequest(f"{layout.name} cannot write a parameter named {key!r}", param="messages")
    key_end = layout.key_end_string if isinstance(value, str) else layout.key_end_json
    return layout.param_open + key + key_end + text + layout.param_close


def canonical_json(value: Any) -> str:
    """`value` as every dialect writes it: keys as they came, ", " and ": " between, no escapes but the needed ones."""
    return json.dumps(value, ensure_ascii=False)


def call_id(scope: str, index: int, name: str) -> str:
    """The id of the `index`-th call of the request `scope`: equal whenever the same request is answered again."""
    digest = hashlib.blake2b(canonical_json([scope, index, name]).encode(errors="surrogatepass"), digest_size=12)
    return f"call_{digest.hexdigest()}"


def tools_of(wire: Iterable[Mapping[str, Any]]) -> tuple[ToolSpec, ...]:
    """Tools from the shape `{"type": "function", "function": {...}}`. Raises `InvalidRequest`."""
    made = []
    for number, tool in enumerate(wire):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"tools[{number}] must have a function with a name", param=f"tools[{number}]")
        parameters, description = function.get("parameters") or {}, function.get("description") or ""
        if not TOOL_NAME.fullmatch(function["name"]):
            raise InvalidRequest(
                f"{function['name']!r} is no name of a tool: letters, digits and _ . : / - only",
                param=f"tools[{number}]",
            )
        if not isinstance(parameters, Mapping):
            raise InvalidRequest(f"parameters of {function['name']} must be a JSON Schema", param=f"tools[{number}]")
        if wrong := _malformed(parameters):
            raise InvalidRequest(f"parameters of {function['name']}: {wrong}", param=f"tools[{number}]")
        made.append(ToolSpec(function["name"], description, parameters, tool))
    return tuple(made)


def _malformed(parameters: Mapping[str, Any]) -> str:
    """What is wrong with what every dialect reads itself; empty for nothing."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, Mapping):
        return f"properties must be an object of schemas, got {properties!r:.60}"
    for name, schema in properties.items():
        if not isinstance(schema, Mapping | bool):
            return f"the schema of {name!r} must be an object, true or false, got {schema!r:.60}"
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        return f"required must be a list of names, got {required!r:.60}"
    return ""


def calls_in(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """The calls of an assistant message; arguments given as text are read where they are a JSON object.

    Raises `InvalidRequest` for one that names no function.
    """
    made = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"tool_calls[{number}] must have a function with a name", param="messages")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _object(arguments)
        made.append(ToolCall(str(call.get("id") or ""), function["name"], arguments))
    return tuple(made)


def check_survives(layout: Layout, tokenizer: Tokenizer) -> None:
    """Whether every literal comes back from `tokenizer` as it was. Raises `BadTokenizer`."""
    for literal in layout.literals():
        ids = tokenizer.encode(literal, add_bos=False)
        back = b"".join(tokenizer.token_bytes(token) for token in ids).decode("utf-8", "replace")
        if back != literal:
            raise BadTokenizer(f"{layout.name} does not fit this tokenizer: {literal!r} comes back as {back!r}")


def check_fits(layout: Layout, tokenizer: Tokenizer) -> None:
    """Whether `tokenizer` is of a model that was trained on a layout: its special literals are one token each, too.

    Raises `BadTokenizer`.
    """
    check_survives(layout, tokenizer)
    for literal in layout.special:
        ids = tokenizer.encode(literal, add_bos=False)
        if len(ids) != 1:
            raise BadTokenizer(f"{layout.name} does not fit this tokenizer: {literal!r} takes {len(ids)} tokens, not 1")


def _object(text: str) -> Mapping[str, Any] | str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def parameter_schema(parameters: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The schema of one listed parameter, its references still those of the whole."""
    alone = parameters["properties"][name]
    if "$ref" not in json.dumps(alone):
        return {"allOf": [alone]}
    whole = {"$id": "urn:schema:parameters", **parameters}
    step = name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
    return {"$ref": f"urn:schema:parameters#/properties/{step}", "$defs": {"parameters": whole}}


def _kind(schema: dict[str, Any]) -> Kind:
    try:
        others = inhabited({"allOf": [schema, {"not": {"type": "string"}}]})
        return "json" if text_language(schema) is None else "either" if others else "string"
    except UnsupportedGrammar:
        return "either"
