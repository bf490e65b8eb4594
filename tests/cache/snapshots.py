"""States to save, and how to compare and break what was saved."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from zllm_jax.cache.snapshot import Layout, Snapshot, SnapshotStore, StateArray

NAMESPACE = "weights-and-layout"


def state(num_tokens: int, seed: int = 0, *, heads: int = 2, width: int = 8) -> dict[str, StateArray]:
    """Paged rows, a ring and a fixed part, of the types that models keep."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return random.standard_normal(shape, dtype=np.float32)

    return {
        "paged.k": StateArray(normal(3, heads, num_tokens, width), 2),
        "paged.v": StateArray(normal(3, heads, num_tokens, width).astype(ml_dtypes.bfloat16), 2),
        "ring.k": StateArray(normal(2, heads, 5, width), None),
        "fixed": StateArray(np.array(seed, np.int64), None),
    }


def ids(num_tokens: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 2**31 - 1, num_tokens, dtype=np.int32)


def layout(arrays: Mapping[str, StateArray]) -> dict[str, Layout]:
    return {
        name: (
            array.value.dtype,
            tuple(None if axis == array.token_axis else size for axis, size in enumerate(array.value.shape)),
        )
        for name, array in arrays.items()
    }


def assert_same(snapshot: Snapshot, tokens: NDArray[np.int32], arrays: Mapping[str, StateArray]) -> None:
    assert snapshot.tokens.dtype == np.int32
    assert np.array_equal(snapshot.tokens, tokens)
    assert snapshot.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        got = snapshot.arrays[name]
        assert (got.dtype, got.shape) == (array.value.dtype, array.value.shape), name
        assert got.tobytes() == array.value.tobytes(), name


def read_in_groups(store: SnapshotStore, id: str, arrays: Mapping[str, StateArray], group: int) -> Snapshot:
    """What `reading` hands over, put together again; the room of the last group is as long as that of the others."""
    (info,) = (info for info in store.list() if info.id == id)
    gathered: dict[str, list[NDArray[Any]]] = {name: [] for name, a in arrays.items() if a.token_axis is not None}
    with store.reading(id, expect=layout(arrays)) as reader:
        tokens = reader.tokens()
        for start in range(0, len(tokens), group):
            room = {
                name: np.zeros([group if size is None else size for size in shape], dtype)
                for name, (dtype, shape) in layout(arrays).items()
                if name in gathered
            }
            reader.fill(start, room)()
            for name, part in room.items():
                gathered[name].append(part)
        fixed = reader.fixed()
    whole = {}
    for name, parts in gathered.items():
        axis = arrays[name].token_axis
        assert axis is not None
        whole[name] = np.concatenate(parts, axis).take(range(len(tokens)), axis)
    return Snapshot(info, tokens, {**whole, **fixed}, reader.bytes_read)


def open_store(root: Path | str, **options: Any) -> SnapshotStore:
    return SnapshotStore(root, namespace=NAMESPACE, **{"chunk_tokens": 16, **options})


def entry_folder(store: SnapshotStore, id: str) -> Path:
    return Path(store.where) / id


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=REPO)


REPO = Path(__file__).resolve().parents[2]
