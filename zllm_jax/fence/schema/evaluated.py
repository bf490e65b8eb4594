"""`unevaluatedProperties` and `unevaluatedItems`: what other keywords have looked at depends on which branches hold.

So the schema is taken apart into cases, each with a condition and the members that were evaluated if it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import regular
from zllm_jax.fence.schema.document import Location
from zllm_jax.fence.schema.values import ArrayShape, Expr, ObjectShape, Values

if TYPE_CHECKING:
    from zllm_jax.fence.schema.reader import Reader

_MAX_CASES = 64


@dataclass(frozen=True)
class Evaluated:
    """What was looked at: members by name and by pattern, or all; the first `items` items, or all (-1)."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    members: bool = False
    items: int = 0
    contains: bool = False

    def __or__(self, other: Evaluated) -> Evaluated:
        return Evaluated(
            self.names | other.names,
            self.patterns | other.patterns,
            self.members or other.members,
            -1 if -1 in (self.items, other.items) else max(self.items, other.items),
            self.contains or other.contains,
        )


Case = tuple[Expr, Evaluated]


def with_unevaluated(reader: Reader, here: Location) -> Values:
    """The rule that the two keywords make at this place."""
    schema = reader.document.schema(here)
    assert isinstance(schema, Mapping)
    whole = Values()
    own = {key: value for key, value in schema.items() if not key.startswith("unevaluated")}
    for condition, seen in _cases(reader, here, own, ()):
        rule = reader.values(condition)
        if "unevaluatedProperties" in schema:
            rule = reader.sets.intersection(rule, _members(reader, here, seen))
        if "unevaluatedItems" in schema:
            rule = reader.sets.intersection(rule, _items(reader, here, seen))
        whole = reader.sets.union(whole, rule)
    return whole


def _members(reader: Reader, here: Location, seen: Evaluated) -> Values:
    sets = reader.sets
    if seen.members:
        return sets.any_value
    rest = sets.any_text
    classes = []
    for pattern in sorted(seen.patterns):
        matched = sets.common(rest, sets.language(regular.regex(pattern)))
        classes.append((matched, sets.everything))
        rest = sets.without(rest, matched)
    classes.append((rest, reader.child(here, "unevaluatedProperties")))
    named = tuple((name, sets.everything) for name in sorted(seen.names))
    return replace(sets.any_value, objects=(ObjectShape(named, tuple(one for one in classes if not one[0].empty)),))


def _items(reader: Reader, here: Location, seen: Evaluated) -> Values:
    sets = reader.sets
    if seen.items == -1:
        return sets.any_value
    if seen.contains:
        raise UnsupportedGrammar("which items `contains` has evaluated depends on each of them")
    shape = ArrayShape((sets.everything,) * seen.items, reader.child(here, "unevaluatedItems"))
    return replace(sets.any_value, arrays=sets.intersection(Values(arrays=(shape,)), sets.any_value).arrays)


def _cases(reader: Reader, here: Location, schema: Any, path: tuple[Location, ...]) -> list[Case]:
    """What a schema evaluates, case by case; the conditions exclude each other only as far as needed."""
    if here in path:
        raise UnsupportedGrammar("a schema that refers to itself in place", where=here.path)
    sets, path = reader.sets, (*path, here)
    if not isinstance(schema, Mapping):
        return [(sets.everything, Evaluated())]

    def below(*steps: str | int) -> list[Case]:
        return _below(reader, reader.document.child(here, *steps), path)

    cases: list[Case] = [(sets.everything, _own(schema, reader.document.draft))]
    for keyword in ("$ref", "$dynamicRef"):
        if keyword in schema:
            cases = _crossed(reader, cases, _below(reader, reader.document.reference(here, keyword), path))
    for i in range(len(schema.get("allOf", ()))):
        cases = _crossed(reader, cases, below("allOf", i))
    if "oneOf" in schema:
        cases = _crossed(reader, cases, _of_one(reader, [below("oneOf", i) for i in range(len(schema["oneOf"]))], here))
    if "anyOf" in schema:
        cases = _crossed(reader, cases, _of_any(reader, [below("anyOf", i) for i in range(len(schema["anyOf"]))], here))
    if "if" in schema:
        cases = _crossed(reader, cases, _conditional(reader, here, schema, path))
    for name in schema.get("dependentSchemas", {}):
        absent = sets.other_than(reader.has_member(name))
        present = _crossed(reader, [(reader.has_member(name), Evaluated())], below("dependentSchemas", name))
        cases = _crossed(reader, cases, [(absent, Evaluated()), *present])
    return _merged(sets, cases)


def _own(schema: Mapping[str, Any], draft: int) -> Evaluated:
    prefix = schema.get("prefixItems", ())
    every_item = "items" in schema or "unevaluatedItems" in schema
    return Evaluated(
        frozenset(schema.get("properties", {})),
        frozenset(schema.get("patternProperties", {})),
        "additionalProperties" in schema or "unevaluatedProperties" in schema,
        -1 if every_item else len(prefix),
        "contains" in schema,
    )


def _below(reader: Reader, there: Location, path: tuple[Location, ...]) -> list[Case]:
    """The cases of a subschema, each with the subschema itself as a condition."""
    found = _cases(reader, there, reader.document.schema(there), path)
    return [(reader.sets.both(reader.sets.at(there), condition), seen) for condition, seen in found]


def _crossed(reader: Reader, one: Iterable[Case], other: Iterable[Case]) -> list[Case]:
    other = list(other)
    crossed = [(reader.sets.both(a, b), seen | too) for a, seen in one for b, too in other]
    if len(crossed) > _MAX_CASES:
        raise UnsupportedGrammar(f"more than {_MAX_CASES} cases of what is evaluated")
    return crossed


def _merged(sets: Any, cases: list[Case]) -> list[Case]:
    by_seen: dict[Evaluated, list[Expr]] = {}
    for condition, seen in cases:
        by_seen.setdefault(seen, []).append(condition)
    return [(sets.either(*conditions), seen) for seen, conditions in by_seen.items()]


def _of_one(reader: Reader, branches: list[list[Case]], here: Location) -> list[Case]:
    alone = reader.exclusive([reader.child(here, "oneOf", i) for i in range(len(branches))])
    found: list[Case] = []
    for one, cases in zip(alone, branches, strict=True):
        found += _crossed(reader, [(one, Evaluated())], cases)
    return found


def _of_any(reader: Reader, branches: list[list[Case]], here: Location) -> list[Case]:
    """Each choice of branches that hold, the others not."""
    sets = reader.sets
    wholes = [reader.child(here, "anyOf", i) for i in range(len(branches))]
    telling = [i for i, cases in enumerate(branches) if any(seen != Evaluated() for _, seen in cases)]
    if len(telling) > 4:
        raise UnsupportedGrammar("anyOf with more than four branches that evaluate members", where=f"{here.path}/anyOf")
    found: list[Case] = []
    for size in range(len(telling) + 1):
        for chosen in combinations(telling, size):
            against = [sets.other_than(wholes[i]) for i in telling if i not in chosen]
            cases: list[Case] = [(sets.both(sets.either(*wholes), *against), Evaluated())]
            for i in chosen:
                cases = _crossed(reader, cases, branches[i])
            found += cases
    return found


def _conditional(reader: Reader, here: Location, schema: Mapping[str, Any], path: tuple[Location, ...]) -> list[Case]:
    sets, condition = reader.sets, reader.child(here, "if")
    holds = _below(reader, reader.document.child(here, "if"), path)
    fails: list[Case] = [(sets.other_than(condition), Evaluated())]
    if "then" in schema:
        holds = _crossed(reader, holds, _below(reader, reader.document.child(here, "then"), path))
    if "else" in schema:
        fails = _crossed(reader, fails, _below(reader, reader.document.child(here, "else"), path))
    return [*holds, *fails]
