"""How numbers lie in a file: plain floats, and GGUF's blocks of small integers with a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from zllm_jax.errors import BadCheckpoint


@dataclass(frozen=True)
class Encoding:
    """`block_bytes` bytes hold `block_len` numbers. ggml_id: GGUF's number of this type."""

    name: str
    ggml_id: int
    block_len: int
    block_bytes: int
    plain: type[np.generic] | None = None  # numpy's type where no decoding is needed


ENCODINGS = {
    encoding.name: encoding
    for encoding in (
        Encoding("F32", 0, 1, 4, np.float32),
        Encoding("F16", 1, 1, 2, np.float16),
        Encoding("BF16", 30, 1, 2, ml_dtypes.bfloat16),
        Encoding("Q4_0", 2, 32, 18),
        Encoding("Q4_1", 3, 32, 20),
        Encoding("Q5_0", 6, 32, 22),
        Encoding("Q8_0", 8, 32, 34),
        Encoding("Q4_K", 12, 256, 144),
        Encoding("Q6_K", 14, 256, 210),
    )
}
BY_GGML_ID = {encoding.ggml_id: encoding for encoding in ENCODINGS.values()}


@dataclass(frozen=True)
class Extent:
    """Where one tensor lies: `shape` outermost first, from byte `offset` of `path` on."""

    name: str
    path: Path
    offset: int
    shape: tuple[int, ...]
    encoding: Encoding

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.encoding.block_len * self.encoding.block_bytes

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as [stop - start, shape[-1]], f32 or the file's own float type."""
        count = (stop - start) * self.row_bytes
        raw = np.fromfile(self.path, np.uint8, count, offset=self.offset + start * self.row_bytes)
        if raw.size != count:
            raise BadCheckpoint(f"{self.path} became shorter while {self.name} was read", tensor=self.name)
        rows = raw.reshape(stop - start, self.row_bytes)
        return rows.view(self.encoding.plain) if self.encoding.plain else _dequantize(rows, self.encoding)


def _dequantize(rows: np.ndarray, encoding: Encoding) -> np.ndarray:
    import gguf  # 0.2 s: only for files that need it

    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(encoding.ggml_id))
