"""Each difference of two masks, put down to one of few reasons by completing the text: or it is a fault of ours.

What only we allow is right where a text that goes on so is valid, which `jsonschema` says. What only they allow is
wrong where they complete it to something invalid; a valid text that we refuse must be one that we write differently.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from typing import Any

import jsonschema
import numpy as np

from tests.fence.completion import completed
from tests.fence.differential import Difference, schema_grammar
from tests.fence.masks import mask
from zllm_jax.fence import Position, TokenTables, Vocabulary, compile_tokens, unpack_bits
from zllm_jax.fence.host import HostMatcher, HostVocabulary
from zllm_jax.fence.schema import json_schema

SAMPLED = 12  # tokens of each side of a difference
REASONS = {
    "they refuse: a name": "members come in the schema's order only, listed ones before others; here in any order",
    "they refuse: an escape": "texts with a pattern, a format or a bound have no escapes; here JSON's, each of them",
    "they refuse: DEL as it is": "they escape U+007F, which JSON does not ask for",
    "they refuse: a number": "an integer has no fraction; here 5.0 is one, as in JSON Schema",
    "they refuse: a value": "fewer spellings of numbers, such as -0",
    "they allow: what breaks format": "a second 60 at any time of the day",
    "they allow: another spelling of the same value": "what a schema lists is spelled here as `json.dumps` does",
}


class UnexplainedError(AssertionError):
    """A difference that is a fault of ours, for all that the rules know."""


@dataclass(frozen=True)
class Place:
    """The same tokens on both sides."""

    text: bytes
    ours: Position
    theirs: HostMatcher


@dataclass(eq=False)
class Sides:
    """One schema: our tables, their matcher, and an independent validator. Raises where a side doesn't support it."""

    schema: Any
    vocabulary: Vocabulary
    shared: HostVocabulary
    formats: bool = True
    _ends: dict[Position, bytes | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._grammar = schema_grammar(self.schema)
        machine = json_schema(self.schema, whitespace="dense", formats=self.formats).machine
        self.tables: TokenTables = compile_tokens(machine, self.vocabulary)

    @cached_property
    def _validator(self) -> jsonschema.Draft202012Validator:
        return jsonschema.Draft202012Validator(self.schema, format_checker=FORMATS if self.formats else None)

    def begin(self) -> Place:
        return Place(b"", self.tables.machine.begin, self.shared.matcher(self._grammar))

    def after(self, place: Place, token: int) -> Place:
        text = self.vocabulary.tokens[token]
        return Place(place.text + text, self.tables.machine.run(text, place.ours), place.theirs.advance(token))

    def masks(self, place: Place) -> tuple[np.ndarray, np.ndarray]:
        """Ours and theirs, bool[V] each."""
        return mask(self.tables, place.ours), unpack_bits(place.theirs.mask(), len(self.vocabulary))

    def reasons(self, place: Place, rng: random.Random) -> set[str]:
        """Why the masks differ here; empty where they don't. Raises `UnexplainedError`."""
        ours, theirs = self.masks(place)
        found = set()
        for token in _some(np.flatnonzero(ours & ~theirs), rng, SAMPLED):
            found.add("they refuse: " + self._ours_only(place, token))
        for token in _some(np.flatnonzero(theirs & ~ours), rng, SAMPLED // 2):
            found.add("they allow: " + self._theirs_only(place, token, rng))
        return found

    def _ours_only(self, place: Place, token: int) -> str:
        added = self.vocabulary.tokens[token]
        text = self._completed(place, added)
        difference = Difference(place.text, (added,), ())
        if text is None:
            raise UnexplainedError(f"we allow {difference}, but nothing completes it")
        try:
            value = _parsed(text)
        except ValueError as error:
            raise UnexplainedError(f"we allow {text!r}, which is no JSON: {error}") from None
        if wrong := self._wrong(value):
            raise UnexplainedError(f"we allow {text!r}, but {wrong}")
        return _kind(place.text, added)

    def _completed(self, place: Place, added: bytes) -> bytes | None:
        at = self.tables.machine.run(added, place.ours)
        if at not in self._ends:
            self._ends[at] = completed(self.tables.machine, at)
        end = self._ends[at]
        return None if end is None else place.text + added + end

    def _theirs_only(self, place: Place, token: int, rng: random.Random) -> str:
        """Why we refuse it. Several completions: one that we should allow is enough to blame us."""
        added = self.vocabulary.tokens[token]
        if added and not self.tables.machine.run(added, place.ours).dead:
            raise UnexplainedError(f"our mask refuses {added!r} after {place.text!r}, our machine does not")
        ends = [self._their_end(place, token, rng) for _ in range(5)]
        found = {self._refused(text) for text in ends if text is not None}
        if not found:
            raise UnexplainedError(f"they allow {added!r} after {place.text!r}; no completion was found")
        return min(found)

    def _refused(self, text: bytes) -> str:
        """Why we refuse a whole text of theirs."""
        try:
            value = _parsed(text)
        except RepeatedError:
            return "a member twice"
        except ValueError:
            return "no JSON"
        if wrong := self._wrong(value):
            return f"what breaks {wrong.split(' ')[0]}"
        again = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
        if again != text and self.tables.machine.accepts(again):
            return "another spelling of the same value"
        raise UnexplainedError(f"we refuse {text!r}, which is valid")

    def _their_end(self, place: Place, token: int, rng: random.Random) -> bytes | None:
        """A completion of theirs, by what ends values; None where chance found none."""
        at, text = place.theirs.advance(token), place.text + self.vocabulary.tokens[token]
        for _ in range(150):
            if at.ended:
                return text
            allowed = np.flatnonzero(unpack_bits(at.mask(), len(self.vocabulary))).tolist()
            single = [one for one in allowed if len(self.vocabulary.tokens[one]) == 1]
            closing = [one for one in single if self.vocabulary.tokens[one] in b'"]},:0a']
            if not allowed:
                return None
            several = closing if closing and rng.random() < 0.8 else single or allowed
            chosen = rng.choice(several)
            at, text = at.advance(chosen), text + self.vocabulary.tokens[chosen]
        return None

    def _wrong(self, value: Any) -> str:
        """The keyword that a value breaks and how; empty where it breaks none."""
        error = next(iter(self._validator.iter_errors(value)), None)
        return f"{error.validator} {error.message}" if error else ""


class RepeatedError(ValueError):
    """An object names a member twice."""


def _parsed(text: bytes) -> Any:
    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise RepeatedError
        return dict(pairs)

    def never(name: str) -> Any:
        raise ValueError(name)

    return json.loads(text.decode(), object_pairs_hook=once, parse_constant=never)


def _some(tokens: np.ndarray, rng: random.Random, several: int) -> list[int]:
    found: list[int] = tokens.tolist()
    return found if len(found) <= several else rng.sample(found, several)


def _kind(before: bytes, added: bytes) -> str:
    """What of a valid text they leave out."""
    open_escape = (len(before) - len(before.rstrip(b"\\"))) % 2
    if b"\x7f" in added:
        return "DEL as it is"
    if b"\\" in added or open_escape:
        return "an escape"
    found = {_where(before), _where(before + added)}
    return "a name" if "a name" in found else _where(before)


def _where(before: bytes) -> str:
    """What stands at the end of a beginning of JSON, roughly: a name, a text, a number, or what is between them."""
    inside, name, before_it, open_ones = False, False, "", ""
    for character in re.sub(rb"\\.", b"__", before).decode(errors="replace"):
        if character == '"':
            inside = not inside
            name = open_ones[-1:] == "{" and before_it in "{," if inside else name
        elif not inside and character in "{[":
            open_ones += character
        elif not inside and character in "}]":
            open_ones = open_ones[:-1]
        before_it = character
    if inside:
        return "a name" if name else "a text"
    if before_it in ("{", ","):
        return "a name" if open_ones[-1:] == "{" else "an element"
    return "a number" if before_it and before_it in "0123456789.eE+-" else "a value"


FORMATS = jsonschema.FormatChecker(("email", "ipv4", "uuid"))


@FORMATS.checks("date", raises=ValueError)
def _date(value: object) -> bool:
    """RFC 3339 has a year 0000, a leap year as 2000 is; Python has not."""
    if isinstance(value, str):
        date.fromisoformat(re.sub("^0000", "2000", value))
    return not isinstance(value, str) or len(value) == 10


@FORMATS.checks("time", raises=ValueError)
def _time(value: object) -> bool:
    """A second 60 comes at the end of a day in UTC only."""
    if not isinstance(value, str):
        return True
    found = re.fullmatch(r"(\d\d):(\d\d):(\d\d)(\.\d+)?([zZ]|([+-])(\d\d):(\d\d))", value)
    if not found:
        return False
    hour, minute, second = (int(found[i]) for i in (1, 2, 3))
    ahead = 0 if found[6] is None else (60 * int(found[7]) + int(found[8])) * (-1 if found[6] == "-" else 1)
    inside = hour < 24 and minute < 60 and int(found[7] or 0) < 24 and int(found[8] or 0) < 60
    return inside and (second < 60 or (second == 60 and (60 * hour + minute - ahead) % 1440 == 1439))


@FORMATS.checks("date-time", raises=ValueError)
def _date_time(value: object) -> bool:
    return not isinstance(value, str) or (value[10:11] in ("T", "t") and _date(value[:10]) and _time(value[11:]))
