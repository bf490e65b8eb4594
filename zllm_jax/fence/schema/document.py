"""A schema document: its identifiers, anchors and references, resolved without any network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from zllm_jax.errors import UnsupportedGrammar

Schema = bool | Mapping[str, Any]

_SINGLE = (
    "additionalProperties",
    "additionalItems",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")


@dataclass(frozen=True)
class Location:
    """A subschema: its path in the document, as a JSON pointer, and the URI that its references are relative to."""

    path: str
    base: str


class Document:
    """The subschemas of one document by location; references lead from one to another.

    `draft` is 7 where `$schema` says draft-07 or older, else 2020.
    """

    def __init__(self, schema: Schema) -> None:
        self._schemas: dict[Location, Schema] = {}
        self._by_uri: dict[str, Location] = {}
        self._dynamic: dict[str, list[Location]] = {}
        declared = str(schema.get("$schema", "")) if isinstance(schema, Mapping) else ""
        self.draft = 7 if any(f"draft-0{old}" in declared for old in (3, 4, 6, 7)) else 2020
        self._dialect = declared
        if declared and not declared.startswith(("http://json-schema.org/", "https://json-schema.org/")):
            raise UnsupportedGrammar(f"the meta-schema {declared!r} is not known", where="#/$schema")
        self.root = self._add(schema, "#", "")

    def schema(self, where: Location) -> Schema:
        return self._schemas[where]

    def child(self, where: Location, *steps: str | int) -> Location:
        """The subschema below a keyword. Raises `UnsupportedGrammar` where there is none."""
        schema: Any = self._schemas[where]
        path = where.path
        for step in steps:
            schema, path = schema[step], f"{path}/{_escaped(str(step))}"
        return self._add(schema, path, where.base)

    def reference(self, where: Location, keyword: str) -> Location:
        """What `$ref` or `$dynamicRef` names."""
        schema = self._schemas[where]
        assert isinstance(schema, Mapping)
        given = schema[keyword]
        place = f"{where.path}/{keyword}"
        if not isinstance(given, str):
            raise UnsupportedGrammar(f"{keyword} must be a text, got {given!r}", where=place)
        target = self._resolve(_joined(where.base, given), place)
        if keyword == "$dynamicRef":
            anchor = urldefrag(given).fragment
            bound = self._dynamic.get(anchor, [])
            if target in bound and len(bound) > 1:
                raise UnsupportedGrammar(
                    f"the dynamic anchor {anchor!r} stands in {len(bound)} places: which one is meant depends on the "
                    "path of evaluation",
                    where=place,
                )
        return target

    def _resolve(self, uri: str, place: str) -> Location:
        if uri in self._by_uri:
            return self._by_uri[uri]
        resource, fragment = urldefrag(uri)
        start = self._by_uri.get(resource)
        if start is None:
            raise UnsupportedGrammar(f"{uri} is not in this document: put it under $defs", where=place)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            raise UnsupportedGrammar(f"there is no anchor {fragment!r}", where=place)
        return self._follow(start, fragment, place)

    def _follow(self, start: Location, pointer: str, place: str) -> Location:
        here, schema, path, base = start, self._schemas[start], start.path, start.base
        for raw in pointer.split("/")[1:]:
            step: str | int = raw.replace("~1", "/").replace("~0", "~")
            try:
                schema = schema[int(step)] if isinstance(schema, list) else schema[step]  # type: ignore[index]
            except (KeyError, IndexError, ValueError, TypeError):
                raise UnsupportedGrammar(f"nothing stands at {pointer}", where=place) from None
            path = f"{path}/{raw}"
            if isinstance(schema, Mapping) and "$id" in schema:
                base = urljoin(base, str(schema["$id"]))
        here = Location(path, base)
        if here not in self._schemas:
            here = self._add(schema, path, start.base)
        return here

    def _add(self, schema: Any, path: str, base: str) -> Location:
        """Register a subschema and all below it."""
        if not isinstance(schema, bool | Mapping):
            raise UnsupportedGrammar(f"a schema must be an object or a boolean, got {schema!r}", where=path)
        base = self._identified(schema, base)
        here = Location(path, base)
        if here in self._schemas:
            return here
        self._schemas[here] = schema
        if path == "#":
            self._by_uri.setdefault(base, here)
            self._by_uri.setdefault("", here)
        if isinstance(schema, Mapping):
            self._name(schema, here)
            for steps, below in _below(schema, self.draft):
                self._add(below, path + "".join(f"/{_escaped(step)}" for step in steps), base)
        return here

    def _identified(self, schema: Schema, base: str) -> str:
        if not isinstance(schema, Mapping) or (self.draft == 7 and "$ref" in schema):
            return base
        own = schema.get("$id")
        if not isinstance(own, str) or own.startswith("#"):
            return base
        return urldefrag(urljoin(base, own)).url

    def _name(self, schema: Mapping[str, Any], here: Location) -> None:
        own = schema.get("$id")
        if isinstance(own, str) and not (self.draft == 7 and "$ref" in schema):
            if own.startswith("#"):
                self._by_uri.setdefault(here.base + own, here)
            else:
                self._by_uri.setdefault(here.base, here)
        if isinstance(schema.get("$anchor"), str):
            self._by_uri.setdefault(f"{here.base}#{schema['$anchor']}", here)
        if isinstance(schema.get("$dynamicAnchor"), str):
            self._by_uri.setdefault(f"{here.base}#{schema['$dynamicAnchor']}", here)
            self._dynamic.setdefault(schema["$dynamicAnchor"], []).append(here)


def _below(schema: Mapping[str, Any], draft: int) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """The subschemas directly below a schema, with the steps that lead there."""
    if draft == 7 and "$ref" in schema:
        return
    for keyword in _SINGLE:
        if isinstance(schema.get(keyword), bool | Mapping):
            yield (keyword,), schema[keyword]
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            for i, one in enumerate(schema[keyword]):
                yield (keyword, str(i)), one
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), Mapping):
            for name, one in schema[keyword].items():
                if isinstance(one, bool | Mapping):
                    yield (keyword, name), one


def _joined(base: str, reference: str) -> str:
    """`urljoin`, which does not know that a fragment may follow a URN."""
    return base + reference if reference.startswith("#") else urljoin(base, reference)


def _escaped(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")
