"""The header of a GGUF file: metadata and where each tensor lies. Little-endian versions 2 and 3.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every length is held against the file's size before
it is believed, so that a broken or hostile file costs neither memory nor time. (The `gguf` package's own reader makes
several arrays for each vocabulary entry: 15 s for Gemma's 262,144.)
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zllm_jax.checkpoint.encodings import BY_GGML_ID, Extent
from zllm_jax.errors import BadCheckpoint

MAGIC = b"GGUF"
_NUMBERS: dict[int, np.dtype[Any]] = {  # GGUF's value types
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_ARRAY = 1 << 23  # entries; the largest vocabularies have 2**18


@dataclass(frozen=True)
class GgufHeader:
    """metadata: key -> number, bool, text or list of those. tensors: by the file's own names."""

    metadata: dict[str, Any]
    tensors: dict[str, Extent]


def read_header(path: Path) -> GgufHeader:
    """Parse and check the header of `path`. Raises `BadCheckpoint` that names the key or tensor and the rule."""
    with path.open("rb") as file:
        if path.stat().st_size < 24 or file.read(4) != MAGIC:
            raise BadCheckpoint(f"{path} is not a GGUF file: it must begin with {MAGIC!r} and a 20-byte header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = len(MAGIC)

    def bad(self, what: str, tensor: str | None = None) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path}: {what}", tensor=tensor)

    def header(self) -> GgufHeader:
        version = self.number("I", "the version")
        if version not in (2, 3):
            swapped = version == version & 0xFF000000
            reason = "is big-endian" if swapped else f"has GGUF version {version}"
            raise self.bad(f"the file {reason}; little-endian versions 2 and 3 are read")
        num_tensors = self.number("Q", "the number of tensors")
        num_keys = self.number("Q", "the number of metadata keys")
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = self.text(f"the name of metadata key {index}")
            if key in metadata:
                raise self.bad(f"metadata key {key} occurs twice")
            metadata[key] = self.value(key)
        return GgufHeader(metadata, self.tensors(num_tensors, metadata))

    def tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, Extent]:
        found: dict[str, Extent] = {}
        for index in range(count):
            extent = self.tensor(index)
            if extent.name in found:
                raise self.bad(f"tensor {extent.name} occurs twice", extent.name)
            found[extent.name] = extent
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.bad(f"general.alignment is {alignment!r}, must be a power of two")
        start = -(-self.pos // alignment) * alignment
        for extent in found.values():
            if (end := start + extent.offset + extent.num_bytes) > self.size:
                raise self.bad(
                    f"the file is truncated: tensor {extent.name} ends at byte {end:,}, the file at {self.size:,}",
                    extent.name,
                )
        return {
            name: Extent(name, self.path, start + extent.offset, extent.shape, extent.encoding)
            for name, extent in found.items()
        }

    def tensor(self, index: int) -> Extent:
        """One entry of the tensor table; its offset still counts from the start of the data."""
        name = self.text(f"the name of tensor {index}")
        num_dims = self.number("I", name)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self.bad(f"tensor {name} has {num_dims} dimensions, must have 1 to {_MAX_DIMS}", name)
        shape = tuple(self.number("Q", name) for _ in range(num_dims))[::-1]  # the file counts from the innermost
        if 0 in shape:
            raise self.bad(f"tensor {name} has shape {list(shape)}: every dimension must be positive", name)
        kind = self.number("I", name)
        if (encoding := BY_GGML_ID.get(kind)) is None:
            known = ", ".join(encoding.name for encoding in BY_GGML_ID.values())
            raise self.bad(f"tensor {name} is of type {_type_name(kind)}; the types read are {known}", name)
        if shape[-1] % encoding.block_len:
            raise self.bad(
                f"tensor {name}: rows of {shape[-1]} are no whole number of {encoding.name} blocks "
                f"of {encoding.block_len}",
                name,
            )
        return Extent(name, self.path, self.number("Q", name), shape, encoding)

    def take(self, count: int, what: str) -> int:
        """Step over `count` bytes and return where they begin."""
        start = self.pos
        if count > self.size - start:
            raise self.bad(
                f"the file is truncated: {what} needs {count:,} bytes at byte {start:,}, the file ends at {self.size:,}"
            )
        self.pos += count
        return start

    def number(self, code: str, what: str) -> int:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self.data, self.take(layout.size, what))
        return int(value)

    def text(self, what: str) -> str:
        (value,) = self.texts(1, what)
        return value

    def texts(self, count: int, what: str) -> list[str]:
        """`count` strings. Written for speed: vocabularies have hundreds of thousands."""
        data, size, position = self.data, self.size, self.pos
        unpack: Callable[[Any, int], tuple[int]] = struct.Struct("<Q").unpack_from
        values: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > size:
                    raise self.bad(f"the file is truncated inside {what}: a text ends at byte {position:,} of {size:,}")
                values.append(str(data[start:position], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.bad(f"{what} holds a text that is not UTF-8: {error}") from error
        except struct.error as error:
            raise self.bad(f"the file is truncated inside {what}, at byte {size:,}") from error
        self.pos = position
        return values

    def value(self, key: str) -> Any:
        kind = self.number("I", key)
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            return self.array(key)
        return self.numbers(kind, 1, key)[0]

    def array(self, key: str) -> list[Any]:
        kind = self.number("I", key)
        count = self.number("Q", key)
        if count > _MAX_ARRAY:
            raise self.bad(f"metadata key {key} is an array of {count:,} entries; at most {_MAX_ARRAY:,} are read")
        return self.texts(count, key) if kind == _STRING else self.numbers(kind, count, key)

    def numbers(self, kind: int, count: int, key: str) -> list[Any]:
        if (dtype := _NUMBERS.get(kind)) is None:
            raise self.bad(f"metadata key {key} has value type {kind}, which GGUF does not define or we do not read")
        start = self.take(count * dtype.itemsize, key)
        values: list[Any] = np.frombuffer(self.data[start : self.pos], dtype).tolist()
        return values


def _type_name(kind: int) -> str:
    import gguf

    try:
        return gguf.GGMLQuantizationType(kind).name
    except ValueError:
        return f"number {kind}"
