"""Numbers within bounds and multiples, against exact decimals."""

from __future__ import annotations

import random
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.regular import difference, is_empty, json_number, union

PLAIN = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")
BOUNDS = [0, 1, -1, 1.1, -1.1, 0.5, 100, -100, 99, 10, 0.001, -0.25, 12.5, 1e3, -0.0, Decimal("0.05"), Fraction(1, 8)]
STEPS = [1, 2, 3, 7, 10, 12, 25, 60, 123, 1000, 1_000_000, 3_000_000, 0.01, 0.5, 1.5, 0.0001, 2.5, 0.25, 1e-7]
OTHERS: list[dict[str, Any]] = [
    {"exponents": False},
    {"integer": True},
    {"integer": True, "minimum": 0, "maximum": 100},
    {"integer": True, "minimum": 1.5, "multiple_of": 3},
    {"minimum": -1, "exclusive_maximum": 2.5, "multiple_of": 0.5},
    {"minimum": 3, "maximum": 3},
    {"minimum": 3, "maximum": 2},
]
CASES = [
    *({kind: bound} for bound in BOUNDS for kind in ("minimum", "maximum", "exclusive_minimum", "exclusive_maximum")),
    *({"multiple_of": step} for step in STEPS),
    *OTHERS,
]


def texts() -> list[str]:
    rng = random.Random(7)
    near = [0, 1, 3, 9, 11, 99, 101, 110, 12, 25, 250, 1000, 999, 1_000_000, 6_000_000, 1_500_000]
    found = ["", "-", ".5", "1.", "-0", "-0.0", "00", "01", "1e5", "+1", "1.10", "1.0999999", "0.050", "0.125", "1e-7"]
    for _ in range(1500):
        whole = str(rng.choice(near)) if rng.random() < 0.4 else str(rng.randint(0, 10 ** rng.randint(0, 4)))
        fraction = "".join(rng.choice("0001259") for _ in range(rng.randint(0, 8))) if rng.random() < 0.6 else ""
        found.append(rng.choice(["", "", "-"]) + whole + ("." + fraction if fraction else ""))
    return found


TEXTS = texts()


def exact(number: Any) -> Fraction:
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)


def keeps(text: str, rules: dict[str, Any]) -> bool:
    if not PLAIN.fullmatch(text):
        return False
    number = Fraction(text)
    return (
        number >= exact(rules.get("minimum", number))
        and number <= exact(rules.get("maximum", number))
        and number > exact(rules.get("exclusive_minimum", number - 1))
        and number < exact(rules.get("exclusive_maximum", number + 1))
        and (number / exact(rules.get("multiple_of", 1 if rules.get("integer") else number or 1))).denominator == 1
        and not (rules.get("integer") and number.denominator != 1)
    )


@pytest.mark.parametrize("rules", CASES, ids=str)
def test_numbers(rules: dict[str, Any]) -> None:
    automaton = json_number(**rules)
    wrong = [text for text in TEXTS if automaton.accepts(text.encode()) != keeps(text, rules)]
    assert not wrong


def test_a_bound_and_its_opposite_are_all_plain_decimals() -> None:
    everything = json_number(exponents=False)
    for bound in (0, 3, -1.25, 1e20):
        low, high = json_number(exclusive_maximum=bound), json_number(minimum=bound)
        assert union(low, high).digest == everything.digest
        assert difference(everything, high).digest == low.digest


def test_free_numbers_have_exponents() -> None:
    free = json_number()
    assert all(free.accepts(text) for text in (b"1e308", b"1.5e-07", b"1E+5", b"-0", b"0e0"))
    assert not any(free.accepts(text) for text in (b"1e", b"e5", b"1.e5", b"01", b"1e5.0", b""))
    assert is_empty(difference(json_number(exponents=False), free))


def test_far_bounds() -> None:
    assert json_number(maximum=1e308).accepts(b"9" * 308)
    assert not json_number(maximum=1e308).accepts(b"1" + b"0" * 307 + b"1")
    assert json_number(minimum=5e-324).accepts(b"0." + b"0" * 323 + b"5")
    int64 = json_number(integer=True, minimum=-(2**63), maximum=2**63 - 1)
    assert int64.accepts(b"-9223372036854775808")
    assert not int64.accepts(b"9223372036854775808")


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"multiple_of": 123_456_789}, "too large"),
        ({"multiple_of": 0}, "not above 0"),
        ({"multiple_of": Fraction(1, 3)}, "no finite decimal"),
        ({"minimum": float("inf")}, "not a finite number"),
        ({"minimum": 10**1001}, "too many digits"),
        ({"maximum": Decimal("1e9999999")}, "too many digits"),
    ],
)
def test_what_cannot_be_enforced(rules: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedGrammar, match=reason):
        json_number(**rules)
