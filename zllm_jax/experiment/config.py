"""An experiment file: YAML on disk -> frozen values, with every unknown key refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from zllm_jax.config import EngineConfig
from zllm_jax.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One claim and how it is measured.

    experiment: the kind, which decides what `settings` may hold. model: a known name, a directory or a file.
    engine: the engine's configuration. quick: whether the file's `quick` part was laid over the rest.
    """

    experiment: str
    title: str
    claim: str
    model: str = "smollm2-135m"
    engine: EngineConfig = field(default_factory=EngineConfig)
    settings: Any = None
    quick: bool = False


def load_config(
    path: str | Path,
    settings_types: Mapping[str, type],
    *,
    overrides: Sequence[str] = (),
    quick: bool = False,
) -> ExperimentConfig:
    """Read an experiment file.

    settings_types: kind name -> frozen dataclass of its settings. overrides: `key.path=value` texts, values in YAML.
    quick: lay the file's `quick` mapping over the rest first. Raises `ConfigError` naming the key.
    """
    path = Path(path)
    document = read_mapping(path)
    quick_part = document.pop("quick", {})
    if quick:
        document = merged(document, _mapping(quick_part, "quick"))
    for text in overrides:
        document = merged(document, parse_override(text))

    kind = document.get("experiment")
    if not isinstance(kind, str) or kind not in settings_types:
        raise ConfigError(
            f"{path.name}: experiment is {kind!r}, must be one of {', '.join(sorted(settings_types))}"
            + _nearest(str(kind), settings_types)
        )
    settings: Any = from_mapping(settings_types[kind], document.pop("settings", {}), "settings")
    config = from_mapping(ExperimentConfig, document, "")
    return dataclasses.replace(config, settings=settings, quick=quick)


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=[1, 2]` -> `{"a": {"b": [1, 2]}}`."""
    key, equals, value = text.partition("=")
    if not equals or not all(part.isidentifier() for part in key.strip().split(".")):
        raise ConfigError(f"--set {text!r}: must be key.path=value, for example settings.repetitions=3")
    try:
        tree: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text!r}: the value is not YAML ({_one_line(error)})") from None
    for part in reversed(key.strip().split(".")):
        tree = {part: tree}
    return dict(tree)


def from_mapping(cls: type[T], data: Any, where: str) -> T:
    """Build the dataclass `cls` from plain data. `where` is the key path so far, for the messages."""
    data = _mapping(data, where)
    hints = get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            raise ConfigError(
                f"{_join(where, key)}: unknown key{_nearest(str(key), known)}; known: {', '.join(sorted(known))}"
            )
    values = {key: _convert(hints[key], value, _join(where, key)) for key, value in data.items()}
    for name, f in known.items():
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and name not in values:
            raise ConfigError(f"{_join(where, name)}: is missing")
    return cls(**values)


def to_mapping(value: Any) -> Any:
    """The inverse of `from_mapping`: plain JSON-able data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_mapping(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [to_mapping(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _convert(inner, value, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} is {value!r}, must be one of {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} is {value!r}, must be a list")
        return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return from_mapping(hint, value, where)  # type: ignore[arg-type]
    if hint is Path:
        return Path(_scalar(str, value, where)).expanduser()
    return _scalar(hint, value, where)


def _scalar(hint: type, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)  # a text too: YAML 1.1 takes 1e-3, without a point, for one
    if isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    raise ConfigError(f"{where} is {value!r}, must be {names.get(hint, hint.__name__)}")


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file of keys and values. Raises `ConfigError` naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        return dict(_mapping(yaml.safe_load(text), path.name))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_one_line(error)}") from None


def merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """`high` laid over `low`, mapping by mapping; other values are replaced whole."""
    result = dict(low)
    for key, value in high.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where or 'the file'} must hold keys and values, got {type(value).__name__}")
    return value


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _nearest(key: str, known: Any) -> str:
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
