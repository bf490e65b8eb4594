"""The forms of keywords: what a schema must look like before it can mean anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.schema.document import Location

_OBJECTS = ("dependencies", "dependentRequired", "dependentSchemas", "patternProperties", "properties")
_LISTS = ("allOf", "anyOf", "enum", "oneOf", "prefixItems")
_TEXTS = ("$dynamicRef", "$ref", "format", "pattern")
_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")


def check_forms(schema: Mapping[str, Any], here: Location) -> None:
    """Raises `UnsupportedGrammar` with the path of a keyword whose value is of the wrong kind."""
    for keywords, kind, what in (
        (_OBJECTS, Mapping, "an object"),
        (_LISTS, list, "a list"),
        (_TEXTS, str, "a text"),
        (_NUMBERS, int | float, "a number"),
    ):
        for keyword in keywords:
            value = schema.get(keyword)
            if keyword in schema and (not isinstance(value, kind) or isinstance(value, bool)):
                _refuse(f"{keyword} must be {what}, got {value!r}", here, keyword)
            if isinstance(value, float) and not math.isfinite(value):
                _refuse(f"{keyword} is {value!r}, which is not a finite number", here, keyword)
    for keyword in ("allOf", "anyOf", "oneOf"):
        if keyword in schema and not schema[keyword]:
            _refuse(f"{keyword} is empty: at least one schema is needed", here, keyword)
    required = schema.get("required", False)
    names = [] if isinstance(required, bool) else [("required", required)]  # a boolean is draft 3's
    names += [(f"dependentRequired/{name}", several) for name, several in schema.get("dependentRequired", {}).items()]
    for keyword, several in names:
        if not isinstance(several, list) or not all(isinstance(one, str) for one in several):
            _refuse(f"the names of required members must be a list of texts, got {several!r}", here, keyword)
    kinds = schema.get("type", "null")
    if not isinstance(kinds, str) and not (isinstance(kinds, list) and all(isinstance(one, str) for one in kinds)):
        _refuse(f"type must be a name or a list of names, got {kinds!r}", here, "type")
    if "multipleOf" in schema and not schema["multipleOf"] > 0:
        _refuse(f"multipleOf must be above 0, got {schema['multipleOf']!r}", here, "multipleOf")


def _refuse(reason: str, here: Location, keyword: str) -> None:
    raise UnsupportedGrammar(reason, where=f"{here.path}/{keyword}")
