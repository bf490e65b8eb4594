"""What this machine offers: versions, devices, rates, and folders that can be written."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zllm_jax.config import zllm_home
from zllm_jax.errors import StoreUnavailable
from zllm_jax.experiment.environment import describe_environment
from zllm_jax.roofline import copy_rate, disk_rates
from zllm_jax.runtime.kernels import KernelChoice, kernel_choices

LIBRARIES = ("jaxlib", "flax", "numpy", "tensorstore", "tokenizers", "sentencepiece", "gguf", "starlette")


@dataclass(frozen=True)
class Folder:
    """A folder zllm writes to. `problem` says why it cannot, None if it can."""

    use: str
    path: str
    free_bytes: int
    problem: str | None


@dataclass(frozen=True)
class Diagnosis:
    """`environment` and `libraries`: name -> version or value. Rates in bytes or FLOPs a second."""

    environment: dict[str, Any]
    libraries: dict[str, str | None]
    kernels: tuple[KernelChoice, ...]
    folders: tuple[Folder, ...]
    rates: dict[str, float | None]

    @property
    def ok(self) -> bool:
        return all(folder.problem is None for folder in self.folders)


def examine(
    *, disk_bytes: int = 128 << 20, copy_bytes: int = 256 << 20, matrix_sizes: Sequence[int] = (512, 1024, 2048)
) -> Diagnosis:
    """Look at everything; takes some seconds. A rate that cannot be measured is None."""
    from zllm_jax.experiment.measure import matrix_rate, read_rate

    home = zllm_home()
    folders = tuple(_folder(use, home / part) for use, part in (("models", "models"), ("snapshots", "snapshots")))
    rates: dict[str, float | None] = {
        "copy_bytes_s": copy_rate(copy_bytes),
        "read_bytes_s": read_rate(copy_bytes),
        "matrix_float32_flop_s": matrix_rate("float32", sizes=matrix_sizes),
        "matrix_bfloat16_flop_s": matrix_rate("bfloat16", sizes=matrix_sizes),
    }
    try:
        disk = disk_rates(home, disk_bytes)
    except StoreUnavailable:
        rates |= {"disk_write_bytes_s": None, "disk_read_bytes_s": None, "disk_cold_read_bytes_s": None}
    else:
        rates |= {
            "disk_write_bytes_s": disk.write_bytes_s,
            "disk_read_bytes_s": disk.read_bytes_s,
            "disk_cold_read_bytes_s": disk.cold_read_bytes_s,
        }
    return Diagnosis(
        environment=describe_environment(),
        libraries={name: _version(name) for name in LIBRARIES},
        kernels=kernel_choices(),
        folders=folders,
        rates=rates,
    )


def _folder(use: str, path: Path) -> Folder:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Folder(use, str(path), 0, error.strerror or os.strerror(error.errno or 0))
    return Folder(use, str(path), shutil.disk_usage(path).free, None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
