"""Named shapes for tests, bench and notebook, and inputs for them in which every masked logit is NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from pallas_kernels._common.bits import num_words


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape. legal: share of legal tokens. `small` ones are for the interpreter too; the others are real models'.

    temperatures are dealt to the rows in turn.
    """

    name: str
    batch: int
    vocab_size: int
    legal: float = 0.5
    temperatures: tuple[float, ...] = (0.0, 1.0, 0.3, 2.5)
    dtype: str = "float32"
    small: bool = True

    @property
    def bytes_moved(self) -> int:
        """Least traffic of HBM: logits and mask words, once."""
        return self.batch * ((4 if self.dtype == "float32" else 2) * self.vocab_size + 4 * num_words(self.vocab_size))

    def inputs(self, seed: int = 0) -> dict[str, Any]:
        """Arguments of `masked_sample` as numpy arrays. A batch's last row has nothing legal, bits past V are 1."""
        rng = np.random.default_rng(seed)
        B, V = self.batch, self.vocab_size
        legal = rng.random((B, V)) < self.legal
        legal[:, V - 1] = True  # the last token, in the last and partial word, is there to be lost
        if B > 1:
            legal[-1] = False
        logits = np.where(legal, 3 * rng.standard_normal((B, V)), np.nan)
        bits = np.ones((B, num_words(V) * 32), bool)
        bits[:, :V] = legal
        return {
            "logits": logits.astype(np.float32 if self.dtype == "float32" else bfloat16),
            "mask": np.packbits(bits, axis=1, bitorder="little").view("<u4").astype(np.uint32),
            "temperature": np.resize(np.array(self.temperatures, np.float32), B),
            "seeds": rng.integers(0, 2**32, (B, 2), np.uint32),
        }


CASES: tuple[Case, ...] = (
    Case(name="one_row_v50", batch=1, vocab_size=50, temperatures=(1.0,)),
    Case(name="few_rows_v4096", batch=5, vocab_size=4096),
    Case(name="two_row_tiles_v32001", batch=9, vocab_size=32_001),
    Case(name="ragged_v32017", batch=5, vocab_size=32_017, dtype="bfloat16"),
    Case(name="sparse_v32031", batch=5, vocab_size=32_031, legal=1e-4),
    Case(name="full_v32032", batch=5, vocab_size=32_032, legal=1.0, dtype="bfloat16"),
    Case(name="smollm2_135m", batch=8, vocab_size=49_152, dtype="bfloat16", small=False),
    Case(name="llama3_8b", batch=16, vocab_size=128_256, small=False),
    Case(name="gemma3_270m", batch=8, vocab_size=262_144, dtype="bfloat16", small=False),
)
