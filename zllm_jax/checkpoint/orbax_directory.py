"""Checkpoints of our own: orbax, written by `convert`. The only file of this room that imports jax, and only in use.

A folder holds `zllm_checkpoint.json` (format version, configuration, dtype), `tokenizer/` and `weights/<group>/`, each
group a plain orbax checkpoint: one a layer and one for each parameter outside the layers, so that converting a model
needs the memory of one layer, not of the whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  (registers "bfloat16" with numpy)
import numpy as np

from zllm_jax.checkpoint.base import Checkpoint, TokenizerFiles
from zllm_jax.checkpoint.fields import model_config
from zllm_jax.checkpoint.jsonfile import read_json
from zllm_jax.config import Dtype, RopeConfig
from zllm_jax.errors import BadCheckpoint, ConfigError

if TYPE_CHECKING:
    import jax

MANIFEST = "zllm_checkpoint.json"
FORMAT_VERSION = 1

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class OrbaxDirectory(Checkpoint):
    """What `convert` wrote into `path`. dtype: in which the weights are stored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        where = path / MANIFEST
        manifest = read_json(where)
        if (version := manifest.get("format_version")) != FORMAT_VERSION:
            raise BadCheckpoint(f"{where}: format_version is {version!r}; this version reads {FORMAT_VERSION}")
        try:
            numbers = dict(manifest["config"])
            for key in ("rope", "local_rope"):
                numbers[key] = RopeConfig(**numbers[key]) if numbers[key] else None
            for key in ("eos_ids", "local_layers"):
                numbers[key] = tuple(numbers[key])
            self.config = model_config(str(where), **numbers)
            self.dtype: Dtype = manifest["dtype"]
            self.chat_template = manifest["chat_template"]
            stored = {name: tuple(shape) for name, shape in manifest["parameters"].items()}
        except (KeyError, TypeError, ValueError) as error:
            raise BadCheckpoint(f"{where} is not what convert writes: {error!r}") from error
        for name, shape in self.shapes.items():
            if stored.get(name) != shape:
                raise BadCheckpoint(
                    f"{where}: {name} has shape {stored.get(name)}, but the configuration asks for {shape}", tensor=name
                )
            if not self._folder(_group(name)).is_dir():
                raise BadCheckpoint(f"{path}: {name} is missing: there is no {self._folder(_group(name))}", tensor=name)
        self.tokenizer = TokenizerFiles.load(path / "tokenizer") if (path / "tokenizer").is_dir() else None

    def _folder(self, group: str) -> Path:
        return self.path / "weights" / group

    def weight_files(self) -> list[Path]:
        found = (path for path in (self.path / "weights").rglob("*") if path.is_file())
        return [self.path / MANIFEST, *sorted(found)]

    @cached_property
    def _handler(self) -> Any:
        return _handler()

    def read(self, name: str, dtype: Dtype = "float32") -> np.ndarray:
        import orbax.checkpoint as ocp

        if name not in self.shapes:
            raise KeyError(name)
        args = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
        return np.ascontiguousarray(self._restore(_group(name), args)[name], np.dtype(dtype))

    def restore_sharded(self, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Parameters placed as the targets' shardings say, in the targets' dtypes; each device reads its own part.

        Raises `BadCheckpoint` for a shape that differs from what is stored.
        """
        import orbax.checkpoint as ocp

        arrays: dict[str, jax.Array] = {}
        for group, names in _groups(targets):
            args = {}
            for name in names:
                target = targets[name]
                if target.shape != self.shapes[name]:
                    raise BadCheckpoint(
                        f"{self.path}: {name} has shape {self.shapes[name]}, asked for {target.shape}", tensor=name
                    )
                args[name] = ocp.ArrayRestoreArgs(sharding=target.sharding, dtype=target.dtype)
            arrays |= self._restore(group, args)
        return arrays

    def _restore(self, group: str, args: Mapping[str, Any]) -> dict[str, Any]:
        import orbax.checkpoint as ocp
        from etils import epath

        wanted = dict.fromkeys(args, 0)
        request = ocp.args.PyTreeRestore(item=wanted, restore_args=dict(args), partial_restore=True)
        try:
            restored: dict[str, Any] = self._handler.restore(epath.Path(self._folder(group)), args=request)
        except (OSError, ValueError, KeyError) as error:
            raise BadCheckpoint(f"{self._folder(group)} cannot be read: {error}", tensor=next(iter(args))) from error
        return restored


def convert(checkpoint: Checkpoint, to: Path, dtype: Dtype = "float32", progress: Progress | None = None) -> Path:
    """Write `checkpoint` to the new folder `to` as orbax, weights in `dtype`. All of it appears at once, or nothing.

    Raises `ConfigError` when `to` exists, cannot be written, or its disk is too small.
    """
    from etils import epath

    total = sum(map(math.prod, checkpoint.shapes.values())) * np.dtype(dtype).itemsize
    to = to.absolute()
    if to.exists():
        raise ConfigError(f"{to} exists already: name a new folder to convert to")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(to.parent).free) < total:
            raise ConfigError(f"{to}: the weights need {total:,} bytes, the disk has {free:,} free")
        partial = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
    except OSError as error:
        raise ConfigError(f"cannot write {to}: {error.strerror or error}") from error
    try:
        handler, done = _handler(), 0
        for group, names in _groups(checkpoint.shapes):
            weights = {name: checkpoint.read(name, dtype) for name in names}
            _save(handler, epath.Path(partial / "weights" / group), weights)
            done += sum(array.nbytes for array in weights.values())
            if progress:
                progress(done, total)
        if checkpoint.tokenizer:
            checkpoint.tokenizer.save(partial / "tokenizer")
        (partial / MANIFEST).write_text(json.dumps(_manifest(checkpoint, dtype), indent=1))
        partial.chmod(0o755)
        os.rename(partial, to)
    except OSError as error:
        raise ConfigError(f"cannot write {to}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return to


def _manifest(checkpoint: Checkpoint, dtype: Dtype) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "dtype": dtype,
        "converted_from_sha256": checkpoint.digest,
        "config": asdict(checkpoint.config),
        "parameters": checkpoint.shapes,
        "chat_template": checkpoint.chat_template,
    }


def _handler() -> Any:
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)


def _save(handler: Any, folder: Any, weights: Mapping[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp

    folder.mkdir(parents=True)
    handler.save(folder, args=ocp.args.PyTreeSave(dict(weights)))
    handler.finalize(folder)


def _group(name: str) -> str:
    """The orbax checkpoint that holds parameter `name`: its layer's, or its own."""
    return name.rpartition(".")[0] or name


def _groups(names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_group(name), []).append(name)
    yield from groups.items()
