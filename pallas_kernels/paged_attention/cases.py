"""Named shapes for tests, bench and notebook, and inputs for them in which every byte nobody owns is NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape. `small` ones are for the interpreter too; the others are real models' decode steps."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tokens_per_page: int
    lengths: tuple[int, ...]
    window: int | None = None
    dtype: str = "float32"
    small: bool = True

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def bytes_moved(self) -> int:
        """Least traffic of HBM: the rows that are seen, once, and queries and outputs."""
        itemsize = 4 if self.dtype == "float32" else 2
        seen = sum(min(length, self.window or length) for length in self.lengths)
        queries = len(self.lengths) * self.num_heads
        return 2 * itemsize * self.head_dim * (seen * self.num_kv_heads + queries)

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        """Arguments of `paged_attention` as numpy arrays. Pages are scattered; unowned page ids are out of range."""
        rng = np.random.default_rng(seed)
        dtype = np.float32 if self.dtype == "float32" else bfloat16
        B, C = len(self.lengths), self.tokens_per_page
        owned = [-(-length // C) for length in self.lengths]
        M, P = max(owned) + 1, sum(owned) + 2
        page_table = rng.choice([-1, P, 2**31 - 1], (B, M)).astype(np.int32)
        free = rng.permutation(P)
        pools = np.full((2, P, self.num_kv_heads, C, self.head_dim), np.nan, np.float32)
        for row, (length, count) in enumerate(zip(self.lengths, owned, strict=True)):
            pages, free = free[:count], free[count:]
            page_table[row, :count] = pages
            for index, page in enumerate(pages):
                rows = min(C, length - index * C)
                pools[:, page, :, :rows] = rng.standard_normal((2, self.num_kv_heads, rows, self.head_dim))
        # Scores of deviation 3 make a softmax with a few large weights, as trained models have, which a wrong scale
        # visibly moves; plain normal inputs would average all values and hide it.
        q = 3 * rng.standard_normal((B, self.num_heads, self.head_dim))
        return {
            "q": q.astype(dtype),
            "k_pool": pools[0].astype(dtype),
            "v_pool": pools[1].astype(dtype),
            "page_table": page_table,
            "lengths": np.array(self.lengths, np.int32),
            "scale": self.scale,
            "window": self.window,
        }


def _both(**shape: Any) -> tuple[Case, ...]:
    name = shape.pop("name")
    return tuple(Case(name=f"{name}_{dtype}", dtype=dtype, **shape) for dtype in ("float32", "bfloat16"))


CASES: tuple[Case, ...] = (
    *_both(name="ragged_h64", num_heads=9, num_kv_heads=3, head_dim=64, tokens_per_page=16, lengths=(1, 17, 0, 48)),
    *_both(name="many_tiles_h128", num_heads=8, num_kv_heads=2, head_dim=128, tokens_per_page=256, lengths=(1300, 512)),
    *_both(name="one_kv_head_h256", num_heads=4, num_kv_heads=1, head_dim=256, tokens_per_page=32, lengths=(65, 31)),
    *_both(name="no_groups", num_heads=2, num_kv_heads=2, head_dim=128, tokens_per_page=16, lengths=(16, 15, 33)),
    *_both(
        name="window",
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        tokens_per_page=16,
        lengths=(5, 40, 41, 100, 0),
        window=24,
    ),
    *_both(
        name="window_one", num_heads=2, num_kv_heads=1, head_dim=128, tokens_per_page=16, lengths=(33, 1, 32), window=1
    ),
    Case(
        name="smollm2_135m_decode",
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        tokens_per_page=64,
        lengths=(2000,) * 8,
        dtype="bfloat16",
        small=False,
    ),
    Case(
        name="gemma3_270m_local_decode",
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        tokens_per_page=64,
        lengths=(2000,) * 8,
        window=512,
        dtype="bfloat16",
        small=False,
    ),
    Case(
        name="llama3_8b_decode",
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        tokens_per_page=64,
        lengths=(2048,) * 8,
        dtype="bfloat16",
        small=False,
    ),
)
