"""Random schemas, random values near them, and random texts that a machine allows."""

from __future__ import annotations

import random
from typing import Any

from zllm_jax.fence import Machine

NAMES = ("a", "ab", "b", "key")
SCALARS: tuple[Any, ...] = (None, True, False, 0, 1, 2.5, -3, "", "a", "ab", "xyz", "é", "2024-02-29", "10.0.0.1")


def schema(rng: random.Random, depth: int = 3) -> Any:
    """Most keywords, in combinations that nobody would write."""
    if depth == 0 or rng.random() < 0.08:
        return rng.choice([True, {}, {"type": rng.choice(["string", "integer", "null", "boolean", "number"])}])
    found: dict[str, Any] = {}
    for _ in range(rng.randint(1, 3)):
        found.update(_rule(rng, depth - 1))
    return found


def _rule(rng: random.Random, depth: int) -> dict[str, Any]:
    def inner() -> Any:
        return schema(rng, depth)

    def several(low: int = 1) -> list[Any]:
        return [inner() for _ in range(rng.randint(low, 2))]

    rules: list[Any] = [
        lambda: {"type": rng.choice(["string", "integer", "null", "boolean", "number", "array", "object"])},
        lambda: {"type": rng.sample(["string", "integer", "null", "array", "object"], 2)},
        lambda: {"enum": rng.sample(SCALARS, 3)},
        lambda: {"const": value(rng, 1)},
        lambda: {"properties": {name: inner() for name in rng.sample(NAMES, 2)}},
        lambda: {"properties": {rng.choice(NAMES): inner()}, "additionalProperties": rng.choice([False, inner()])},
        lambda: {"required": rng.sample(NAMES, rng.randint(1, 2))},
        lambda: {"maxProperties": rng.randint(0, 2)},
        lambda: {"minProperties": 1},
        lambda: {"items": inner()},
        lambda: {"prefixItems": several(), "items": rng.choice([False, inner()])},
        lambda: {"minItems": rng.randint(0, 2)},
        lambda: {"maxItems": rng.randint(0, 3)},
        lambda: {"contains": inner(), "minContains": rng.randint(0, 2), "maxContains": rng.randint(1, 2)},
        lambda: {"minLength": rng.randint(0, 2)},
        lambda: {"maxLength": rng.randint(0, 3)},
        lambda: {"format": rng.choice(["date", "ipv4"])},
        lambda: {"anyOf": several()},
        lambda: {"oneOf": several(2)},
        lambda: {"allOf": several()},
        lambda: {"not": inner()},
        lambda: {"if": inner(), "then": inner(), "else": inner()},
        lambda: {"dependentRequired": {rng.choice(NAMES): [rng.choice(NAMES)]}},
        lambda: {"dependentSchemas": {rng.choice(NAMES): inner()}},
        lambda: {"propertyNames": {"maxLength": rng.randint(0, 2)}},
        lambda: {"unevaluatedProperties": rng.choice([False, inner()])},
        lambda: {"unevaluatedItems": False},
    ]
    made: dict[str, Any] = rng.choice(rules)()
    return made


def value(rng: random.Random, depth: int = 3) -> Any:
    """A JSON value over few names and scalars, so that schemas often accept it."""
    kind = rng.random()
    if depth == 0 or kind < 0.4:
        return rng.choice(SCALARS)
    if kind < 0.65:
        return [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {name: value(rng, depth - 1) for name in rng.sample((*NAMES, "other"), rng.randint(0, 3))}


def text(machine: Machine, rng: random.Random, soon: int = 60) -> bytes | None:
    """A whole text that the machine allows, byte by byte; None where chance found no end (a long name is required).

    Raises `AssertionError` where it leads into a dead end.
    Numbers stay short, so that a validator that knows them as floats judges them exactly.
    """
    at, written = machine.begin, bytearray()
    for step in range(1500):
        ways = {byte: after for byte in range(256) if not (after := machine.step(at, byte)).dead}
        if machine.ended(at) and (not ways or len(written) > soon or rng.random() < 0.3):
            return bytes(written)
        assert ways, f"nothing may follow {bytes(written)!r}"
        closing = [byte for byte, after in ways.items() if len(after.stack) < len(at.stack)]
        closing = closing or [byte for byte in ways if byte in b'",']
        hurry = step > soon or rng.random() < 0.2 or bytes(written[-4:]).strip(b"0123456789.+-eE") == b""
        byte = rng.choice(closing) if closing and hurry else rng.choice(list(ways))
        written.append(byte)
        at = ways[byte]
    return None
