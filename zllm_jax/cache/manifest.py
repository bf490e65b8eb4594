"""What one snapshot consists of, as data: the manifest, and how arrays are cut into chunk files.

A manifest is two lines: `zllm-snapshot <version> <sha256 of the rest>`, then one JSON object. It is the only metadata
of a snapshot: sizes, dtypes and digests of every file follow from it, and nothing in it is used as a path unchecked.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import ml_dtypes
import numpy as np

VERSION = 1
MAGIC = "zllm-snapshot"
MAX_MANIFEST_BYTES = 8 << 20
MAX_TOKENS = 1 << 24
MAX_ELEMENTS = 1 << 40
MAX_CHUNK_BYTES = 64 << 20
PLAIN_CHUNK_BYTES = 8 << 20  # of an array without a token axis

MANIFEST_FILE = "manifest"
TOKENS = "tokens"  # the array of the token ids

Codec = Literal["raw", "blosc-lz4", "blosc-zstd"]
CODECS: tuple[Codec, ...] = ("raw", "blosc-lz4", "blosc-zstd")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_HEADER = re.compile(rb"zllm-snapshot (\d{1,9}) ([0-9a-f]{64})\n")


class BadManifest(ValueError):
    """The text is not a manifest that this version can trust. `unknown_version`: it may be fine for another one."""

    def __init__(self, message: str, *, unknown_version: bool = False) -> None:
        super().__init__(message)
        self.unknown_version = unknown_version


@cache
def dtypes() -> Mapping[str, np.dtype[Any]]:
    """The element types that a snapshot may hold, by name."""
    plain = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    floats = ("float16", "float32", "float64")
    small = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    return {dtype.name: dtype for dtype in map(np.dtype, (*plain, *floats, *small))}


@dataclass(frozen=True)
class Chunk:
    """One chunk file: its size on disk and the xxh3-128 of the rows in it (before compression)."""

    nbytes: int
    digest: str


@dataclass(frozen=True)
class Span:
    """The rows [start, stop) of an array and the file that holds them."""

    start: int
    stop: int
    part: str
    file: str


@dataclass(frozen=True)
class Grid:
    """An array seen as u8[lead, rows, width] and cut along its rows; a chunk holds all of `lead` and `width`.

    With a token axis a row is what one token keeps below one leading index. f32[30, 3, 2000, 64] with token_axis=2
    is u8[90, 2000, 256]; in chunks of 256 rows that is 7 full files in part `0` and one of 208 rows in part `1792`:
    no file holds padding, and whole chunks begin at multiples of chunk_rows, whatever comes after them.
    """

    lead: int
    rows: int
    width: int
    chunk_rows: int

    @classmethod
    def of(cls, shape: tuple[int, ...], itemsize: int, token_axis: int | None, chunk_tokens: int) -> Grid:
        if token_axis is None:
            return cls(1, math.prod(shape) * itemsize, 1, PLAIN_CHUNK_BYTES)
        lead = math.prod(shape[:token_axis])
        width = math.prod(shape[token_axis + 1 :]) * itemsize
        return cls(lead, shape[token_axis], width, max(1, min(chunk_tokens, MAX_CHUNK_BYTES // (lead * width))))

    def spans(self, start: int = 0, stop: int | None = None) -> Iterator[Span]:
        """The chunks with a row of [start, stop) in them, in order; chunk i begins at row i * chunk_rows."""
        tail = self.rows - self.rows % self.chunk_rows
        stop = self.rows if stop is None else min(stop, self.rows)
        for begin in range(start - start % self.chunk_rows, stop, self.chunk_rows):
            first = 0 if begin < tail else tail
            index = (begin - first) // self.chunk_rows
            yield Span(begin, min(begin + self.chunk_rows, self.rows), str(first), f"c.0.{index}.0")

    def nbytes(self, span: Span) -> int:
        return self.lead * (span.stop - span.start) * self.width

    def __len__(self) -> int:
        return -(-self.rows // self.chunk_rows)


@dataclass(frozen=True)
class ArrayEntry:
    """One array of a snapshot."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    token_axis: int | None
    chunks: tuple[Chunk, ...]

    @property
    def layout(self) -> tuple[int | None, ...]:
        """The shape, with None in place of the number of tokens."""
        return tuple(None if axis == self.token_axis else size for axis, size in enumerate(self.shape))

    def grid(self, chunk_tokens: int) -> Grid:
        return Grid.of(self.shape, self.dtype.itemsize, self.token_axis, chunk_tokens)


@dataclass(frozen=True)
class Manifest:
    """A committed snapshot: it exists once this is on disk, and not before. The first array is the token ids."""

    id: str
    namespace: str
    created_s: float
    codec: Codec
    chunk_tokens: int
    arrays: tuple[ArrayEntry, ...]
    meta: Mapping[str, Any]

    @property
    def tokens(self) -> ArrayEntry:
        """i32[S]"""
        return self.arrays[0]

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    def files(self) -> dict[str, int]:
        """Path below the snapshot's folder -> size in bytes, of every file but the manifest."""
        sizes = {}
        for array in self.arrays:
            for span, chunk in zip(array.grid(self.chunk_tokens).spans(), array.chunks, strict=True):
                sizes[chunk_path(array.name, span)] = chunk.nbytes
        return sizes

    def encode(self) -> bytes:
        """The manifest's text. Raises ValueError when `meta` is not JSON or makes it too large."""
        value = {
            "id": self.id,
            "namespace": self.namespace,
            "created_s": self.created_s,
            "codec": self.codec,
            "chunk_tokens": self.chunk_tokens,
            "arrays": [
                {
                    "name": array.name,
                    "dtype": array.dtype.name,
                    "shape": array.shape,
                    "token_axis": array.token_axis,
                    "chunks": [[chunk.nbytes, chunk.digest] for chunk in array.chunks],
                }
                for array in self.arrays
            ],
            "meta": dict(self.meta),
        }
        text = seal(json.dumps(value, allow_nan=False).encode())
        if len(text) > MAX_MANIFEST_BYTES:
            raise ValueError(f"the manifest takes {len(text)} bytes, at most {MAX_MANIFEST_BYTES}: meta is too large")
        return text


def part_dir(name: str, span: Span) -> str:
    return f"{name}@{span.part}"


def chunk_path(name: str, span: Span) -> str:
    return f"{part_dir(name, span)}/{span.file}"


def valid_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def seal(body: bytes) -> bytes:
    """`body` with the header line that names format, version and checksum."""
    return f"{MAGIC} {VERSION} {hashlib.sha256(body).hexdigest()}\n".encode() + body


def parse(text: bytes) -> Manifest:
    """Check and read a manifest. Raises `BadManifest` for anything else than what `encode` writes."""
    header = _HEADER.match(text)
    if header is None:
        raise BadManifest("no header of a manifest")
    if int(header[1]) != VERSION:
        raise BadManifest(f"version {int(header[1])}, this program reads {VERSION}", unknown_version=True)
    body = text[header.end() :]
    if hashlib.sha256(body).hexdigest().encode() != header[2]:
        raise BadManifest("the manifest's checksum does not match")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadManifest(f"not JSON: {error}") from None
    return _manifest(value)


def _manifest(value: Any) -> Manifest:
    fields = _fields(value, "manifest", Manifest.__dataclass_fields__)
    codec = fields["codec"]
    if codec not in CODECS:
        raise BadManifest(f"codec is {codec!r}, must be one of {', '.join(CODECS)}")
    chunk_tokens = _integer(fields["chunk_tokens"], "chunk_tokens", 1, MAX_TOKENS)
    items = fields["arrays"]
    if not isinstance(items, list):
        raise BadManifest("arrays is not a list")
    arrays = tuple(_array(item, chunk_tokens, codec) for item in items)
    if not arrays or not _is_tokens(arrays[0]):
        raise BadManifest(f"the first array must be {TOKENS}, i32[S] with S at most {MAX_TOKENS}")
    for array in arrays:
        if array.token_axis is not None and array.shape[array.token_axis] != arrays[0].shape[0]:
            raise BadManifest(f"{array.name}: axis {array.token_axis} of {array.shape} is not the tokens")
    if len({array.name for array in arrays}) != len(arrays):
        raise BadManifest("two arrays have the same name")
    created_s = fields["created_s"]
    if not isinstance(created_s, float) or not math.isfinite(created_s):
        raise BadManifest(f"created_s is {created_s!r}, must be seconds")
    if not isinstance(fields["meta"], dict):
        raise BadManifest("meta is not an object")
    return Manifest(
        id=_text(fields["id"], "id"),
        namespace=_text(fields["namespace"], "namespace"),
        created_s=created_s,
        codec=cast(Codec, codec),
        chunk_tokens=chunk_tokens,
        arrays=arrays,
        meta=fields["meta"],
    )


def _is_tokens(array: ArrayEntry) -> bool:
    ids = array.name == TOKENS and array.dtype == np.int32 and array.token_axis is None and len(array.shape) == 1
    return ids and array.shape[0] <= MAX_TOKENS


def _array(value: Any, chunk_tokens: int, codec: str) -> ArrayEntry:
    fields = _fields(value, "array", ArrayEntry.__dataclass_fields__)
    name = _text(fields["name"], "name")
    if not valid_name(name):
        raise BadManifest(f"{name!r} is no array name")
    dtype = dtypes().get(_text(fields["dtype"], "dtype"))
    if dtype is None:
        raise BadManifest(f"{name}: unknown dtype {fields['dtype']!r}")
    if not isinstance(fields["shape"], list) or len(fields["shape"]) > 16:
        raise BadManifest(f"{name}: shape is {fields['shape']!r:.80}")
    shape = tuple(_integer(size, f"{name}: shape", 1, MAX_ELEMENTS) for size in fields["shape"])
    if math.prod(shape) > MAX_ELEMENTS:
        raise BadManifest(f"{name}: shape {shape} has more than {MAX_ELEMENTS} elements")
    axis = fields["token_axis"]
    if axis is not None:
        axis = _integer(axis, f"{name}: token_axis", 0, len(shape) - 1)
    grid = Grid.of(shape, dtype.itemsize, axis, chunk_tokens)
    items = fields["chunks"]
    if not isinstance(items, list) or len(items) != len(grid):
        raise BadManifest(f"{name}: shape {shape} takes {len(grid)} chunks")
    chunks = tuple(_chunk(item, name, grid.nbytes(span), codec) for item, span in zip(items, grid.spans(), strict=True))
    return ArrayEntry(name, dtype, shape, axis, chunks)


def _chunk(value: Any, name: str, nbytes: int, codec: str) -> Chunk:
    if not isinstance(value, list) or len(value) != 2:
        raise BadManifest(f"{name}: a chunk is [size, digest]")
    # An incompressible blosc frame is its content, a header and the checksum.
    low, high = (nbytes, nbytes) if codec == "raw" else (1, nbytes + nbytes // 64 + 1024)
    return Chunk(_integer(value[0], f"{name}: chunk size", low, high), _digest(value[1]))


def _fields(value: Any, what: str, names: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != names.keys():
        raise BadManifest(f"the {what} must have exactly the fields {', '.join(names)}")
    return value


def _integer(value: Any, name: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise BadManifest(f"{name} is {value!r:.40}, must be an integer in [{low}, {high}]")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadManifest(f"{name} is {value!r:.40}, must be text")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise BadManifest(f"{value!r:.40} is no digest")
    return value
