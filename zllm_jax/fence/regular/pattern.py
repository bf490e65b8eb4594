"""Regular expressions as ECMA-262 writes them in unicode mode, read into a tree."""

from __future__ import annotations

from dataclasses import dataclass

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.regular.code_points import (
    ALL,
    DIGIT,
    LINE_END,
    MAX_CODE_POINT,
    SPACE,
    WORD,
    CodePoints,
    property_set,
)


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    points: CodePoints


@dataclass(frozen=True)
class Sequence:
    """One after another."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """Any one of them."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """From `low` to `high` times (None: no end)."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True)
class Look:
    """What is ahead of here, or ends here (behind), matches; or does not (negative)."""

    part: Node
    behind: bool
    negative: bool


Node = Chars | Sequence | Choice | Repeat | Look

_ANY = Chars(ALL)
_BEGIN = Look(_ANY, behind=True, negative=True)
_END = Look(_ANY, behind=False, negative=True)
_MAX_DEPTH = 50
_CLASSES = {"d": DIGIT, "D": ~DIGIT, "w": WORD, "W": ~WORD, "s": SPACE, "S": ~SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


def _edge(inside: bool) -> Node:
    r"""`\b`, or `\B` (inside)."""
    word = Chars(WORD)
    sides = [(False, not inside), (True, inside)]
    return Choice(tuple(Sequence((Look(word, True, before), Look(word, False, after))) for before, after in sides))


def parse(pattern: str) -> Node:
    """The tree of a pattern. Raises `UnsupportedGrammar` when it is not one, or refers back to a group."""
    reader = _Reader(pattern)
    node = reader.choice()
    if reader.at < len(pattern):
        raise reader.error("a closing parenthesis without an opening one")
    return node


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.depth = 0

    def error(self, reason: str) -> UnsupportedGrammar:
        return UnsupportedGrammar(f"pattern {self.pattern!r}, at {self.at}: {reason}")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        found = self.peek(text)
        self.at += len(text) if found else 0
        return found

    def next(self) -> str:
        if self.at >= len(self.pattern):
            raise self.error("it ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def choice(self) -> Node:
        parts = [self.sequence()]
        while self.take("|"):
            parts.append(self.sequence())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            parts.append(self.quantified(*self.atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def quantified(self, part: Node, repeatable: bool) -> Node:
        bounds = self.bounds()
        if bounds is None:
            return part
        if not repeatable:
            raise self.error("an assertion cannot be repeated")
        low, high = bounds
        if high is not None and high < low:
            raise self.error(f"{{{low},{high}}} is out of order")
        self.take("?")
        if self.bounds() is not None:
            raise self.error("nothing to repeat")
        return Repeat(part, low, high)

    def bounds(self) -> tuple[int, int | None] | None:
        for sign, simple in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return simple
        if not self.peek("{"):
            return None
        end = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at + 1 : max(end, 0)].partition(",")
        if end >= 0 and comma and not low and _is_count(high):
            raise self.error(f"write {{0,{high}}}: engines do not agree on a count without a lower end")
        if end < 0 or not _is_count(low) or (high and not _is_count(high)):
            return None
        self.at = end + 1
        if not comma:
            return int(low), int(low)
        return int(low), int(high) if high else None

    def atom(self) -> tuple[Node, bool]:
        """The next piece, and whether it can be repeated."""
        one = self.next()
        if one in "*+?":
            raise self.error("nothing to repeat")
        if one == "{" and self._would_repeat():
            raise self.error("nothing to repeat")
        if one == "(":
            return self.group()
        if one == "[":
            return Chars(self.character_class()), True
        if one == "\\":
            return self.escape()
        if one in "^$":
            return _BEGIN if one == "^" else _END, False
        return Chars(~LINE_END if one == "." else CodePoints.among(one)), True

    def _would_repeat(self) -> bool:
        self.at -= 1
        at = self.at
        found = self.bounds() is not None
        self.at = at + 1
        return found

    def group(self) -> tuple[Node, bool]:
        look: tuple[bool, bool] | None = None
        if self.take("?"):
            looks = {"=": (False, False), "!": (False, True), "<=": (True, False), "<!": (True, True)}
            sign = next((sign for sign in looks if self.take(sign)), None)
            if sign:
                look = looks[sign]
            elif self.take("<"):
                self.name()
            elif not self.take(":"):
                raise self.error("only (?:, (?=, (?!, (?<=, (?<! and (?<name> may follow (?")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.error(f"groups are nested deeper than {_MAX_DEPTH}")
        node = self.choice()
        self.depth -= 1
        if not self.take(")"):
            raise self.error("a parenthesis is not closed")
        return (node, True) if look is None else (Look(node, *look), False)

    def name(self) -> None:
        end = self.pattern.find(">", self.at)
        if end < 0 or not self.pattern[self.at : end].replace("$", "_").isidentifier():
            raise self.error("a group's name is an identifier followed by >")
        self.at = end + 1

    def escape(self) -> tuple[Node, bool]:
        if self.take("b"):
            return _edge(inside=False), False
        if self.take("B"):
            return _edge(inside=True), False
        if self.peek("k") or (self.at < len(self.pattern) and self.pattern[self.at] in "123456789"):
            raise self.error("references to groups cannot be enforced")
        return Chars(self.escaped()), True

    def escaped(self) -> CodePoints:
        """After a backslash, in a class or out of it."""
        one = self.next()
        if one in _CLASSES:
            return _CLASSES[one]
        if one in "pP":
            return self.property(one == "P")
        if one in _CONTROLS:
            return _single(_CONTROLS[one])
        if one == "0" and not (self.at < len(self.pattern) and self.pattern[self.at].isdigit()):
            return _single(0)
        if one == "c":
            letter = self.next()
            if not (letter.isascii() and letter.isalpha()):
                raise self.error(r"\c needs a letter")
            return _single(ord(letter) % 32)
        if one == "x":
            return _single(self.hexadecimal(2))
        if one == "u":
            return _single(self.unicode())
        if one.isascii() and (one.isalnum() or one == "_"):
            raise self.error(rf"\{one} has no meaning in ECMA-262 (begin and end of a text are ^ and $)")
        return _single(ord(one))

    def property(self, negative: bool) -> CodePoints:
        end = self.pattern.find("}", self.at)
        if not self.take("{") or end < 0:
            raise self.error(r"\p needs a property in braces, such as \p{L}")
        points = property_set(self.pattern[self.at : end])
        self.at = end + 1
        return ~points if negative else points

    def hexadecimal(self, length: int) -> int:
        digits = self.pattern[self.at : self.at + length]
        if len(digits) < length or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
            raise self.error(f"{length} hexadecimal digits are needed")
        self.at += length
        return int(digits, 16)

    def unicode(self) -> int:
        if self.take("{"):
            end = self.pattern.find("}", self.at)
            code = self.hexadecimal(max(end - self.at, 1))
            if not self.take("}") or code > MAX_CODE_POINT:
                raise self.error(r"\u{...} needs the number of a code point")
            return code
        code = self.hexadecimal(4)
        if 0xD800 <= code < 0xDC00 and self.take("\\u"):
            low = self.hexadecimal(4)
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + ((code - 0xD800) << 10) + low - 0xDC00
            self.at -= 6
        return code

    def character_class(self) -> CodePoints:
        negative = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            first = self.member()
            if not (self.peek("-") and not self.peek("-]")):
                ranges.extend(first.ranges)
                continue
            self.at += 1
            last = self.member()
            if not (_is_single(first) and _is_single(last)):
                raise self.error(r"a range in a class goes from one character to another; a plain hyphen is \-")
            if first.ranges[0][0] > last.ranges[0][0]:
                raise self.error("a range in a class is out of order")
            ranges.append((first.ranges[0][0], last.ranges[0][0]))
        points = CodePoints.of(ranges)
        return ~points if negative else points

    def member(self) -> CodePoints:
        one = self.next()
        if one != "\\":
            return _single(ord(one))
        return _single(8) if self.take("b") else self.escaped()


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_single(points: CodePoints) -> bool:
    return len(points.ranges) == 1 and points.ranges[0][0] == points.ranges[0][1]


def _single(code: int) -> CodePoints:
    return CodePoints(((code, code),))
