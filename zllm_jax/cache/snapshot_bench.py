"""Snapshots against one plain file of the same size, on the same disk, in the same run.

    python -m zllm_jax.cache.snapshot_bench [--json] [--folder DIR] [--repeats N] [--chunk-tokens 128] [--ocdbt]

The measurements take turns, so that whatever else the machine does falls on all of them; medians are reported.
Reads find the page cache warm. The plain write is one fsynced file, the plain read fills a fresh array. --ocdbt puts
the same chunks as values of 2 MB into a TensorStore OCDBT database and into plain files beside it, by the same calls.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash
from numpy.typing import ArrayLike, NDArray

from zllm_jax.buffers import RowLayout, RowSpec, aligned_empty
from zllm_jax.cache.snapshot import SnapshotInfo, SnapshotStore
from zllm_jax.cache.snapshot_files import context
from zllm_jax.cache.snapshot_layout import Array, rows_of


def smollm2_state(num_tokens: int, seed: int = 0, *, num_stages: int = 3) -> tuple[RowLayout, dict[str, Array]]:
    """Keys and values f32[L=30, K=3, S, H=64] of random normal numbers, in stages: 92 MB at 2,000 tokens."""
    random = np.random.default_rng(seed)
    names = [(f"paged.{kind}.{stage}", stage) for stage in range(num_stages) for kind in "kv"]
    layout = {
        name: RowSpec(np.dtype(np.float32), (30 // num_stages, 3, None, 64), token_axis=2, stage=stage)
        for name, stage in names
    }
    shape = (30 // num_stages, 3, num_tokens, 64)
    return layout, {name: random.standard_normal(shape, np.float32) for name in layout}


def save_whole(
    store: SnapshotStore, tokens: ArrayLike, layout: RowLayout, arrays: Mapping[str, Array], **options: Any
) -> SnapshotInfo:
    """Save a state that lies in host arrays; options as of `SnapshotStore.writer`. Raises as the writer does."""
    with store.writer(tokens, layout, **options) as writer:
        for stage in sorted({spec.stage for spec in layout.values()}):
            mine = {name: spec for name, spec in layout.items() if spec.stage == stage}
            paged = {name: spec for name, spec in mine.items() if spec.token_axis is not None}
            for start, stop in writer.spans if paged else ():
                rows = {name: rows_of(arrays[name], spec, start, stop) for name, spec in paged.items()}
                writer.put(start, stop, stage, rows)
            if len(paged) < len(mine):
                writer.put_fixed(stage, {name: arrays[name] for name in mine.keys() - paged.keys()})
        return writer.commit()


def load_whole(store: SnapshotStore, id: str, layout: RowLayout) -> tuple[NDArray[np.int32], dict[str, Array]]:
    """A snapshot's tokens and arrays, read as a restore does. Raises as the reader does."""
    with store.reader(id, layout) as reader:
        count = len(reader.tokens)
        arrays: dict[str, Array] = {}
        fillings = []
        for stage in sorted({spec.stage for spec in layout.values()}):
            mine = {name: s for name, s in layout.items() if s.stage == stage and s.token_axis is not None}
            if mine:
                room = {
                    name: aligned_empty([count if n is None else n for n in spec.shape], spec.dtype)
                    for name, spec in mine.items()
                }
                fillings.append(reader.fill(stage, 0, count, room))
                arrays |= room
            arrays |= reader.fixed(stage)
        for filling in fillings:
            filling.wait()
        return reader.tokens, arrays


def measure(
    folder: Path,
    layout: RowLayout,
    arrays: Mapping[str, Array],
    num_tokens: int,
    *,
    repeats: int = 9,
    chunk_tokens: int = 128,
) -> dict[str, Any]:
    """Seconds, GB/s and the two ratios (snapshot's rate as a share of the plain file's), medians of `repeats`."""
    total = sum(array.nbytes for array in arrays.values())
    tokens = np.arange(num_tokens, dtype=np.int32)
    store = SnapshotStore(folder / "store", namespace="bench", chunk_tokens=chunk_tokens)
    plain = folder / "plain"
    seconds: dict[str, list[float]] = {"plain_write": [], "save": [], "plain_read": [], "load": []}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        seconds[name].append(time.perf_counter() - started)
        return result

    stored_bytes = 0
    for turn in range(repeats + 1):
        plain.unlink(missing_ok=True)
        timed("plain_write", lambda: _write_plain(plain, arrays))
        info = timed("save", lambda: save_whole(store, tokens, layout, arrays))
        timed("plain_read", lambda: _read_plain(plain, total))
        _, loaded = timed("load", partial(load_whole, store, info.id, layout))
        if turn == 0:
            for name, array in arrays.items():
                if loaded[name].tobytes() != array.tobytes():
                    raise AssertionError(f"{name} came back changed")
            for values in seconds.values():
                values.clear()  # the first turn warms up
        del loaded
        stored_bytes = info.nbytes
        store.delete(info.id)
    store.close()
    median_s = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "state_bytes": total,
        "stored_bytes": stored_bytes,
        "chunk_tokens": chunk_tokens,
        "repeats": repeats,
        "median_s": median_s,
        "gb_per_s": {name: total / value / 1e9 for name, value in median_s.items()},
        "save_share": median_s["plain_write"] / median_s["save"],
        "load_share": median_s["plain_read"] / median_s["load"],
    }


def measure_drivers(folder: Path, *, values: int = 48, value_bytes: int = 2 << 20, repeats: int = 5) -> dict[str, Any]:
    """Seconds of writing, reading and verifying `values` values, and bytes taken after half were deleted, by driver."""
    random = np.random.default_rng(0)
    data = [random.bytes(value_bytes) for _ in range(values)]
    names = [xxhash.xxh3_128_hexdigest(value) for value in data]
    seconds: dict[str, list[float]] = {}
    taken = {}
    for turn in range(repeats + 1):
        for driver in ("file", "ocdbt"):
            below = folder / f"{driver}-{turn}"
            spec = {"driver": "file", "path": f"{below}/"}
            whole = {"driver": "ocdbt", "base": spec} if driver == "ocdbt" else spec
            kvstore = ts.KvStore.open(whole, context=context()).result()
            started = time.perf_counter()
            for write in [kvstore.write(name, value) for name, value in zip(names, data, strict=True)]:
                write.result()
            written = time.perf_counter()
            for name, read in [(name, kvstore.read(name)) for name in names]:
                if xxhash.xxh3_128_hexdigest(read.result().value) != name:
                    raise AssertionError(f"{name} came back changed")
            ended = time.perf_counter()
            if turn:  # the first turn warms up
                seconds.setdefault(f"{driver} write", []).append(written - started)
                seconds.setdefault(f"{driver} read, verified", []).append(ended - written)
            taken[f"{driver} written"] = _bytes_below(below)
            for name in names[::2]:
                kvstore.write(name, None).result()
            taken[f"{driver} half deleted"] = _bytes_below(below)
            shutil.rmtree(below)
    median_s = {name: statistics.median(values) for name, values in seconds.items()}
    return {"value_bytes": value_bytes, "values": values, "median_s": median_s, "bytes": taken}


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write_plain(path: Path, arrays: Mapping[str, Array]) -> None:
    with open(path, "wb", buffering=0) as file:
        for array in arrays.values():
            rest = array.reshape(-1).view(np.uint8).data
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def _read_plain(path: Path, nbytes: int) -> None:
    target = np.empty(nbytes, np.uint8).data
    with open(path, "rb", buffering=0) as file:
        while target:
            target = target[file.readinto(target) :]


def main() -> None:
    parser = argparse.ArgumentParser(description="Snapshots against one plain file of the same size.")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the state (default: 2000, 92 MB)")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each kind (default: 9)")
    parser.add_argument("--chunk-tokens", type=int, default=128, help="tokens a chunk file (default: 128)")
    parser.add_argument("--ocdbt", action="store_true", help="compare OCDBT with plain files instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="snapshot-bench-", dir=options.folder))
    try:
        if options.ocdbt:
            result = measure_drivers(folder, repeats=options.repeats)
        else:
            layout, arrays = smollm2_state(options.tokens)
            chunks, repeats = options.chunk_tokens, options.repeats
            result = measure(folder, layout, arrays, options.tokens, repeats=repeats, chunk_tokens=chunks)
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps(result))
    elif options.ocdbt:
        for name, value in result["median_s"].items():
            print(f"{name:22} {value * 1e3:8.1f} ms")
        for name, nbytes in result["bytes"].items():
            print(f"{name:22} {nbytes / 1e6:8.1f} MB")
    else:
        for name, value in result["median_s"].items():
            print(f"{name:12} {value * 1e3:8.1f} ms {result['gb_per_s'][name]:8.2f} GB/s")
        print(f"save {result['save_share']:.0%} of a plain write, load {result['load_share']:.0%} of a plain read")


if __name__ == "__main__":
    main()
