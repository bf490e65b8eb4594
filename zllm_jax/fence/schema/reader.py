"""What the keywords of a schema mean: each is a set of values, and a schema is what all of its keywords allow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import regular
from zllm_jax.fence.schema.document import Document, Location
from zllm_jax.fence.schema.evaluated import with_unevaluated
from zllm_jax.fence.schema.forms import check_forms
from zllm_jax.fence.schema.needs import Circular, Needs, Unfounded
from zllm_jax.fence.schema.values import ArrayShape, Contains, Expr, Language, ObjectShape, Sets, Values

ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$schema",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)


@dataclass(frozen=True)
class Options:
    """formats: `format` is a rule, not a remark. relax: leave out what cannot be enforced, and say so."""

    formats: bool = True
    relax: bool = False


@dataclass(eq=False)
class Reader:
    """Evaluates expressions over one document. `relaxed` collects what was left out, as "path: reason"."""

    document: Document
    options: Options = field(default_factory=Options)
    sets: Sets = field(default_factory=Sets)
    relaxed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    _values: dict[Expr, Values | None] = field(default_factory=dict)
    _places: dict[ArrayShape | ObjectShape, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.needs = Needs(self.values, self.sets)

    @property
    def root(self) -> Expr:
        return self.sets.at(self.document.root)

    def values(self, expr: Expr) -> Values:
        """The normal form. Raises `UnsupportedGrammar`; `Circular` while it is itself being found."""
        if expr in self._values:
            known = self._values[expr]
            if known is None:
                raise Circular
            return known
        self._values[expr] = None
        try:
            self._values[expr] = found = self._evaluate(expr)
        finally:
            if self._values[expr] is None:
                del self._values[expr]
        return found

    def _evaluate(self, expr: Expr) -> Values:
        sets = self.sets
        match expr.kind:
            case "true":
                return sets.any_value
            case "false":
                return Values()
            case "at":
                return self._schema(expr.parts[0])
            case "const":
                return self._constant(json.loads(expr.parts[0]))
            case "shape":
                return Values(objects=(expr.parts[0],))
            case "not":
                return sets.complement(self.values(expr.parts[0]))
        combine = sets.intersection if expr.kind == "and" else sets.union
        whole = self.values(expr.parts[0])
        for part in expr.parts[1:]:
            whole = combine(whole, self.values(part))
        return whole

    def _schema(self, here: Location) -> Values:
        schema = self.document.schema(here)
        if isinstance(schema, bool):
            return self.sets.any_value if schema else Values()
        check_forms(schema, here)
        whole = self.sets.any_value
        for keyword, meaning in _meanings(schema, self.document.draft):
            try:
                rule = meaning(self, schema, here)
            except Unfounded:
                raise
            except UnsupportedGrammar as error:
                at = error.where or f"{here.path}/{keyword}"
                if not self.options.relax:
                    raise UnsupportedGrammar(error.reason, where=at) from None
                self.relaxed.append(f"{at}: {error.reason}")
                continue
            except Circular:
                raise Unfounded("refers to itself with nothing between", where=f"{here.path}/{keyword}") from None
            whole = self.sets.intersection(whole, rule)
        shapes: tuple[ArrayShape | ObjectShape, ...] = (*whole.arrays, *whole.objects)
        for shape in shapes:
            self._places.setdefault(shape, here.path)
        self.unknown += [f"{here.path}/{one}" for one in schema if one not in KEYWORDS and one not in ANNOTATIONS]
        return whole

    def _constant(self, value: Any) -> Values:
        sets = self.sets
        if value is None or isinstance(value, bool):
            return Values(null=value is None, true=value is True, false=value is False)
        if isinstance(value, int | float):
            return Values(number=sets.language(regular.json_number(minimum=value, maximum=value, exponents=False)))
        if isinstance(value, str):
            return Values(string=_language(self, sets.texts([value]).automaton))
        if isinstance(value, list):
            items = tuple(self.constant(one) for one in value)
            return Values(arrays=(ArrayShape(items, sets.nothing, len(items), len(items)),))
        members = tuple((name, self.constant(value[name])) for name in sorted(value))
        return Values(objects=(ObjectShape(members, (), frozenset(value), high=len(value)),))

    def place(self, shape: ArrayShape | ObjectShape) -> str:
        """The path of a schema that says that an array or object must be so; of the whole where none does alone."""
        return self._places.get(shape, self.document.root.path)

    def constant(self, value: Any) -> Expr:
        return self.sets.const(json.dumps(value, sort_keys=True))

    def child(self, here: Location, *steps: str | int) -> Expr:
        return self.sets.at(self.document.child(here, *steps))

    def exclusive(self, branches: Sequence[Expr]) -> list[Expr]:
        """Each branch without the others. One that cannot meet another needs no rule against it."""
        sets, found = self.sets, []
        for i, one in enumerate(branches):
            others = [other for j, other in enumerate(branches) if j != i and self.inhabited(sets.both(one, other))]
            found.append(sets.both(one, *map(sets.other_than, others)))
        return found

    def has_member(self, name: str) -> Expr:
        """Objects with a member of this name."""
        return self.sets.shaped(replace(self.sets.any_object, required=frozenset([name])))

    def inhabited(self, expr: Expr) -> bool:
        """Whether there is such a value; True where that cannot be told yet."""
        return self.needs.of(expr) is not None


def _only(reader: Reader, **rule: Any) -> Values:
    """A rule for one type; values of other types are free."""
    return replace(reader.sets.any_value, **rule)


def _type(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    names = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
    sets, whole = reader.sets, Values()
    any_value = sets.any_value
    known = {
        "null": Values(null=True),
        "boolean": Values(true=True, false=True),
        "number": Values(number=any_value.number),
        "integer": Values(number=sets.integer),
        "string": Values(string=any_value.string),
        "array": Values(arrays=any_value.arrays),
        "object": Values(objects=any_value.objects),
    }
    for name in names:
        if name not in known:
            raise UnsupportedGrammar(f"{name!r} is no type: {', '.join(known)} are")
        whole = sets.union(whole, known[name])
    return whole


def _enum(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    whole, texts = Values(), list[str]()
    for value in schema["enum"]:
        if isinstance(value, str):
            texts.append(value)
        else:
            whole = reader.sets.union(whole, reader.values(reader.constant(value)))
    if texts:
        whole = reader.sets.union(whole, Values(string=_language(reader, reader.sets.texts(texts).automaton)))
    return whole


def _const(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    return reader.values(reader.constant(schema["const"]))


def _bounds(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    limits = {
        "minimum": schema.get("minimum"),
        "maximum": schema.get("maximum"),
        "exclusive_minimum": schema.get("exclusiveMinimum"),
        "exclusive_maximum": schema.get("exclusiveMaximum"),
    }
    number = regular.json_number(
        exponents=False, **{name: _number(one) for name, one in limits.items() if one is not None}
    )
    return _only(reader, number=_language(reader, number))


def _multiple_of(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    number = regular.json_number(exponents=False, multiple_of=_number(schema["multipleOf"]))
    return _only(reader, number=_language(reader, number))


def _length(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    language = reader.sets.length(_count(schema, "minLength") or 0, _count(schema, "maxLength"))
    return _only(reader, string=None if language.empty else language)


def _pattern(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    return _only(reader, string=_language(reader, regular.regex(schema["pattern"])))


def _format(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    if not reader.options.formats:
        return reader.sets.any_value
    if schema["format"] == "idn-hostname":
        raise UnsupportedGrammar(
            "which letters a label of an internationalised name may hold depends on their neighbours"
        )
    text = regular.format_text(schema["format"])
    if text is None:
        return reader.sets.any_value
    return _only(reader, string=reader.sets.language(text, regular.loose_format_text(schema["format"])))


def _items(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    sets, items = reader.sets, schema.get("items")
    if isinstance(items, list):  # draft 7
        first, rest = "items", "additionalItems"
    elif reader.document.draft == 7:
        first, rest = "", "items"
    else:
        first, rest = "prefixItems", "items"
    prefix = tuple(reader.child(here, first, i) for i in range(len(schema.get(first, ()))))
    other = reader.child(here, rest) if rest in schema else sets.everything
    return _only(reader, arrays=_arrays(reader, ArrayShape(prefix, other)))


def _num_items(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    shape = replace(reader.sets.any_array, low=_count(schema, "minItems") or 0, high=_count(schema, "maxItems"))
    return _only(reader, arrays=_arrays(reader, shape))


def _contains(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    if "contains" not in schema:
        return reader.sets.any_value
    low, high = _count(schema, "minContains"), _count(schema, "maxContains")
    if reader.document.draft == 7:
        low, high = None, None
    rule = Contains(reader.child(here, "contains"), 1 if low is None else low, high)
    if rule.low == 0 and rule.high is None:
        return reader.sets.any_value
    return _only(reader, arrays=(replace(reader.sets.any_array, contains=(rule,)),))


def _unique(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    if not schema["uniqueItems"] or schema.get("maxItems", 2) < 2:
        return reader.sets.any_value
    raise UnsupportedGrammar("that all items differ cannot be seen by a finite machine")


def _members(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    sets = reader.sets
    named = {name: reader.child(here, "properties", name) for name in schema.get("properties", {})}
    classes: list[tuple[Language, Expr]] = [(sets.any_text, sets.everything)]
    matched = None
    for pattern in schema.get("patternProperties", {}):
        names, expr = sets.language(regular.regex(pattern)), reader.child(here, "patternProperties", pattern)
        named = {
            name: sets.both(old, expr) if names.automaton.accepts(_utf8(name)) else old for name, old in named.items()
        }
        classes = list(_split(sets, classes, names, expr))
        matched = names if matched is None else sets.joined(matched, names)
    if "additionalProperties" in schema:
        others = reader.child(here, "additionalProperties")
        rest = sets.any_text if matched is None else sets.without(sets.any_text, matched)
        classes = list(_split(sets, classes, rest, others))
    shape = ObjectShape(tuple(sorted(named.items())), _kept(sets, classes))
    return _only(reader, objects=(shape,))


def _split(
    sets: Sets, classes: list[tuple[Language, Expr]], names: Language, expr: Expr
) -> Iterator[tuple[Language, Expr]]:
    """Names of the language must also be in `expr`."""
    for other, old in classes:
        inside, outside = sets.common(other, names), sets.without(other, names)
        if not inside.empty:
            yield inside, sets.both(old, expr)
        if not outside.empty:
            yield outside, old


def _kept(sets: Sets, classes: list[tuple[Language, Expr]]) -> tuple[tuple[Language, Expr], ...]:
    return tuple((names, expr) for names, expr in classes if expr is not sets.nothing)


def _property_names(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    sets = reader.sets
    names = reader.values(reader.child(here, "propertyNames")).string
    classes = ((names, sets.everything),) if names is not None else ()
    return _only(reader, objects=(ObjectShape((), classes),))


def _num_members(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    low, high = _count(schema, "minProperties") or 0, _count(schema, "maxProperties")
    return _only(reader, objects=(replace(reader.sets.any_object, low=low, high=high),))


def _required(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    if isinstance(schema["required"], bool):
        return reader.sets.any_value  # draft 3's
    return _only(reader, objects=(replace(reader.sets.any_object, required=frozenset(schema["required"])),))


def _depends(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    sets, whole = reader.sets, reader.sets.any_value
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, wanted in schema.get(keyword, {}).items():
            absent = _only(reader, objects=(replace(sets.any_object, named=((name, sets.nothing),)),))
            needed = frozenset([name, *wanted]) if isinstance(wanted, list) else frozenset([name])
            present = _only(reader, objects=(replace(sets.any_object, required=needed),))
            if not isinstance(wanted, list):
                present = sets.intersection(present, reader.values(reader.child(here, keyword, name)))
            whole = sets.intersection(whole, sets.union(absent, present))
    return whole


def _all_of(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    return reader.values(reader.sets.both(*_branches(reader, schema, here, "allOf")))


def _any_of(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    return reader.values(reader.sets.either(*_branches(reader, schema, here, "anyOf")))


def _one_of(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    return reader.values(reader.sets.either(*reader.exclusive(_branches(reader, schema, here, "oneOf"))))


def _branches(reader: Reader, schema: Mapping[str, Any], here: Location, keyword: str) -> list[Expr]:
    return [reader.child(here, keyword, i) for i in range(len(schema[keyword]))]


def _not(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    return reader.values(reader.sets.other_than(reader.child(here, "not")))


def _if(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    sets, condition = reader.sets, reader.child(here, "if")
    then = reader.child(here, "then") if "then" in schema else sets.everything
    other = reader.child(here, "else") if "else" in schema else sets.everything
    return reader.values(sets.either(sets.both(condition, then), sets.both(sets.other_than(condition), other)))


def _reference(keyword: str) -> Callable[[Reader, Mapping[str, Any], Location], Values]:
    def read(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
        return reader.values(reader.sets.at(reader.document.reference(here, keyword)))

    return read


def _unevaluated(reader: Reader, schema: Mapping[str, Any], here: Location) -> Values:
    return with_unevaluated(reader, here)


Meaning = Callable[[Reader, Mapping[str, Any], Location], Values]

# Keywords that are read together stand in one line; the first of them that is there names the place of an error.
_GROUPS: tuple[tuple[Meaning, str], ...] = (
    (_reference("$ref"), "$ref"),
    (_reference("$dynamicRef"), "$dynamicRef"),
    (_type, "type"),
    (_const, "const"),
    (_enum, "enum"),
    (_bounds, "minimum maximum exclusiveMinimum exclusiveMaximum"),
    (_multiple_of, "multipleOf"),
    (_length, "minLength maxLength"),
    (_pattern, "pattern"),
    (_format, "format"),
    (_items, "items prefixItems additionalItems"),
    (_num_items, "minItems maxItems"),
    (_contains, "contains minContains maxContains"),
    (_unique, "uniqueItems"),
    (_members, "properties patternProperties additionalProperties"),
    (_property_names, "propertyNames"),
    (_num_members, "minProperties maxProperties"),
    (_required, "required"),
    (_depends, "dependentRequired dependentSchemas dependencies"),
    (_all_of, "allOf"),
    (_any_of, "anyOf"),
    (_one_of, "oneOf"),
    (_not, "not"),
    (_if, "if then else"),
    (_unevaluated, "unevaluatedItems unevaluatedProperties"),
)
KEYWORDS = frozenset(keyword for _, group in _GROUPS for keyword in group.split())


def _meanings(schema: Mapping[str, Any], draft: int) -> Iterator[tuple[str, Meaning]]:
    for meaning, group in _GROUPS:
        keyword = next((one for one in group.split() if one in schema), None)
        if keyword is None or (draft == 7 and "$ref" in schema and keyword != "$ref"):
            continue
        if group.startswith("if") and "if" not in schema:
            continue
        yield keyword, meaning


def _arrays(reader: Reader, shape: ArrayShape) -> tuple[ArrayShape, ...]:
    one = reader.sets.intersection(Values(arrays=(shape,)), Values(arrays=(reader.sets.any_array,)))
    return one.arrays


def _language(reader: Reader, automaton: Any) -> Language | None:
    language = reader.sets.language(automaton)
    return None if language.empty else language


def _count(schema: Mapping[str, Any], keyword: str) -> int | None:
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise UnsupportedGrammar(f"{keyword} must be a whole number of at least 0, got {value!r}")
    return int(value)


def _number(value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedGrammar(f"a number is needed, got {value!r}")
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
