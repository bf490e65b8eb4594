"""results.json: what was measured, where, and whether the checks held."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zllm_jax.errors import ConfigError

FILE_NAME = "results.json"


@dataclass(frozen=True)
class Check:
    """A statement that must hold; `detail` says by how much it did or where it failed."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Results:
    """One run of an experiment. Rows and summary carry their units in the names."""

    experiment: str
    title: str
    claim: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    checks: Sequence[Check]
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain data. Numbers that are not finite become null: JSON has no others."""
        return dict(_finite(dataclasses.asdict(self)))

    def save(self, folder: Path) -> Path:
        """Write `folder/results.json` atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        text = json.dumps(self.to_json(), indent=1, allow_nan=False)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
        return path


def load_results(folder: str | Path) -> Results:
    """Read `folder/results.json`. Raises `ConfigError` when it is absent or is not one."""
    path = Path(folder) / FILE_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        checks = tuple(Check(**check) for check in data.pop("checks"))
        return Results(**data, checks=checks)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give the folder of a finished run") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not the results of an experiment: {error!r}") from None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
