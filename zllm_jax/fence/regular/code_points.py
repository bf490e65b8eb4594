"""Sets of code points, and the partition of all code points that several sets make."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from zllm_jax.errors import UnsupportedGrammar

MAX_CODE_POINT = sys.maxunicode
_SURROGATES = (0xD800, 0xE000)
_CATEGORY_NAMES = {
    "Letter": "L",
    "Cased_Letter": "LC",
    "Uppercase_Letter": "Lu",
    "Lowercase_Letter": "Ll",
    "Titlecase_Letter": "Lt",
    "Modifier_Letter": "Lm",
    "Other_Letter": "Lo",
    "Mark": "M",
    "Combining_Mark": "M",
    "Nonspacing_Mark": "Mn",
    "Spacing_Mark": "Mc",
    "Enclosing_Mark": "Me",
    "Number": "N",
    "Decimal_Number": "Nd",
    "digit": "Nd",
    "Letter_Number": "Nl",
    "Other_Number": "No",
    "Punctuation": "P",
    "punct": "P",
    "Connector_Punctuation": "Pc",
    "Dash_Punctuation": "Pd",
    "Open_Punctuation": "Ps",
    "Close_Punctuation": "Pe",
    "Initial_Punctuation": "Pi",
    "Final_Punctuation": "Pf",
    "Other_Punctuation": "Po",
    "Symbol": "S",
    "Math_Symbol": "Sm",
    "Currency_Symbol": "Sc",
    "Modifier_Symbol": "Sk",
    "Other_Symbol": "So",
    "Separator": "Z",
    "Space_Separator": "Zs",
    "Line_Separator": "Zl",
    "Paragraph_Separator": "Zp",
    "Other": "C",
    "Control": "Cc",
    "cntrl": "Cc",
    "Format": "Cf",
    "Surrogate": "Cs",
    "Private_Use": "Co",
    "Unassigned": "Cn",
}


@dataclass(frozen=True)
class CodePoints:
    """A set of code points as sorted, separate ranges (first, last)."""

    ranges: tuple[tuple[int, int], ...]

    @staticmethod
    def of(ranges: Iterable[tuple[int, int]]) -> CodePoints:
        merged: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        return CodePoints(tuple(merged))

    @staticmethod
    def among(characters: str) -> CodePoints:
        return CodePoints.of((ord(one), ord(one)) for one in characters)

    def __or__(self, other: CodePoints) -> CodePoints:
        return CodePoints.of(self.ranges + other.ranges)

    def __invert__(self) -> CodePoints:
        gaps, begin = [], 0
        for first, last in self.ranges:
            if first > begin:
                gaps.append((begin, first - 1))
            begin = last + 1
        if begin <= MAX_CODE_POINT:
            gaps.append((begin, MAX_CODE_POINT))
        return CodePoints(tuple(gaps))

    def __and__(self, other: CodePoints) -> CodePoints:
        return ~(~self | ~other)


ALL = CodePoints(((0, MAX_CODE_POINT),))
ASCII = CodePoints(((0, 127),))
DIGIT = CodePoints(((48, 57),))
WORD = CodePoints.of([(48, 57), (65, 90), (95, 95), (97, 122)])
LINE_END = CodePoints.among("\n\r\u2028\u2029")
SPACE = CodePoints.among("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff") | CodePoints(((0x2000, 0x200A),))


@lru_cache(maxsize=1)
def _categories() -> dict[str, list[tuple[int, int]]]:
    """Ranges by general category; a range ends where the category changes."""
    names = [unicodedata.category(chr(i)) for i in range(MAX_CODE_POINT + 1)]
    numbers, kinds = np.unique(np.array(names), return_inverse=True)
    borders = [0, *(np.flatnonzero(np.diff(kinds.reshape(-1))) + 1).tolist(), MAX_CODE_POINT + 1]
    ranges: dict[str, list[tuple[int, int]]] = {str(name): [] for name in numbers}
    for first, end in pairwise(borders):
        ranges[names[first]].append((first, end - 1))
    return ranges


@lru_cache(maxsize=64)
def property_set(name: str) -> CodePoints:
    r"""What `\p{name}` matches: general categories by Python's Unicode data, and Any, ASCII, Assigned, ASCII_Hex_Digit.

    Raises `UnsupportedGrammar` for scripts and other properties.
    """
    if name in ("Any", "ASCII", "Assigned", "ASCII_Hex_Digit"):
        hexadecimal = DIGIT | CodePoints(((65, 70), (97, 102)))
        return {"Any": ALL, "ASCII": ASCII, "ASCII_Hex_Digit": hexadecimal}.get(name) or ~property_set("Cn")
    key, equals, value = name.rpartition("=")
    short = _CATEGORY_NAMES.get(value, value)
    known = key in ("General_Category", "gc") if equals else True
    categories = {"LC": ["Lu", "Ll", "Lt"]}.get(short) or [one for one in _categories() if short in (one, one[0])]
    if not known or not categories:
        raise UnsupportedGrammar(rf"\p{{{name}}}: only general categories are known, such as \p{{L}} or \p{{Letter}}")
    return CodePoints.of(one for category in categories for one in _categories()[category])


@dataclass(frozen=True, eq=False)
class Partition:
    """Groups of code points that none of several sets tells apart.

    begins: i64[R], the first code point of each range. groups: i64[R], the range's group; -1 for surrogates, which are
    in no text. members: the groups of each set.
    """

    begins: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    members: tuple[tuple[int, ...], ...]

    def group(self, points: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The group of each code point, -1 for none."""
        return self.groups[np.searchsorted(self.begins, points, side="right") - 1]


def partition(sets: Sequence[CodePoints]) -> Partition:
    """What `sets` tell apart."""
    borders = {0, *_SURROGATES, MAX_CODE_POINT + 1}
    borders.update(edge for one in sets for first, last in one.ranges for edge in (first, last + 1))
    begins = np.array(sorted(borders), np.int64)
    inside = np.zeros((len(begins), len(sets) + 1), np.bool_)
    for i, one in enumerate(sets):
        for first, last in one.ranges:
            inside[slice(*np.searchsorted(begins, (first, last + 1))), i] = True
    valid = (begins < _SURROGATES[0]) | (begins >= _SURROGATES[1])
    valid[-1] = False
    numbers: dict[bytes, int] = {}
    groups = np.full(len(begins), -1, np.int64)
    groups[valid] = [numbers.setdefault(row.tobytes(), len(numbers)) for row in inside[valid]]
    members = tuple(tuple(np.unique(groups[valid & inside[:, i]]).tolist()) for i in range(len(sets)))
    return Partition(begins, groups, members)
