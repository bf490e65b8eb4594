"""The door of the room: what an output must be -> a machine; or a grammar by itself, to try texts on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from zllm_jax.errors import InvalidRequest
from zllm_jax.fence import regular
from zllm_jax.fence.automaton import choices
from zllm_jax.fence.host import HostMachine, lark
from zllm_jax.fence.machine import Machine, machine_of
from zllm_jax.fence.schema import json_schema
from zllm_jax.values import Fence


@dataclass(frozen=True, eq=False)
class Compiled:
    """relaxed: what is not enforced, on request. notes: what the author of a schema may want to know."""

    machine: Machine
    relaxed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def compile_fence(fence: Fence) -> Compiled:
    """The machine of a fence. Raises `UnsupportedGrammar` where it cannot be enforced exactly.

    A Lark-like grammar has none: `fence.host` follows it.
    """
    if fence.lark is not None:
        raise ValueError("a Lark-like grammar has no machine: use fence.lark and HostVocabulary.matcher")
    relaxed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if fence.schema is not None:
        found = json_schema(fence.schema, whitespace=fence.whitespace, formats=fence.formats, relax=fence.relax)
        machine, relaxed = found.machine, found.relaxed
        notes = tuple(f"{where}: JSON Schema has no such keyword: it is not enforced" for where in found.unknown)
        if not has_escape(fence.schema):
            notes += (NO_ESCAPE,)
    elif fence.regex is not None:
        machine = machine_of(regular.fullmatch_regex(fence.regex))
    else:
        machine = machine_of(choices(fence.choices))
    if not machine.start:
        raise InvalidRequest("no text satisfies the fence: nothing could be generated", param="fence")
    return Compiled(machine, relaxed, notes)


NO_ESCAPE = (
    "the schema has no way to say that no answer is known, which makes a model invent one: see with_error_variant"
)


def has_escape(schema: object) -> bool:
    """Whether a schema has a branch for "I don't know": null, or one of several alternatives, at its top."""
    if not isinstance(schema, dict):
        return schema is True
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return "null" in kinds or not kinds or any(keyword in schema for keyword in ("anyOf", "oneOf", "enum"))


class Refused(NamedTuple):
    """Where a text leaves a grammar. offset: of the byte that may not come, or the text's length where it is too short.

    allowed: the bytes that may come there. may_end: whether the text might also end there.
    """

    offset: int
    allowed: bytes
    may_end: bool


class Grammar:
    """What a text must be. relaxed: what is not enforced, on request. notes: what the author may want to know."""

    def __init__(self, fence: Fence) -> None:
        self.relaxed: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._machine: Machine | HostMachine
        if fence.lark is not None:
            self._machine = HostMachine(lark(fence.lark))
        else:
            compiled = compile_fence(fence)
            self._machine, self.relaxed, self.notes = compiled.machine, compiled.relaxed, compiled.notes

    @property
    def machine(self) -> Machine | HostMachine:
        """What steps through a text byte by byte: `begin`, `step`, `ended`."""
        return self._machine

    def accepts(self, text: bytes | str) -> bool:
        """Whether a whole text is of the grammar."""
        return self.first_error(text) is None

    def first_error(self, text: bytes | str) -> Refused | None:
        """The first byte that is refused; None for a whole text of the grammar."""
        machine: Any = self._machine
        data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
        at = machine.begin
        for offset, byte in enumerate(data):
            after = machine.step(at, byte)
            if after.dead:
                return self._refused(offset, at)
            at = after
        return None if machine.ended(at) else self._refused(len(data), at)

    def _refused(self, offset: int, at: Any) -> Refused:
        machine: Any = self._machine
        allowed = bytes(byte for byte in range(256) if not machine.step(at, byte).dead)
        return Refused(offset, allowed, machine.ended(at))


def compile_grammar(
    *,
    json_schema: bool | Mapping[str, Any] | None = None,
    regex: str | None = None,
    lark: str | None = None,
    choices: Sequence[str] = (),
    whitespace: Literal["spaced", "dense", "free"] = "spaced",
    formats: bool = True,
    relax: bool = False,
) -> Grammar:
    """Exactly one of the first four; the others as in `Fence`.

    Raises `UnsupportedGrammar`, with the keyword's path, where it cannot be enforced exactly, and `InvalidRequest` for
    what is no grammar.
    """
    return Grammar(
        Fence(
            schema=json_schema,
            regex=regex,
            lark=lark,
            choices=tuple(choices),
            whitespace=whitespace,
            formats=formats,
            relax=relax,
        )
    )
