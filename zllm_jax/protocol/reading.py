"""Taking a body's members apart: each is of its type or refused by its name; null is as good as absent."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from zllm_jax.errors import InvalidRequest

Json = dict[str, Any]
T = TypeVar("T")
D = TypeVar("D")


def members(value: Any, param: str) -> Json:
    """What an object has, without what is null. `param` is its name; empty for the body itself."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param or 'the body'} must be a JSON object, got {kind(value)}", param=param or None)
    return {name: one for name, one in value.items() if one is not None}


def refuse_unless_neutral(param: str, value: Any, neutral: Sequence[Any]) -> None:
    """neutral: the values that ask for nothing."""
    if value not in neutral:
        allowed = "".join(f", or send {choice!r}" for choice in neutral)
        raise InvalidRequest(
            f"{param} is {reprlib.repr(value)}, which is not supported: leave it out{allowed}", param=param
        )


def refuse_unsupported(
    given: Mapping[str, Any], *, known: Collection[str], neutral: Mapping[str, Sequence[Any]]
) -> None:
    """known: parameters that act or are hints. neutral: those without an implementation, with what asks for nothing."""
    for name, value in given.items():
        if name in neutral:
            refuse_unless_neutral(name, value, neutral[name])
        elif name not in known:
            raise InvalidRequest(f"unknown parameter {reprlib.repr(name)}", param=name)


def only(given: Mapping[str, Any], known: Collection[str], param: str) -> None:
    """Raises where an object has a member that is not known. `param` is the object's name."""
    for name in given:
        if name not in known:
            raise InvalidRequest(f"{param}.{name} is not supported", param=f"{param}.{name}")


def required(given: Mapping[str, Any], name: str, of: type[T], *, prefix: str = "") -> T:
    value = typed(given, name, of, None, prefix=prefix)
    if value is None:
        raise InvalidRequest(f"{prefix}{name} is missing", param=prefix + name)
    return value


def typed(given: Mapping[str, Any], name: str, of: type[T], default: D, *, prefix: str = "") -> T | D:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, of):
        raise InvalidRequest(f"{prefix}{name} must be {_KIND_NAMES[of]}, got {kind(value)}", param=prefix + name)
    return value


_KIND_NAMES: Mapping[type, str] = {
    str: "a text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def kind(value: Any) -> str:
    return _KIND_NAMES.get(type(value), type(value).__name__)
