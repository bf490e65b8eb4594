"""500 schemas as clients send them, made from families by a seed; and random valid instances of each."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NOUNS = [
    "account",
    "address",
    "amount",
    "author",
    "body",
    "category",
    "city",
    "code",
    "color",
    "comment",
    "country",
    "currency",
    "date",
    "description",
    "email",
    "end",
    "file",
    "id",
    "invoice",
    "item",
    "label",
    "language",
    "level",
    "limit",
    "location",
    "message",
    "name",
    "note",
    "number",
    "offset",
    "order",
    "owner",
    "path",
    "phone",
    "price",
    "priority",
    "quantity",
    "query",
    "reason",
    "region",
    "score",
    "sender",
    "size",
    "start",
    "state",
    "status",
    "street",
    "subject",
    "tag",
    "target",
    "text",
    "time",
    "title",
    "total",
    "type",
    "unit",
    "url",
    "user",
    "value",
    "version",
    "weight",
    "zip",
]
ENUMS = (
    ["celsius", "fahrenheit"],
    ["low", "medium", "high", "urgent"],
    ["open", "closed"],
    ["EUR", "USD", "GBP", "JPY"],
    ["asc", "desc"],
    [1, 2, 3, 5, 8],
    ["yes", "no", None],
    ["debug", "info", "warning", "error"],
)
PATTERNS = {r"^[A-Z]{2}-[0-9]{4}$": "AB-1234", r"^#[0-9a-f]{6}$": "#00ff7f", r"^[a-z][a-z0-9_]{0,15}$": "some_name"}
FORMATS = {
    "date": "2024-02-29",
    "date-time": "2024-05-01T12:30:00Z",
    "time": "12:30:00Z",
    "email": "ann@example.org",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "uri": "https://example.org/a?b=c",
    "ipv4": "192.0.2.1",
}


def scalar(rng: random.Random) -> Schema:
    """A leaf, as in real schemas: mostly plain, sometimes bounded."""
    low = rng.randrange(10)
    return rng.choice(
        [
            {"type": "string"},
            {"type": "string", "description": f"The {rng.choice(NOUNS)} to use."},
            {"type": "string", "minLength": 1, "maxLength": rng.choice([8, 40, 64])},
            {"type": "string", "format": rng.choice(list(FORMATS))},
            {"type": "string", "pattern": rng.choice(list(PATTERNS))},
            {"type": "integer"},
            {"type": "integer", "minimum": low, "maximum": low + rng.choice([5, 90, 1000])},
            {"type": "number"},
            {"type": "number", "minimum": 0},
            {"type": "boolean"},
            {"enum": rng.choice(ENUMS)},
            {"const": rng.choice(NOUNS)},
            {"type": ["string", "null"]},
            {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        ]
    )


def record(rng: random.Random, fields: dict[str, Schema], *, optional: float = 0.4) -> Schema:
    required = [name for name in fields if rng.random() >= optional]
    closed = {"additionalProperties": False} if rng.random() < 0.8 else {}
    return {"type": "object", "properties": fields, "required": required, **closed}


def leaves(rng: random.Random, low: int, high: int) -> dict[str, Schema]:
    return {name: scalar(rng) for name in rng.sample(NOUNS, rng.randint(low, high))}


def parameters(rng: random.Random) -> Schema:
    return record(rng, leaves(rng, 1, 6))


def extraction(rng: random.Random) -> Schema:
    """An invoice, a résumé, a ticket: some fields and a list of records."""
    items = {"type": "array", "items": record(rng, leaves(rng, 2, 5), optional=0.2)}
    if rng.random() < 0.4:
        items |= {"minItems": 1, "maxItems": rng.choice([3, 10])}
    person = record(rng, leaves(rng, 2, 3))
    return record(rng, {**leaves(rng, 3, 7), "lines": items, "contact": person}, optional=0.2)


def geometry(rng: random.Random) -> Schema:
    position = {"type": "array", "prefixItems": [{"type": "number"}] * 2, "items": False, "minItems": 2}
    kinds = {"Point": position, "LineString": {"type": "array", "items": position, "minItems": 2}}
    shapes = [record(rng, {"type": {"const": kind}, "coordinates": shape}, optional=0) for kind, shape in kinds.items()]
    feature = {
        "type": {"const": "Feature"},
        "geometry": {"oneOf": shapes},
        "properties": record(rng, leaves(rng, 1, 3)),
    }
    return record(rng, feature, optional=0)


def configuration(rng: random.Random) -> Schema:
    """Nested sections, and a map from names to values."""
    sections = {name: record(rng, leaves(rng, 1, 4), optional=0.7) for name in ("server", "storage", "logging")}
    environment = {"type": "object", "additionalProperties": rng.choice([{"type": "string"}, {"type": "integer"}])}
    return record(rng, {**sections, "environment": environment}, optional=0.3)


def classification(rng: random.Random) -> Schema:
    labels = [f"{a}_{b}" for a, b in zip(rng.sample(NOUNS, 12), rng.sample(NOUNS, 12), strict=True)]
    several = {"type": "array", "items": {"enum": labels}, "maxItems": rng.randint(1, 4)}
    return record(rng, {"label": {"enum": labels}, "others": several, "confidence": {"type": "number"}}, optional=0.2)


def tree(rng: random.Random) -> Schema:
    node = record(rng, {**leaves(rng, 1, 2), "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}})
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def shared_definitions(rng: random.Random) -> Schema:
    address = record(rng, leaves(rng, 3, 5), optional=0.3)
    fields = {"billing": {"$ref": "#/$defs/address"}, "shipping": {"$ref": "#/$defs/address"}, **leaves(rng, 1, 3)}
    return {"$defs": {"address": address}, **record(rng, fields, optional=0.3)}


def union(rng: random.Random) -> Schema:
    """Several kinds of event, told apart by a constant."""
    kinds = rng.sample(NOUNS, rng.randint(2, 4))
    variants = []
    for kind in kinds:
        fields = {"kind": {"const": kind}, **{f"{name}_of": one for name, one in leaves(rng, 1, 3).items()}}
        variants.append({**record(rng, fields, optional=0), "additionalProperties": False})
    return {rng.choice(["oneOf", "anyOf"]): variants}


FAMILIES: tuple[Callable[[random.Random], Schema], ...] = (
    *(parameters, parameters, parameters, extraction, extraction),
    *(geometry, configuration, classification, tree, shared_definitions, union),
)


def schemas(count: int = 500, seed: int = 0) -> list[Schema]:
    """The same `count` schemas for the same seed, a family after the other."""
    rng = random.Random(seed)
    return [FAMILIES[i % len(FAMILIES)](rng) for i in range(count)]


def instance(schema: Schema, rng: random.Random, root: Schema | None = None, depth: int = 0) -> Any:
    """A random value that `schema`, one of this corpus, allows."""
    root = schema if root is None else root
    if "$ref" in schema:
        return instance(root["$defs"][schema["$ref"].rpartition("/")[2]], rng, root, depth + 1)
    for choice in ("oneOf", "anyOf"):
        if choice in schema:
            return instance(rng.choice(schema[choice]), rng, root, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema["type"] if isinstance(schema["type"], str) else rng.choice(schema["type"])
    return _MAKERS[kind](schema, rng, root, depth)


def _string(schema: Schema, rng: random.Random, root: Schema, depth: int) -> str:
    if "format" in schema:
        return FORMATS[schema["format"]]
    if "pattern" in schema:
        return PATTERNS[schema["pattern"]]
    length = rng.randint(schema.get("minLength", 0), schema.get("maxLength", 12))
    return "".join(rng.choices(string.ascii_letters + " .,'\"\\\n<é我🎉", k=length))


def _integer(schema: Schema, rng: random.Random, root: Schema, depth: int) -> int:
    return rng.randint(schema.get("minimum", -1000), schema.get("maximum", 100_000))


def _number(schema: Schema, rng: random.Random, root: Schema, depth: int) -> float:
    return rng.choice([round(rng.uniform(schema.get("minimum", -50), 1000), 2), rng.randint(0, 9)])


def _array(schema: Schema, rng: random.Random, root: Schema, depth: int) -> list[Any]:
    first = [instance(one, rng, root, depth) for one in schema.get("prefixItems", [])]
    if schema["items"] is False:
        return first
    low = schema.get("minItems", 0)
    count = low if depth > 3 else rng.randint(low, min(low + 3, schema.get("maxItems", low + 3)))
    return [instance(schema["items"], rng, root, depth) for _ in range(count)]


def _object(schema: Schema, rng: random.Random, root: Schema, depth: int) -> dict[str, Any]:
    fields = schema.get("properties", {})
    chosen = [name for name in fields if name in schema["required"] or rng.random() < 0.5]
    value = {name: instance(fields[name], rng, root, depth) for name in chosen}
    if isinstance(others := schema.get("additionalProperties"), dict):
        value |= {name: instance(others, rng, root, depth) for name in rng.sample(NOUNS, rng.randrange(4))}
    return value


_MAKERS: dict[str, Callable[[Schema, random.Random, Schema, int], Any]] = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda schema, rng, root, depth: rng.random() < 0.5,
    "null": lambda schema, rng, root, depth: None,
    "array": _array,
    "object": _object,
}


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with one place changed: mostly what its schema refuses, so check before use."""
    if isinstance(value, dict) and value and rng.random() < 0.7:
        name = rng.choice(list(value))
        if rng.random() < 0.3:
            return {key: one for key, one in value.items() if key != name}
        return {**value, name: mutated(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        i = rng.randrange(len(value))
        return [*value[:i], mutated(value[i], rng), *value[i + 1 :]]
    return rng.choice([None, -1, 1.5, "", "something else", [], {}, {"unknown": 1}, True])
