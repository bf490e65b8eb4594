"""The header of a safetensors file: eight bytes of length, then JSON with dtype, shape and offsets of each tensor.

Read here rather than with the `safetensors` package so that a file's errors name the tensor, and so that rows can be
read without mapping the file. Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from zllm_jax.checkpoint.encodings import ENCODINGS, Extent
from zllm_jax.checkpoint.jsonfile import parse_json
from zllm_jax.errors import BadCheckpoint

MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def read_tensors(path: Path) -> dict[str, Extent]:
    """Where each tensor of `path` lies. Raises `BadCheckpoint` that names the tensor and the rule."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise BadCheckpoint(f"{path}: the header should have {length:,} bytes, the file has {size:,}")
            header = parse_json(file.read(length))
    except OSError as error:
        raise BadCheckpoint(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadCheckpoint(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise BadCheckpoint(f"{path}: the header must be a JSON object, got {type(header).__name__}")
    data = 8 + length
    return {name: _extent(path, name, entry, data, size) for name, entry in header.items() if name != "__metadata__"}


def _extent(path: Path, name: str, entry: Any, data: int, size: int) -> Extent:
    def bad(what: str) -> BadCheckpoint:
        return BadCheckpoint(f"{path}: tensor {name} {what}", tensor=name)

    if not isinstance(entry, dict):
        raise bad("has no description")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise bad(f"has shape {shape!r} and data_offsets {offsets!r}; both must be lists of sizes")
    encoding = ENCODINGS.get(str(entry.get("dtype")))
    if encoding is None or encoding.plain is None:
        raise bad(f"has dtype {entry.get('dtype')!r}; F32, F16 and BF16 are read")
    if not 1 <= len(shape) <= 4 or 0 in shape:
        return Extent(name, path, data, (1,), encoding)  # scalars and empty tensors are never parameters
    extent = Extent(name, path, data + offsets[0], tuple(shape), encoding)
    if offsets[1] - offsets[0] != extent.num_bytes:
        raise bad(f"of {extent.num_bytes:,} bytes is said to lie at bytes {offsets[0]:,} to {offsets[1]:,}")
    if data + offsets[1] > size:
        raise bad(f"ends at byte {data + offsets[1]:,}, but the file is truncated at {size:,}")
    return extent


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
