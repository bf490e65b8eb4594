"""Typed access to what a configuration file says; every complaint names the file, the key and the rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zllm_jax.config import ModelConfig
from zllm_jax.errors import BadCheckpoint, ConfigError

MAX_INTEGER = 1 << 31
MAX_LAYERS = 1024  # a bound on what a broken file can make us build; the deepest models have some 130


@dataclass(frozen=True)
class Fields:
    """`values` as read from `where`; `defaults` stand in for keys that are absent or null."""

    where: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        for source in (self.values, self.defaults):
            if source.get(key) is not None:
                return source[key]
        return default

    def bad(self, key: str, rule: str) -> BadCheckpoint:
        value = self.get(key)
        if value is None:
            return BadCheckpoint(f"{self.where}: {key} is missing; it {rule}")
        return BadCheckpoint(f"{self.where}: {key} is {_short(value)}; it {rule}")

    def integer(self, key: str, default: int | None = None, *, high: int = MAX_INTEGER) -> int:
        """A positive integer; a list must repeat one."""
        value = self.get(key, default)
        if isinstance(value, Sequence) and not isinstance(value, str) and value and len(set(map(repr, value))) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= high:
            raise self.bad(key, f"must be one positive integer up to {high:,}, the same for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.bad(key, "must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, "must be true or false")
        return value

    def token(self, key: str) -> int | None:
        """A token id, or None where there is none."""
        ids = self.tokens(key)
        return ids[0] if ids else None

    def tokens(self, key: str) -> tuple[int, ...]:
        """One token id or several."""
        value = self.get(key, [])
        ids = tuple(value) if isinstance(value, list) else (value,)
        if any(not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < MAX_INTEGER for item in ids):
            raise self.bad(key, "must be a token id or a list of them")
        return ids

    def layers(self, key: str) -> int:
        return self.integer(key, high=MAX_LAYERS)

    def refuse(self, key: str, feature: str, allowed: Sequence[Any] = ()) -> None:
        """Raise unless `key` is absent, null, zero, false or one of `allowed`."""
        value = self.get(key)
        if value and value not in allowed:
            raise self.bad(key, f"means {feature}, which is not supported")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def model_config(where: str, **numbers: Any) -> ModelConfig:
    """`ModelConfig(**numbers)` whose complaints are about the file."""
    try:
        return ModelConfig(**numbers)
    except ConfigError as error:
        raise BadCheckpoint(f"{where}: {error}") from error


def repeating_local_layers(num_layers: int, period: int) -> tuple[bool, ...]:
    """Every `period`-th layer is global: for 6, layers 5, 11, 17, ..."""
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))
