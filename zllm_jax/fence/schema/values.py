"""Sets of JSON values in a normal form that is closed under and, or, not.

A set is a union by type: flags for the literals, a regular language for numbers and for texts, alternatives of shapes
for arrays and objects. Shapes hold what their members must be as expressions, which are evaluated when they are
needed: so recursive schemas have finite normal forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import regular
from zllm_jax.fence.automaton import ByContent, ByteAutomaton, choices

_OPERATIONS: Mapping[str, Callable[[ByteAutomaton, ByteAutomaton], ByteAutomaton]] = {
    "and": regular.intersect,
    "or": regular.union,
    "without": regular.difference,
}
_SURROGATE = re.compile("[\ud800-\udfff]")
LONG_TEXT = 6  # characters; shorter bounds are counted by states
MAX_SHAPES = 128  # alternatives of one type in one place


@dataclass(frozen=True, eq=False)
class Expr:
    """A set of values by name: kind "true", "false", "at" (a location), "const" (a value),
    "shape", "and", "or" or "not".

    Equal expressions are the same object within one `Sets`; number: in the order of their making.
    """

    kind: str
    parts: tuple[Any, ...] = ()
    number: int = 0


@dataclass(frozen=True, eq=False)
class Language:
    """A regular language, known exactly or between two bounds; equal ones are the same object within one `Sets`.

    sure: the texts that are surely in it; loose: those that may be, where not known exactly. lengths: instead, that it
    is all texts of so many characters; (low, high), high None for any number.
    """

    sure: ByteAutomaton | None = None
    loose: ByteAutomaton | None = None
    lengths: tuple[int, int | None] | None = None

    @cached_property
    def automaton(self) -> ByteAutomaton:
        """The texts that are surely in it."""
        if self.lengths is not None:
            return regular.text_length(*self.lengths)
        assert self.sure is not None
        return self.sure

    @property
    def possible(self) -> ByteAutomaton:
        """The texts that may be in it; what is outside is surely not."""
        return self.loose or self.automaton

    @property
    def exact(self) -> bool:
        return self.loose is None

    @cached_property
    def empty(self) -> bool:
        """Whether surely no text is in it."""
        return self.lengths is None and regular.is_empty(self.possible)

    @cached_property
    def unsure(self) -> bool:
        """Whether no text is surely in it."""
        return self.lengths is None and regular.is_empty(self.automaton)

    @property
    def counted(self) -> bool:
        """Whether its texts are long enough that a frame counts their characters."""
        return self.lengths is not None and self.lengths[1] is not None and self.lengths[1] >= LONG_TEXT


@dataclass(frozen=True)
class Contains:
    """Between `low` and `high` (None: any number) of the items from index `offset` on are in `expr`."""

    expr: Expr
    low: int
    high: int | None
    offset: int = 0


@dataclass(frozen=True)
class ArrayShape:
    """Arrays of `low` to `high` items: the first ones in `prefix`, each in its place, all others in `rest`."""

    prefix: tuple[Expr, ...]
    rest: Expr
    low: int = 0
    high: int | None = None
    contains: tuple[Contains, ...] = ()

    def item(self, index: int) -> Expr:
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclass(frozen=True)
class ObjectShape:
    """Objects of `low` to `high` members.

    named: what the members of these names must be. classes: languages of names that share no text, and what members
    whose names are in them must be; a name in `named` counts only there, one in neither is not allowed.
    """

    named: tuple[tuple[str, Expr], ...]
    classes: tuple[tuple[Language, Expr], ...]
    required: frozenset[str] = frozenset()
    low: int = 0
    high: int | None = None


@dataclass(frozen=True)
class Values:
    """A set of JSON values."""

    null: bool = False
    true: bool = False
    false: bool = False
    number: Language | None = None
    string: Language | None = None
    arrays: tuple[ArrayShape, ...] = ()
    objects: tuple[ObjectShape, ...] = ()


@dataclass(eq=False)
class Sets:
    """The algebra: makes expressions and languages, and combines sets."""

    _exprs: dict[tuple[Any, ...], Expr] = field(default_factory=dict)
    _languages: dict[tuple[Any, ...], Language] = field(default_factory=dict)
    _combined: dict[tuple[str, Language, Language], Language] = field(default_factory=dict)

    @cached_property
    def everything(self) -> Expr:
        return self._expr("true")

    @cached_property
    def nothing(self) -> Expr:
        return self._expr("false")

    @cached_property
    def any_text(self) -> Language:
        return self.language(regular.any_text())

    @cached_property
    def any_number(self) -> Language:
        """All spellings, with exponents. Only what is not bounded has those."""
        return self.language(regular.json_number())

    @cached_property
    def plain_number(self) -> Language:
        return self.language(regular.json_number(exponents=False))

    @cached_property
    def integer(self) -> Language:
        return self.language(regular.json_number(integer=True, exponents=False))

    @cached_property
    def spelled_number(self) -> Language:
        """Numbers without zeros at the end of a fraction, but for `.0`: a model could go on writing them for ever."""
        pattern = r"-?(0|[1-9][0-9]*)(\.(0|[0-9]*[1-9]))?([eE][+-]?[0-9]+)?"
        return self.language(regular.fullmatch_regex(pattern))

    @cached_property
    def any_array(self) -> ArrayShape:
        return ArrayShape((), self.everything)

    @cached_property
    def any_object(self) -> ObjectShape:
        return ObjectShape((), ((self.any_text, self.everything),))

    @cached_property
    def any_value(self) -> Values:
        return Values(True, True, True, self.any_number, self.any_text, (self.any_array,), (self.any_object,))

    def at(self, location: Any) -> Expr:
        return self._expr("at", location)

    def const(self, text: str) -> Expr:
        """Exactly one value, given as JSON text."""
        return self._expr("const", text)

    def shaped(self, shape: ObjectShape) -> Expr:
        """The objects of a shape."""
        return self._expr("shape", shape)

    def both(self, *exprs: Expr) -> Expr:
        """What is in all of them."""
        return self._joined("and", exprs, neutral=self.everything, absorbing=self.nothing)

    def either(self, *exprs: Expr) -> Expr:
        """What is in at least one of them."""
        return self._joined("or", exprs, neutral=self.nothing, absorbing=self.everything)

    def other_than(self, expr: Expr) -> Expr:
        if expr.kind == "not":
            inner: Expr = expr.parts[0]
            return inner
        return {"true": self.nothing, "false": self.everything}.get(expr.kind) or self._expr("not", expr)

    def _joined(self, kind: str, exprs: Iterable[Expr], *, neutral: Expr, absorbing: Expr) -> Expr:
        flat: dict[Expr, None] = {}
        for one in exprs:
            flat.update(dict.fromkeys(one.parts if one.kind == kind else (one,)))
        flat.pop(neutral, None)
        if absorbing in flat or any(self.other_than(one) in flat for one in flat):
            return absorbing
        if len(flat) <= 1:
            return next(iter(flat), neutral)
        return self._expr(kind, *sorted(flat, key=lambda one: one.number))

    def _expr(self, kind: str, *parts: Any) -> Expr:
        return self._exprs.setdefault((kind, *parts), Expr(kind, parts, len(self._exprs)))

    def language(self, automaton: ByteAutomaton, possible: ByteAutomaton | None = None) -> Language:
        """possible: where it isn't known exactly, the texts that may be in it."""
        if possible is not None and possible.digest == automaton.digest:
            possible = None
        key = (automaton.digest, None if possible is None else possible.digest)
        return self._languages.setdefault(key, Language(automaton, possible))

    def length(self, low: int, high: int | None) -> Language:
        """All texts of `low` to `high` characters (None: any number)."""
        if high is not None and low > high:
            return self.language(regular.empty())
        if low == 0 and high is None:
            return self.any_text
        return self._languages.setdefault(("length", low, high), Language(lengths=(low, high)))

    def texts(self, several: Iterable[str]) -> Language:
        """Exactly these texts, but for those that are no Unicode: no output can hold half a surrogate pair."""
        known = [one for one in several if not _SURROGATE.search(one)]
        return self.language(regular.union(choices(known)) if known else regular.empty())

    def common(self, a: Language, b: Language) -> Language:
        if a is b or b is self.any_text:
            return a
        if a is self.any_text:
            return b
        if a.lengths is not None and b.lengths is not None:
            return self.length(max(a.lengths[0], b.lengths[0]), _least(a.lengths[1], b.lengths[1]))
        return self._combine("and", a, b)

    def without(self, a: Language, b: Language) -> Language:
        return self._combine("without", a, b)

    def joined(self, a: Language, b: Language) -> Language:
        return a if a is b else self._combine("or", a, b)

    def _combine(self, what: str, a: Language, b: Language) -> Language:
        if (what, a, b) not in self._combined:
            other = (b.automaton, b.possible)
            sure, possible = reversed(other) if what == "without" else other
            exact = a.exact and b.exact
            made = _operated(what, ByContent(a.automaton), ByContent(sure))
            loose = None if exact else _operated(what, ByContent(a.possible), ByContent(possible))
            self._combined[what, a, b] = self.language(made, loose)
        return self._combined[what, a, b]

    def intersection(self, a: Values, b: Values) -> Values:
        if a is self.any_value or b is self.any_value:
            return b if a is self.any_value else a
        return Values(
            null=a.null and b.null,
            true=a.true and b.true,
            false=a.false and b.false,
            number=self._common_number(a.number, b.number),
            string=self._text(None if a.string is None or b.string is None else self.common(a.string, b.string)),
            arrays=_bounded(self._common_array(x, y) for x in a.arrays for y in b.arrays),
            objects=_bounded(self._common_object(x, y) for x in a.objects for y in b.objects),
        )

    def union(self, a: Values, b: Values) -> Values:
        return Values(
            null=a.null or b.null,
            true=a.true or b.true,
            false=a.false or b.false,
            number=self._joined_number(a.number, b.number),
            string=a.string if b.string is None else b.string if a.string is None else self.joined(a.string, b.string),
            arrays=self._alternatives([*a.arrays, *b.arrays], self.any_array),
            objects=self._alternatives([*a.objects, *b.objects], self.any_object),
        )

    def complement(self, a: Values) -> Values:
        """All other values. Raises `UnsupportedGrammar` where they have no such form."""
        arrays: tuple[ArrayShape, ...] = (self.any_array,)
        for shape in a.arrays:
            others = list(self._other_arrays(shape))
            arrays = _bounded(self._common_array(x, y) for x in arrays for y in others)
        objects: tuple[ObjectShape, ...] = (self.any_object,)
        for one in a.objects:
            differing = list(self._other_objects(one))
            objects = _bounded(self._common_object(x, y) for x in objects for y in differing)
        return Values(
            null=not a.null,
            true=not a.true,
            false=not a.false,
            number=self._other_number(a.number),
            string=self.any_text if a.string is None else self._text(self.without(self.any_text, a.string)),
            arrays=arrays,
            objects=objects,
        )

    def _text(self, language: Language | None) -> Language | None:
        return None if language is None or language.empty else language

    def _common_number(self, a: Language | None, b: Language | None) -> Language | None:
        if a is None or b is None:
            return None
        if self.any_number in (a, b):
            return b if a is self.any_number else a
        return self._text(self.common(a, b))

    def _joined_number(self, a: Language | None, b: Language | None) -> Language | None:
        if a is None or b is None:
            return a or b
        joined = self.any_number if self.any_number in (a, b) else self.joined(a, b)
        return self.any_number if joined is self.plain_number else joined

    def _other_number(self, a: Language | None) -> Language | None:
        if a is None:
            return self.any_number
        return None if a is self.any_number else self._text(self.without(self.plain_number, a))

    def _common_array(self, a: ArrayShape, b: ArrayShape) -> ArrayShape | None:
        high = _least(a.high, b.high)
        prefix = tuple(self.both(a.item(i), b.item(i)) for i in range(max(len(a.prefix), len(b.prefix))))
        rest = self.both(a.rest, b.rest)
        forbidden = next((i for i, one in enumerate(prefix) if one is self.nothing), None)
        if forbidden is not None:
            high, prefix, rest = _least(high, forbidden), prefix[:forbidden], self.nothing
        if rest is self.nothing:
            high = _least(high, len(prefix))
        low = max(a.low, b.low)
        if high is not None and low > high:
            return None
        if high is not None and high <= len(prefix):
            prefix, rest = prefix[:high], self.nothing
        return ArrayShape(prefix, rest, low, high, tuple(dict.fromkeys([*a.contains, *b.contains])))

    def _common_object(self, a: ObjectShape, b: ObjectShape) -> ObjectShape | None:
        if b == self.any_object:
            return a
        if a == self.any_object:
            return b
        mine, theirs = dict(a.named), dict(b.named)
        named = {name: self.both(self.member(a, name), self.member(b, name)) for name in sorted(mine | theirs)}
        classes = tuple(
            (names, self.both(x, y))
            for one, x in a.classes
            for other, y in b.classes
            if not (names := self.common(one, other)).empty
        )
        required = a.required | b.required
        high, low = _least(a.high, b.high), max(a.low, b.low)
        if high is not None and (low > high or len(required) > high):
            return None
        shape = ObjectShape(tuple(named.items()), classes, required, low, high)
        if any(self.member(shape, name) is self.nothing for name in required):
            return None
        return shape

    def member(self, shape: ObjectShape, name: str) -> Expr:
        """What a member of this name must be."""
        for known, expr in shape.named:
            if known == name:
                return expr
        text = name.encode(errors="surrogatepass")
        found = next((expr for names, expr in shape.classes if names.automaton.accepts(text)), None)
        if found is None and any(not names.exact and names.possible.accepts(text) for names, _ in shape.classes):
            raise UnsupportedGrammar(f"whether {name!r} has the format that names must have is not known")
        return found or self.nothing

    def _other_arrays(self, shape: ArrayShape) -> Iterable[ArrayShape]:
        if shape.low:
            yield replace(self.any_array, high=shape.low - 1)
        if shape.high is not None:
            yield replace(self.any_array, low=shape.high + 1)
        for i, expr in enumerate(shape.prefix):
            if expr is not self.everything:
                before = (self.everything,) * i
                yield ArrayShape((*before, self.other_than(expr)), self.everything, low=i + 1)
        num = len(shape.prefix)
        if shape.rest is self.nothing and shape.high != num:
            yield replace(self.any_array, low=num + 1)
        elif shape.rest not in (self.nothing, self.everything):
            yield replace(self.any_array, contains=(Contains(self.other_than(shape.rest), 1, None, num),))
        for one in shape.contains:
            if one.low:
                yield replace(self.any_array, contains=(replace(one, low=0, high=one.low - 1),))
            if one.high is not None:
                yield replace(self.any_array, contains=(replace(one, low=one.high + 1, high=None),))

    def _other_objects(self, shape: ObjectShape) -> Iterable[ObjectShape]:
        if shape.low:
            yield replace(self.any_object, high=shape.low - 1)
        if shape.high is not None:
            yield replace(self.any_object, low=shape.high + 1)
        for name in sorted(shape.required):
            yield replace(self.any_object, named=((name, self.nothing),))
        for name, expr in shape.named:
            if expr is not self.everything:
                other = ((name, self.other_than(expr)),)
                yield replace(self.any_object, named=other, required=frozenset([name]))
        if any(expr is not self.everything for _, expr in shape.classes) or not self._covers_all(shape):
            raise UnsupportedGrammar("the opposite of a rule for names that are not listed cannot be enforced exactly")

    def _covers_all(self, shape: ObjectShape) -> bool:
        named = self.texts(name for name, _ in shape.named).automaton if shape.named else regular.empty()
        everything = regular.union(named, *(names.automaton for names, _ in shape.classes))
        return regular.is_empty(regular.difference(self.any_text.automaton, everything))

    def _alternatives(self, shapes: Iterable[Any], whole: Any) -> tuple[Any, ...]:
        several = _bounded(shapes)
        return (whole,) if whole in several else several


@lru_cache(maxsize=512)
def _operated(what: str, a: ByContent, b: ByContent) -> ByteAutomaton:
    return _OPERATIONS[what](a.automaton, b.automaton)


def _bounded(shapes: Iterable[Any]) -> tuple[Any, ...]:
    several: dict[Any, None] = {}
    for one in shapes:
        if one is not None:
            several[one] = None
        if len(several) > MAX_SHAPES:
            raise UnsupportedGrammar(f"more than {MAX_SHAPES} alternatives in one place")
    return tuple(several)


def _least(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)
