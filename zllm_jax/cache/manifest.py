"""What one snapshot consists of, as data: the manifest.

It is the line `zllm-snapshot <version> <sha256 of the rest>`, one line of JSON, and the token ids as little-endian i32.
It is the only metadata of a snapshot: which chunk files it needs and how long each is follow from it. It may come from
anywhere, so every number is checked before anything follows from it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zllm_jax.buffers import RowLayout, RowSpec
from zllm_jax.cache.snapshot_layout import FIXED, MAX_ARRAYS, MAX_STAGES, MAX_TOKENS, Piece, Stage, dtypes, stages_of

VERSION = 2
MAGIC = "zllm-snapshot"
MAX_JSON_BYTES = 4 << 20
MAX_MANIFEST_BYTES = 256 + MAX_JSON_BYTES + 4 * MAX_TOKENS
MAX_CHUNK_TOKENS = 1 << 16

_ID = re.compile(r"[0-9a-f]{32}")
_HEADER = re.compile(rb"zllm-snapshot (\d{1,9}) ([0-9a-f]{64})\n")


class BadManifest(ValueError):
    """The text is not a manifest that this version can trust. `unknown_version`: it may be fine for another one."""

    def __init__(self, message: str, *, unknown_version: bool = False) -> None:
        super().__init__(message)
        self.unknown_version = unknown_version


@dataclass(frozen=True)
class ChunkFile:
    """A chunk file, and its place: the stage, and the first row of its piece or FIXED."""

    name: str
    nbytes: int
    stage: int
    start: int


@dataclass(frozen=True, eq=False)
class Manifest:
    """A committed snapshot: it exists once this is on disk, and not before.

    tokens: i32[S]. pieces: they make [0, S). fixed: the file of each stage's fixed arrays, None for a stage without.
    """

    id: str
    namespace: str
    tenant: str
    created_s: float
    chunk_tokens: int
    layout: RowLayout
    pieces: tuple[Piece, ...]
    fixed: tuple[str | None, ...]
    meta: Mapping[str, Any]
    tokens: NDArray[np.int32]

    @property
    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.layout, self.chunk_tokens)

    def files(self) -> Iterator[ChunkFile]:
        """Every chunk file that it needs, as often as it is named."""
        stages = self.stages
        paged = [(index, stage.row_bytes) for index, stage in enumerate(stages) if stage.paged]
        for piece in self.pieces:
            for name, (index, row_bytes) in zip(piece.chunks, paged, strict=True):
                yield ChunkFile(name, piece.rows * row_bytes, index, piece.start)
        for index, (fixed, stage) in enumerate(zip(self.fixed, stages, strict=True)):
            if fixed is not None:
                yield ChunkFile(fixed, stage.fixed_bytes, index, FIXED)

    def chunks(self) -> dict[str, int]:
        """Name -> size in bytes of every chunk file. Raises BadManifest when one is said to have two sizes."""
        sizes: dict[str, int] = {}
        for file in self.files():
            if sizes.setdefault(file.name, file.nbytes) != file.nbytes:
                raise BadManifest(f"chunk {file.name} is said to have {file.nbytes} and {sizes[file.name]} bytes")
        return sizes

    def encode(self) -> bytes:
        """The manifest's bytes. Raises ValueError when `meta` is not JSON or makes it too large."""
        value = {
            "id": self.id,
            "namespace": self.namespace,
            "tenant": self.tenant,
            "created_s": self.created_s,
            "chunk_tokens": self.chunk_tokens,
            "num_tokens": len(self.tokens),
            "arrays": [
                {
                    "name": name,
                    "dtype": spec.dtype.name,
                    "shape": spec.shape,
                    "token_axis": spec.token_axis,
                    "stage": spec.stage,
                }
                for name, spec in sorted(self.layout.items())
            ],
            "pieces": [[piece.start, piece.stop, piece.rows, *piece.chunks] for piece in self.pieces],
            "fixed": self.fixed,
            "meta": dict(self.meta),
        }
        text = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        if len(text) > MAX_JSON_BYTES:
            raise ValueError(f"the manifest takes {len(text)} bytes, at most {MAX_JSON_BYTES}: meta is too large")
        return seal(text + b"\n" + self.tokens.astype("<i4", copy=False).tobytes())


def seal(body: bytes) -> bytes:
    """`body` with the header line that names format, version and checksum."""
    return f"{MAGIC} {VERSION} {hashlib.sha256(body).hexdigest()}\n".encode() + body


def valid_id(text: str) -> bool:
    """Whether `text` may be the name of a snapshot or of a chunk file."""
    return _ID.fullmatch(text) is not None


def parse(data: bytes) -> Manifest:
    """Check and read a manifest. Raises `BadManifest` for anything else than what `encode` writes."""
    header = _HEADER.match(data)
    if header is None:
        raise BadManifest("no header of a manifest")
    if int(header[1]) != VERSION:
        raise BadManifest(f"version {int(header[1])}, this program reads {VERSION}", unknown_version=True)
    body = memoryview(data)[header.end() :]
    if hashlib.sha256(body).hexdigest().encode() != header[2]:
        raise BadManifest("the manifest's checksum does not match")
    end = data.find(b"\n", header.end())
    if not 0 <= end - header.end() <= MAX_JSON_BYTES:
        raise BadManifest("no line of JSON, or too long a one")
    try:
        value = json.loads(data[header.end() : end])
    except (ValueError, RecursionError) as error:
        raise BadManifest(f"not JSON: {error!s:.200}") from None
    return _manifest(value, data[end + 1 :])


_FIELDS = (
    *(name for name in Manifest.__dataclass_fields__ if name not in ("tokens", "layout")),
    "num_tokens",
    "arrays",
)


def _manifest(value: Any, token_bytes: bytes) -> Manifest:
    fields = _fields(value, "manifest", _FIELDS)
    num_tokens = _integer(fields["num_tokens"], "num_tokens", 1, MAX_TOKENS)
    if len(token_bytes) != 4 * num_tokens:
        raise BadManifest(f"{len(token_bytes)} bytes of token ids, {num_tokens} tokens take {4 * num_tokens}")
    if int(np.frombuffer(token_bytes, "<i4").min()) < 0:
        raise BadManifest("a token id is negative")
    chunk_tokens = _integer(fields["chunk_tokens"], "chunk_tokens", 1, MAX_CHUNK_TOKENS)
    layout = _layout(fields["arrays"])
    try:
        stages = stages_of(layout, chunk_tokens)
    except ValueError as error:
        raise BadManifest(str(error)) from None
    created_s = fields["created_s"]
    if not isinstance(created_s, float) or not math.isfinite(created_s):
        raise BadManifest(f"created_s is {created_s!r:.40}, must be seconds")
    if not isinstance(fields["meta"], dict):
        raise BadManifest("meta is not an object")
    manifest = Manifest(
        id=_text(fields["id"], "id"),
        namespace=_text(fields["namespace"], "namespace"),
        tenant=_text(fields["tenant"], "tenant"),
        created_s=created_s,
        chunk_tokens=chunk_tokens,
        layout=layout,
        pieces=_pieces(fields["pieces"], num_tokens, chunk_tokens, sum(bool(stage.paged) for stage in stages)),
        fixed=_fixed(fields["fixed"], stages),
        meta=fields["meta"],
        tokens=np.frombuffer(token_bytes, "<i4").astype(np.int32, copy=False),
    )
    manifest.chunks()
    return manifest


def _layout(value: Any) -> dict[str, RowSpec]:
    if not isinstance(value, list) or len(value) > MAX_ARRAYS:
        raise BadManifest(f"arrays must be a list of at most {MAX_ARRAYS}")
    layout = {}
    for item in value:
        fields = _fields(item, "array", ("name", "dtype", "shape", "token_axis", "stage"))
        name = _text(fields["name"], "name")
        dtype = dtypes().get(_text(fields["dtype"], "dtype"))
        if dtype is None:
            raise BadManifest(f"{name:.80}: unknown dtype {fields['dtype']!r:.40}")
        sizes = fields["shape"]
        if not isinstance(sizes, list) or len(sizes) > 16:
            raise BadManifest(f"{name:.80}: shape is {sizes!r:.80}")
        shape = tuple(None if size is None else _integer(size, f"{name:.80}: shape", 1, 1 << 40) for size in sizes)
        axis = fields["token_axis"]
        if axis is not None:
            axis = _integer(axis, f"{name:.80}: token_axis", 0, len(shape) - 1)
        stage = _integer(fields["stage"], f"{name:.80}: stage", 0, MAX_STAGES - 1)
        if name in layout:
            raise BadManifest(f"two arrays are named {name:.80}")
        layout[name] = RowSpec(dtype, shape, axis, stage)
    return layout


def _pieces(value: Any, num_tokens: int, chunk_tokens: int, files: int) -> tuple[Piece, ...]:
    if not isinstance(value, list):
        raise BadManifest("pieces is not a list")
    found = []
    start = 0
    for item in value:
        if not isinstance(item, list) or len(item) != 3 + files:
            raise BadManifest(f"a piece must be [start, stop, rows, {files} names]")
        _integer(item[0], "a piece's start", start, start)
        window_end = start - start % chunk_tokens + chunk_tokens
        stop = _integer(item[1], "a piece's stop", start + 1, min(window_end, num_tokens))
        rows = _integer(item[2], "a piece's rows", stop - start, window_end - start)
        found.append(Piece(start, stop, rows, tuple(_chunk(name) for name in item[3:])))
        start = stop
    if start != num_tokens:
        raise BadManifest(f"the pieces hold {start} of {num_tokens} tokens")
    return tuple(found)


def _fixed(value: Any, stages: tuple[Stage, ...]) -> tuple[str | None, ...]:
    if not isinstance(value, list) or len(value) != len(stages):
        raise BadManifest(f"fixed must be a list of {len(stages)}, one a stage")
    for name, stage in zip(value, stages, strict=True):
        if (name is None) != (not stage.fixed):
            raise BadManifest("fixed must name a file for each stage that has fixed arrays, and for no other")
    return tuple(None if name is None else _chunk(name) for name in value)


def _fields(value: Any, what: str, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != set(names):
        raise BadManifest(f"the {what} must have exactly the fields {', '.join(names)}")
    return value


def _integer(value: Any, name: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise BadManifest(f"{name} is {value!r:.40}, must be an integer in [{low}, {high}]")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadManifest(f"{name} is {value!r:.40}, must be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadManifest(f"{name} is {value!r:.40}, which is no Unicode text") from None
    return value


def _chunk(value: Any) -> str:
    if not isinstance(value, str) or not valid_id(value):
        raise BadManifest(f"{value!r:.40} is no name of a chunk")
    return value
