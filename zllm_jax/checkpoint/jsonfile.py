"""Reading the small JSON files of a checkpoint, which may come from anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zllm_jax.errors import BadCheckpoint

MAX_JSON_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises `BadCheckpoint` that names the file when it is missing, huge or no JSON object."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise BadCheckpoint(f"{path} has {size:,} bytes; at most {MAX_JSON_BYTES:,} are read")
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise BadCheckpoint(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadCheckpoint(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def parse_json(data: bytes) -> Any:
    """`json.loads` whose every failure, too deep nesting included, is a `ValueError`."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
