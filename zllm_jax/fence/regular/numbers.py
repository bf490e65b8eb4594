"""JSON numbers within bounds and multiples, by their decimal digits."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.automaton import ByteAutomaton, decimal_number
from zllm_jax.fence.regular.algebra import byte_set, concat, intersect, literal, optional, repeat, star, union
from zllm_jax.fence.regular.compact import MAX_STATES, Ints, explore, minimal

Number = int | float | Decimal | Fraction
_MAX_DIGITS = 1000
_MAX_RESIDUES = 10_000
_DIGITS = b"0123456789"
_CLASSES: Ints = np.zeros(256, np.int64)
_CLASSES[list(b"-.0123456789")] = range(1, 13)  # groups of bytes: any other, minus, point, and ten digits


@lru_cache(maxsize=256)
def json_number(
    *,
    integer: bool = False,
    minimum: Number | None = None,
    maximum: Number | None = None,
    exclusive_minimum: Number | None = None,
    exclusive_maximum: Number | None = None,
    multiple_of: Number | None = None,
    exponents: bool = True,
) -> ByteAutomaton:
    """JSON texts of the numbers that keep all the rules. A float stands for the shortest decimal that reads as it.

    Under any rule only plain decimals are in it, but every spelling of those: `3`, `3.0` and `3.00` are one number.
    Without a rule numbers with an exponent are in it too, unless `exponents` is False: so a difference must be taken
    from the numbers without exponents. Raises `UnsupportedGrammar` for multiples that need too many states and bounds
    of more than 1000 digits.

    >>> [json_number(minimum=1.1).accepts(text) for text in (b"1.10", b"1.0999", b"20", b"-3")]
    [True, False, True, False]
    >>> [json_number(integer=True).accepts(text) for text in (b"-0", b"3.0", b"3.5", b"1e5")]
    [True, True, False, False]
    """
    rules = []
    if integer:
        rules.append(_multiples(Fraction(1)))
    if multiple_of is not None:
        rules.append(_multiples(_exact(multiple_of)))
    for bound, allowed in (
        (minimum, (0, 1)),
        (exclusive_minimum, (1,)),
        (maximum, (-1, 0)),
        (exclusive_maximum, (-1,)),
    ):
        if bound is not None:
            rules.append(_compared(_exact(bound), allowed))
    if not rules and exponents:
        power = concat(byte_set(b"eE"), optional(byte_set(b"+-")), repeat(byte_set(_DIGITS), 1, None))
        return concat(decimal_number(), optional(power))
    return intersect(decimal_number(), *rules)


def _exact(number: Number) -> Fraction:
    decimal = Decimal(repr(number)) if isinstance(number, float) else number
    if isinstance(decimal, Decimal):
        if not decimal.is_finite():
            raise UnsupportedGrammar(f"{number} is not a finite number")
        if abs(decimal.adjusted()) > _MAX_DIGITS:
            raise UnsupportedGrammar(f"{number} has too many digits, at most {_MAX_DIGITS} can be compared")
    exact = Fraction(decimal)
    if max(abs(exact.numerator), exact.denominator) >= 10**_MAX_DIGITS:
        raise UnsupportedGrammar(f"a number has too many digits, at most {_MAX_DIGITS} can be compared")
    return exact


def _decimals(number: Fraction) -> int:
    """How many digits after the point write it exactly."""
    rest, twos, fives = number.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    if rest != 1:
        raise UnsupportedGrammar(f"{number} has no finite decimal expansion")
    return max(twos, fives)


class _Read(NamedTuple):
    """What of a number was read. order: how its digits so far compare with those of the bound (-1, 0, 1)."""

    sign: str = ""
    part: str = ""
    digits: int = 0
    order: int = 0


def _compared(bound: Fraction, allowed: tuple[int, ...]) -> ByteAutomaton:
    """Plain decimals whose comparison with `bound` (-1 less, 0 equal, 1 greater) is among `allowed`."""
    places = _decimals(bound)
    scaled = str(abs(int(bound * 10**places))).rjust(places + 1, "0")
    whole, fraction = scaled[: len(scaled) - places], scaled[len(scaled) - places :]
    dead = _Read("dead")

    def step(read: _Read) -> list[_Read]:
        minus, point = dead, dead
        if read == _Read():
            minus, read = _Read("-"), _Read("+", "whole")
        elif not read.part:
            read = _Read(read.sign, "whole")
        elif read.part == "whole":
            point = _Read(read.sign, "fraction", 0, so_far(read))
        return [dead, minus, point, *(after(read, digit) for digit in range(10))]

    def after(read: _Read, digit: int) -> _Read:
        bounding = whole if read.part == "whole" else fraction
        if read.part == "whole" and read.digits >= len(whole):
            return read._replace(digits=len(whole) + 1, order=1)
        if read.part == "fraction" and (read.order or read.digits >= len(fraction)):
            return read._replace(digits=len(fraction), order=read.order or min(digit, 1))
        here = int(bounding[read.digits])
        return read._replace(digits=read.digits + 1, order=read.order or (digit > here) - (digit < here))

    def so_far(read: _Read) -> int:
        longer = (read.digits > len(whole)) - (read.digits < len(whole))
        return longer or read.order

    def label(read: _Read) -> int:
        order = so_far(read) if read.part == "whole" else read.order
        missing = fraction if read.part == "whole" else fraction[read.digits :]
        return int(bool(read.part) and _signed(read.sign, order or -bool(missing), bound) in allowed)

    return minimal(explore(_Read(), dead, step, label, _CLASSES))


def _signed(sign: str, order: int, bound: Fraction) -> int:
    """How a number compares with the bound, when their magnitudes compare as `order` says."""
    if sign == "+":
        return order if bound >= 0 else 1
    return -order if bound <= 0 else -1


@lru_cache(maxsize=64)
def _multiples(step: Fraction) -> ByteAutomaton:
    """Plain decimals that are whole multiples of `step`, which is above 0."""
    if step <= 0:
        raise UnsupportedGrammar(f"multipleOf {step} is not above 0")
    places = _decimals(step)
    scaled = int(step * 10**places)
    zeros = 0
    while scaled % 10 == 0:
        scaled, zeros = scaled // 10, zeros + 1
    if not zeros:
        return _residues(scaled, places)
    if np.gcd(scaled % 10, 10) == 1 and zeros > 3:
        return intersect(_residues(scaled, 0), _ending_in_zeros(zeros))
    return _residues(scaled * 10**zeros, 0)


def _residues(modulus: int, places: int) -> ByteAutomaton:
    """Numbers whose value times 10**places is a whole multiple of `modulus`.

    A state is the remainder so far and how many places are still to come: -1 before the point.
    """
    if modulus > _MAX_RESIDUES or modulus * (places + 2) > MAX_STATES:
        shown = Fraction(modulus, 10**places)
        raise UnsupportedGrammar(f"too large: multiples of {shown} need more than {_MAX_RESIDUES} remainders")
    dead = (-2, 0)

    def step(key: tuple[int, int]) -> list[tuple[int, int]]:
        read, rest = key
        if read == places:
            return [dead, dead, dead, key, *[dead] * 9]
        nexts = [(max(read + 1, 0) if read >= 0 else -1, (rest * 10 + digit) % modulus) for digit in range(10)]
        return [dead, key if key == (-1, 0) else dead, (0, rest) if read < 0 else dead, *nexts]

    def label(key: tuple[int, int]) -> int:
        read, rest = key
        return int(rest * 10 ** (places - max(read, 0)) % modulus == 0)

    return minimal(explore((-1, 0), dead, step, label, _CLASSES))


def _ending_in_zeros(zeros: int) -> ByteAutomaton:
    """Whole numbers that are 0 or end in so many zeros, and any further zeros behind a point."""
    tail = optional(concat(literal(b"."), repeat(literal(b"0"), 1, None)))
    ending = concat(star(byte_set(_DIGITS)), literal(b"0" * zeros))
    return concat(optional(literal(b"-")), union(ending, literal(b"0")), tail)
