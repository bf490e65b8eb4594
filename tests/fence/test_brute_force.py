"""Masks against brute force: finite schemas, all their texts listed, and a bit is set where one of them goes on so.

Members in any order, counts, nesting and alternatives: frames and registers at work, over tokens that span them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.fence.completion import completed
from tests.fence.masks import legal, mask
from tests.fence.schema import randomly
from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import TokenTables, Vocabulary, compile_tokens
from zllm_jax.fence.schema import json_schema

EOS = 0
MOST = 4000  # texts of one schema
SCALARS: tuple[Any, ...] = (None, True, False, 0, 1, 12, 1.5, -3, "", "a", "ab", "é", "}")
NAMES = ("a", "ab", "b")


def finite(rng: random.Random, depth: int = 3) -> tuple[dict[str, Any], list[str]]:
    """A schema and every text of it, spaced as `json.dumps` does."""
    made = _finite(rng, depth)
    while len(made[1]) > MOST:
        made = _finite(rng, depth)
    return made


def _finite(rng: random.Random, depth: int) -> tuple[dict[str, Any], list[str]]:
    kind = rng.choice(["enum", "object", "array", "tuple", "anyOf"] if depth else ["enum", "boolean"])
    if kind == "enum":
        values = rng.sample(SCALARS, rng.randint(1, 3))
        return {"enum": values}, sorted({text for value in values for text in _spellings(value)})
    if kind == "boolean":
        return {"type": ["boolean", "null"]}, ["true", "false", "null"]
    if kind == "anyOf":
        parts = [finite(rng, depth - 1) for _ in range(2)]
        texts = list(dict.fromkeys(text for _, several in parts for text in several))
        return {"anyOf": [schema for schema, _ in parts]}, texts
    if kind == "object":
        return _object(rng, depth)
    low = rng.randint(0, 2)
    items = [finite(rng, depth - 1) for _ in range(2)] if kind == "tuple" else [finite(rng, depth - 1)] * 2
    bounds = {"minItems": low, "maxItems": rng.randint(low, 2)}
    counts = range(low, bounds["maxItems"] + 1)
    texts = [f"[{', '.join(one)}]" for n in counts for one in _products([several for _, several in items[:n]])]
    schemas = [schema for schema, _ in items]
    rule = {"prefixItems": schemas, "items": False} if kind == "tuple" else {"items": schemas[0]}
    return {"type": "array", **rule, **bounds}, texts


def _object(rng: random.Random, depth: int) -> tuple[dict[str, Any], list[str]]:
    members = {name: finite(rng, depth - 1) for name in rng.sample(NAMES, rng.randint(0, 3))}
    required = [name for name in members if rng.random() < 0.4]
    low, high = rng.randint(0, len(members)), rng.randint(len(required), len(members))
    low = min(low, high)
    texts = [
        "{" + ", ".join(f'"{name}": {value}' for name, value in zip(order, values, strict=True)) + "}"
        for n in range(max(low, len(required)), high + 1)
        for order in permutations(members, n)
        if set(required) <= set(order)
        for values in _products([members[name][1] for name in order])
    ]
    properties = {name: schema for name, (schema, _) in members.items()}
    schema = {"type": "object", "properties": properties, "additionalProperties": False, "required": required}
    return {**schema, "minProperties": low, "maxProperties": high}, texts


def _products(several: list[list[str]]) -> Iterator[tuple[str, ...]]:
    """At most a few more than allowed: the whole schema is thrown away then."""
    for i, one in enumerate(product(*several)):
        if i > MOST:
            return
        yield one


def _spellings(value: Any) -> set[str]:
    """As `json.dumps` writes it, with and without ASCII only, as a whole number and as one with a fraction."""
    same = [value]
    if isinstance(value, int) and not isinstance(value, bool):
        same += [float(value)] if value else [0.0, -0.0]
    texts = {json.dumps(one, ensure_ascii=ascii) for one in same for ascii in (True, False)}
    return texts | {"-0"} if "0" in texts else texts


def tables_of(schema: Any, texts: list[bytes], rng: random.Random) -> TokenTables:
    """Over a vocabulary of the bytes of `texts`, of pieces of them, and of some that never fit."""
    singles = {bytes([byte]) for text in texts for byte in text} | {b"x", b"\xc3", b"\xa9"}
    pieces = set()
    for text in rng.sample(texts, min(len(texts), 30)):
        start = rng.randrange(len(text))
        pieces.add(text[start : start + rng.randint(2, 9)])
    tokens = [b"", b"", *sorted(singles | pieces), b'", "', b"}}", b'": ', b"]]"]
    return compile_tokens(json_schema(schema).machine, Vocabulary(tokens, [EOS]))


def check(seed: int) -> bool:
    """One schema; whether it was compiled."""
    rng = random.Random(seed)
    schema, written = finite(rng)
    texts = [text.encode() for text in written]
    if not texts:
        return False
    validator = jsonschema.Draft202012Validator(schema)
    assert all(validator.is_valid(json.loads(text)) for text in rng.sample(texts, min(len(texts), 20)))
    whole, begun = set(texts), {text[:end] for text in texts for end in range(1, len(text) + 1)}
    try:
        tables = tables_of(schema, texts, rng)
    except UnsupportedGrammar:
        return False
    machine, tokens = tables.machine, tables.vocabulary.tokens
    for _ in range(6):
        at, text = machine.begin, b""
        while True:
            found = mask(tables, at).tolist()
            expected = [bool(token) and text + token in begun for token in tokens]
            expected[EOS] = text in whole
            assert found == expected, (schema, text)
            ways = [token for token in np.flatnonzero(found).tolist() if token != EOS]
            if not ways:
                break
            token = rng.choice(ways)
            assert legal(tables, at, token)
            at, text = machine.run(tokens[token], at), text + tokens[token]
    return True


def test_finite_schemas() -> None:
    assert sum(check(seed) for seed in range(40)) >= 25


@pytest.mark.slow
def test_many_finite_schemas() -> None:
    assert sum(check(seed) for seed in range(10_000, 11_500)) >= 1000


_LONG = re.compile(rb"[0-9]{12}|[eE][+-]?[0-9]{2}")  # numbers that a validator does not know exactly


def completions(seed: int) -> bool:
    """Along one random text; whether the schema was compiled."""
    rng = random.Random(seed)
    schema = randomly.schema(rng)
    try:
        machine = json_schema(schema, formats=False).machine
    except UnsupportedGrammar:
        return False
    validator = jsonschema.Draft202012Validator(schema)
    at, text = machine.begin, b""
    for _ in range(25):
        end = completed(machine, at)
        assert end is not None, (seed, schema, text)
        if not _LONG.search(text):
            assert validator.is_valid(json.loads(text + end)), (seed, schema, text + end)
        ways = [byte for byte in range(256) if not machine.step(at, byte).dead]
        if not ways:
            break
        byte = rng.choice(ways)
        at, text = machine.step(at, byte), text + bytes([byte])
    return True


def test_from_every_place_a_text_can_be_completed() -> None:
    """Schemas without bounds: no list of texts, but each place leads on to a whole one, which is valid."""
    assert sum(completions(seed) for seed in range(20)) >= 8


@pytest.mark.slow
def test_from_many_places_a_text_can_be_completed() -> None:
    assert sum(completions(seed) for seed in range(5000, 5600)) >= 300
