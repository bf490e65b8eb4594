"""The door of the room: what an output must be, in whichever form it is given -> a machine."""

from __future__ import annotations

import time
from dataclasses import dataclass

from zllm_jax.errors import InvalidRequest
from zllm_jax.fence import regular
from zllm_jax.fence.automaton import choices
from zllm_jax.fence.machine import Machine, machine_of
from zllm_jax.fence.schema import json_schema
from zllm_jax.values import Fence


@dataclass(frozen=True, eq=False)
class Compiled:
    """relaxed: what is not enforced, on request. notes: what the author of a schema may want to know."""

    machine: Machine
    relaxed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


def compile_fence(fence: Fence) -> Compiled:
    """The machine of a fence. Raises `UnsupportedGrammar` where it cannot be enforced exactly.

    A Lark-like grammar has none: `fence.host` follows it.
    """
    if fence.lark is not None:
        raise ValueError("a Lark-like grammar has no machine: use fence.lark and HostVocabulary.matcher")
    begun = time.perf_counter()
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
    return Compiled(machine, relaxed, notes, time.perf_counter() - begun)


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
