"""Checkpoints whose parameters lie as whole tensors in plain files: GGUF and safetensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from zllm_jax.buffers import aligned_empty
from zllm_jax.checkpoint.base import Checkpoint, TokenizerFiles
from zllm_jax.checkpoint.encodings import Extent
from zllm_jax.checkpoint.parameters import parameter_shapes
from zllm_jax.config import Dtype, ModelConfig
from zllm_jax.errors import BadCheckpoint

BLOCK_NUMBERS = 1 << 18  # decoded at a time: 1 MB of f32 stays in a core's cache and bounds the extra memory


@dataclass(frozen=True)
class Source:
    """A parameter's tensor and what its format did to it.

    transposed: stored as [out, in]. unit_offset: stored as w where the model multiplies by 1 + w.
    interleaved_heads: rows of each of so many heads are ordered for rotating neighbours instead of halves (0: not).
    """

    extent: Extent
    transposed: bool = False
    unit_offset: bool = False
    interleaved_heads: int = 0


class TensorFiles(Checkpoint):
    """Canonical parameters read from `sources`; every shape is checked when it is made."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        sources: Mapping[str, Source],
        *,
        hashed: list[Path],
        tokenizer: TokenizerFiles | None,
        chat_template: str | None,
    ) -> None:
        self.path = path
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._sources = sources
        self._hashed = hashed
        for name, shape in self.shapes.items():
            source = sources[name]
            wanted = shape[::-1] if source.transposed else shape
            if source.extent.shape != wanted:
                raise BadCheckpoint(
                    f"{source.extent.path}: tensor {source.extent.name} has shape {list(source.extent.shape)}, "
                    f"but the configuration asks for {list(wanted)}",
                    tensor=source.extent.name,
                )

    def weight_files(self) -> list[Path]:
        return self._hashed

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="checkpoint")

    def read(self, name: str, dtype: Dtype = "float32") -> np.ndarray:
        source = self._sources[name]
        extent = source.extent
        out = aligned_empty(self.shapes[name], np.dtype(dtype))
        rows = out.T if source.transposed else np.atleast_2d(out)
        order = _halves_first(extent.shape[0], source.interleaved_heads) if source.interleaved_heads else None

        def fill(start: int) -> None:
            stop = min(start + step, extent.rows)
            values = extent.read_rows(start, stop)
            if source.unit_offset:
                values = values.astype(np.float32) + np.float32(1)
            if order is None:
                rows[start:stop] = values
            elif out.ndim == 1:
                rows[:, order] = values
            else:
                rows[order[start:stop]] = values

        step = max(1, BLOCK_NUMBERS // extent.shape[-1])
        starts = range(0, extent.rows, step)
        if len(starts) == 1:
            fill(0)
        else:
            for _ in self._pool.map(fill, starts):
                pass
        return out


def _halves_first(num_rows: int, heads: int) -> np.ndarray:
    """Where each stored row belongs: of 4 rows a head (0, 1, 2, 3 -> 0, 2, 1, 3), pairs become halves."""
    return np.arange(num_rows).reshape(heads, 2, -1).swapaxes(1, 2).ravel()


def match_tensors(
    where: str,
    config: ModelConfig,
    tensors: Mapping[str, Extent],
    stored_name: Callable[[str], str],
    *,
    ignored: Collection[str] = (),
) -> dict[str, Extent]:
    """The file's tensor of every canonical parameter. None may be missing, none left over but the `ignored`."""
    found = {}
    for name in parameter_shapes(config):
        stored = stored_name(name)
        if stored not in tensors:
            raise BadCheckpoint(f"{where}: tensor {stored} is missing", tensor=stored)
        found[name] = tensors[stored]
    for stored in tensors.keys() - {extent.name for extent in found.values()} - set(ignored):
        raise BadCheckpoint(
            f"{where}: tensor {stored} is not part of the architecture; computing without it would give wrong results",
            tensor=stored,
        )
    return found
