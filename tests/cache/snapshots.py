"""States to save, and how to compare and break what was saved."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from zllm_jax.buffers import RowLayout, RowSpec, aligned_empty
from zllm_jax.cache.manifest import Manifest, parse
from zllm_jax.cache.snapshot import SnapshotInfo, SnapshotStore
from zllm_jax.cache.snapshot_bench import load_whole, save_whole
from zllm_jax.cache.snapshot_layout import Array, rows_of

NAMESPACE = "weights-and-layout"
CHUNK_TOKENS = 16


def spec(dtype: DTypeLike, shape: Sequence[int | None], stage: int = 0) -> RowSpec:
    axis = list(shape).index(None) if None in shape else None
    return RowSpec(np.dtype(dtype), tuple(shape), axis, stage)


def layout(num_stages: int = 2, width: int = 8) -> dict[str, RowSpec]:
    """Paged rows, a ring and a fixed part, of the types that models keep. The last stage has no fixed arrays."""
    found = {}
    for stage in range(num_stages):
        found[f"paged.k.{stage}"] = spec(np.float32, (3, 2, None, width), stage)
        found[f"paged.v.{stage}"] = spec(ml_dtypes.bfloat16, (3, None, width), stage)
        if stage == 0:
            found["ring.k.0"] = spec(np.float32, (2, 5, width), stage)
            found["count.0"] = spec(np.int64, (), stage)
    return found


def state(num_tokens: int, seed: int = 0, of: RowLayout | None = None) -> dict[str, Array]:
    """Random bytes: every bit pattern must survive. The rows of one seed do not depend on how many there are."""
    arrays = {}
    for index, (name, one) in enumerate((of or layout()).items()):
        random = np.random.default_rng([seed, index])
        count = 1 if one.token_axis is None else num_tokens
        rest = [size for axis, size in enumerate(one.shape) if axis != one.token_axis]
        raw = random.integers(0, 256, (count, *rest, one.dtype.itemsize), np.uint8)
        rows = raw.view(one.dtype)[..., 0]
        arrays[name] = rows[0] if one.token_axis is None else np.ascontiguousarray(np.moveaxis(rows, 0, one.token_axis))
    return arrays


def ids(num_tokens: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 2**31 - 1, num_tokens, dtype=np.int32)


def open_store(root: Any, **options: Any) -> SnapshotStore:
    return SnapshotStore(root, namespace=NAMESPACE, **{"chunk_tokens": CHUNK_TOKENS, **options})


def save(
    store: SnapshotStore, num_tokens: int, seed: int = 0, of: RowLayout | None = None, **options: Any
) -> SnapshotInfo:
    of = of or layout()
    return save_whole(store, ids(num_tokens, seed), of, state(num_tokens, seed, of), **options)


def assert_saved(store: SnapshotStore, id: str, num_tokens: int, seed: int = 0, of: RowLayout | None = None) -> None:
    """The snapshot holds the bits of `save` with the same arguments."""
    tokens, arrays = load_whole(store, id, of or layout())
    assert_same(tokens, arrays, num_tokens, seed, of)


def assert_same(
    tokens: NDArray[np.int32], arrays: Mapping[str, Array], num_tokens: int, seed: int, of: RowLayout | None
) -> None:
    wanted = state(num_tokens, seed, of)
    assert tokens.dtype == np.int32
    assert np.array_equal(tokens, ids(num_tokens, seed))
    assert arrays.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape), name
        assert arrays[name].tobytes() == array.tobytes(), name


def load_in_groups(
    store: SnapshotStore, id: str, group: int, of: RowLayout | None = None
) -> tuple[NDArray[np.int32], dict[str, Array]]:
    """What a reader fills, group by group; the room of the last group is as long as that of the others."""
    of = of or layout()
    whole: dict[str, Array] = {}
    with store.reader(id, of) as reader:
        count = len(reader.tokens)
        for stage in range(1 + max(one.stage for one in of.values())):
            paged = {name: one for name, one in of.items() if one.stage == stage and one.token_axis is not None}
            for name, one in paged.items():
                whole[name] = np.zeros([count if size is None else size for size in one.shape], one.dtype)
            for start in range(0, count, group):
                stop = min(start + group, count)
                room = {
                    n: aligned_empty([group if s is None else s for s in o.shape], o.dtype) for n, o in paged.items()
                }
                reader.fill(stage, start, stop, room).wait()
                for name, one in paged.items():
                    rows_of(whole[name], one, start, stop)[...] = rows_of(room[name], one, 0, stop - start)
            whole |= reader.fixed(stage)
        return reader.tokens, whole


def manifest_of(store: SnapshotStore, id: str) -> Manifest:
    return parse(manifest_file(store, id).read_bytes())


def manifest_file(store: SnapshotStore, id: str) -> Path:
    return Path(store.where) / "manifests" / id


def chunk_files(store: SnapshotStore, id: str) -> list[Path]:
    """The files that a snapshot names."""
    return [Path(store.where) / "chunks" / name for name in manifest_of(store, id).chunks()]


def bytes_below(root: Path) -> int:
    """Sizes of all manifests and chunk files of a folder of snapshots."""
    return sum(path.stat().st_size for part in ("manifests", "chunks") for path in root.glob(f"*/{part}/*"))


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=REPO)


REPO = Path(__file__).resolve().parents[2]
