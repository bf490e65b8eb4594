"""Patterns against Python's `re`, where both mean the same; and where ECMA-262 differs, by hand."""

from __future__ import annotations

import random
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.regular import any_text, empty, fullmatch_regex, regex

LISTED = [
    r"abc",
    r"^abc",
    r"abc$",
    r"^abc$",
    r"^a|b$",
    r"(^a|b)$",
    r"a.c",
    r"^a*$",
    r"^(a|b)+c?$",
    r"^[a-c]{2,4}$",
    r"^[^a-c]+$",
    r"\d+",
    r"^\w+@\w+\.\w+$",
    r"^\D+$",
    r"^\W*$",
    r"^(?!foo)",
    r"^(?!foo).*$",
    r"^((?!foo).)*$",
    r"^(?=.*\d)(?=.*[a-z]).{3,}$",
    r"(?<!a)b",
    r"(?<=ab)c",
    r"\bfoo\b",
    r"^\s*$",
    r"^\S+$",
    r"\S\s\S",
    r"^(?:a{2}){2,}$",
    r"^(a?){3}b$",
    r"foo(?=bar)",
    r"foo(?!bar)",
    r"a(?=b$)",
    r"^(?=a)(?!ab)[a-z]+$",
    r"(?<!^)a",
    r"^[\w.-]+$",
    r"^a{0}b$",
    r"^a{0,0}$",
    r"^\x61\u0062$",
    r"^$",
    r"()",
    r"a||b",
    r"^(a(b(c)?)?)?$",
    r"x*?y+?",
    r"^-?(0|[1-9]\d*)(\.\d+)?$",
    r"^(?=.*\bfoo\b).*$",
    r"(?=a)b",
    r"a(?<=a)b",
    r"^[^\n]*$",
    r"^.*$",
    r"(a|ab)(c|bcd)(d*)",
    r"^(?![\s\S]*ab)[abf]*$",
    r"\b\b",
    r"^\b",
    r"\b$",
    r"^(?:(?=a).|b)*$",
    r"^(?!.*(ab|ba))",
    r"[\]a]",
    r"^[a\-c]$",
    r"^(?:[ab](?!b))*$",
    r"^o?(?!o*$)[a-o]*$",
    r"^(?:a|b)*?c$",
    r"^(?:ab?)+$",
    r"(?:^|-)a(?:-|$)",
    r"^[\d_]{1,3}$",
    r"[^\w\s]",
    r"^(?=(?:a|b){3}$)ab",
    r"^(?!a$|b$).",
    r"(?<=^a)b",
    r"(?<![ab])o",
    r"^(.)(.)\w$",
    r"[.]",
    r"\.",
    r"\-",
    r"^\t?$",
    r"\n",
    r"^[\b]?$",
    r"\cJ",
    r"\0",
    r"^{a}$",
    r"a]",
    r"^a+?b*?$",
    r"((a)|(b))*c",
]
LETTERS = "abcfox1@._- \n{}]\t"


def texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    words = ["foo", "bar", "abc", "ab", "ba", "a", "b", *LETTERS]
    return ["", *("".join(rng.choice(words) for _ in range(rng.randint(1, 5))) for _ in range(400))]


def check(pattern: str, some: list[str]) -> None:
    found, whole = regex(pattern), fullmatch_regex(pattern)
    python = re.compile(pattern.replace("$", r"\Z").replace(r"\cJ", r"\n"), re.ASCII)
    for text in some:
        assert found.accepts(text.encode()) == bool(python.search(text)), (pattern, text)
        assert whole.accepts(text.encode()) == bool(python.fullmatch(text)), (pattern, text)


@pytest.mark.parametrize("pattern", LISTED)
def test_listed_patterns(pattern: str) -> None:
    check(pattern, texts(LISTED.index(pattern)))


def sequences(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(parts, min_size=1, max_size=3).map("".join)


ATOMS = st.sampled_from(["a", "b", "1", ".", r"\w", r"\d", r"\W", "[ab]", "[^a]", "[a1-]", " "])
EDGES = st.sampled_from(["^", "$", r"\b", "(?<=a)", "(?<!b)", "(?<=ab)", r"(?<!\w)", "(?<!^a)"])
QUANTIFIERS = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "+?"])


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = sequences(inner)
    repeated = st.builds("(?:{}){}".format, body, QUANTIFIERS)
    choice = st.builds("(?:{}|{})".format, body, body)
    ahead = st.builds("({}{})".format, st.sampled_from(["?=", "?!"]), body)
    return repeated | choice | ahead | sequences(inner)


PATTERNS = st.recursive(ATOMS | ATOMS | EDGES, grown, max_leaves=7)


@settings(max_examples=300, deadline=None)
@given(PATTERNS, st.lists(st.text("ab1 _\n", max_size=7), min_size=20, max_size=20))
def test_patterns_made_at_random(pattern: str, some: list[str]) -> None:
    check(pattern, some)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"^\s$", "\ufeff\u2003\u2028\xa0\v", "\x1c\x85\u180ea"),
        (r"^.$", "\x85aé😀", "\n\r\u2028\u2029"),
        (r"^\d$", "09", "\u0663\uff11"),
        (r"^\w$", "a_9Z", "éж-"),
        (r"^[^]$", "a\n😀", ""),
        (r"^\u{1F600}$|^\ud83d\ude01$", "😀😁", "😂"),
        (r"^[\u{1F600}-\u{1F610}]$", "😀😐", "😑"),
        (r"^[\ud83d\ude00-\ud83d\ude10]$", "😀😐", "😑"),
        (r"^\p{Lu}$", "AÉЖ", "aé1"),
        (r"^\p{Letter}$", "aÉж日", "1-_"),
        (r"^\P{L}$", "1- ", "aÉ"),
        (r"^[\p{Nd}_]$", "1\u0663_", "aⅣ"),
        (r"^\p{General_Category=Decimal_Number}$", "1\u0663", "a"),
        (r"^\p{ASCII}$", "a\x7f", "\x80é"),
        (r"^\p{Assigned}$", "aé", "\u0378"),
        (r"^(?<year>\d)$", "1", "a"),
        (r"^[\B-D]$".replace(r"\B", "B"), "BCD", "A-"),
    ],
)
def test_the_meaning_of_ecma(pattern: str, yes: str, no: str) -> None:
    automaton = regex(pattern)
    assert all(automaton.accepts(one.encode()) for one in yes)
    assert not any(automaton.accepts(one.encode()) for one in no)


def test_general_categories_are_those_of_unicodedata() -> None:
    rng = random.Random(3)
    codes = [code for code in rng.sample(range(0x110000), 3000) if not 0xD800 <= code < 0xE000] + list(range(0x500))
    for name in ("L", "LC", "Lu", "M", "N", "P", "Sc", "Z", "Cn", "C"):
        automaton = fullmatch_regex(rf"\p{{{name}}}")
        for code in codes:
            category = unicodedata.category(chr(code))
            expected = category in ("Lu", "Ll", "Lt") if name == "LC" else category.startswith(name)
            assert automaton.accepts(chr(code).encode()) == expected, (name, hex(code))


def test_no_edge_within_the_empty_text() -> None:
    assert regex(r"\B").accepts(b"")
    assert not regex(r"\b").accepts(b"")


def test_all_and_nothing() -> None:
    assert regex("").digest == any_text().digest
    assert regex("a|").digest == any_text().digest
    assert regex("[]").digest == empty().digest
    assert regex("$^").digest == fullmatch_regex("").digest
    assert regex(r"\ud800").digest == empty().digest


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(a)\1", "references"),
        (r"(?<x>a)\k<x>", "references"),
        (r"(?<=a(?=b))", "within a lookbehind"),
        (r"(?<=a$)", "within a lookbehind"),
        (r"\p{Script=Greek}", "general categories"),
        (r"\p{gc=Nonsense}", "general categories"),
        (r"\p{letter}", "general categories"),
        (r"\Z", r"\\Z has no meaning"),
        (r"(?i)a", "may follow"),
        (r"(?P<x>a)", "may follow"),
        ("a{,3}", "write {0,3}"),
        ("a{3,2}", "out of order"),
        ("[b-a]", "out of order"),
        (r"[\w-a]", "plain hyphen"),
        ("a**", "nothing to repeat"),
        ("*", "nothing to repeat"),
        ("{2}", "nothing to repeat"),
        ("(?=a)*", "cannot be repeated"),
        ("^*", "cannot be repeated"),
        (r"\b+", "cannot be repeated"),
        ("(a", "not closed"),
        ("a)", "without an opening"),
        ("[a", "too early"),
        ("\\", "too early"),
        (r"\u{110000}", "code point"),
        (r"\u12", "4 hexadecimal"),
        (r"\p", "in braces"),
        (r"\c1", "letter"),
        ("(?<1>a)", "identifier"),
        ("(" * 60 + ")" * 60, "deeper than"),
        ("(a|b)*a(a|b){16}$", "20000 states"),
        ("(a{1000}){1000}", "20000 places"),
        ("((){20000}){20000}", "20000 places"),
        ("(a{70}){100}", "steps"),
        ("^.{5000}$", "too large"),
    ],
)
def test_what_cannot_be_enforced(pattern: str, reason: str) -> None:
    with pytest.raises(UnsupportedGrammar, match=reason):
        regex(pattern)
