"""Snapshots against one plain file of the same size, on the same disk, in the same run.

    python -m zllm_jax.cache.snapshot_bench [--json] [--folder DIR] [--repeats N] [--codec raw] [--chunk-tokens 256]

The four measurements take turns, so that whatever else the machine does falls on all of them; medians are reported.
Reads find the page cache warm. The plain write is one fsynced file, the plain read fills a fresh array.
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

from zllm_jax.cache.manifest import CODECS, Codec
from zllm_jax.cache.snapshot import SnapshotStore, StateArray


def smollm2_state(num_tokens: int, seed: int = 0) -> dict[str, StateArray]:
    """Keys and values f32[L=30, K=3, S, H=64] of random normal numbers: 92 MB at 2,000 tokens."""
    random = np.random.default_rng(seed)
    shape = (30, 3, num_tokens, 64)
    return {name: StateArray(random.standard_normal(shape, dtype=np.float32), 2) for name in ("paged.k", "paged.v")}


def measure(
    folder: Path,
    arrays: Mapping[str, StateArray],
    num_tokens: int,
    *,
    repeats: int = 9,
    codec: Codec = "raw",
    chunk_tokens: int = 256,
) -> dict[str, Any]:
    """Seconds, GB/s and the two ratios (snapshot's rate as a share of the plain file's), medians of `repeats`."""
    total = sum(array.value.nbytes for array in arrays.values())
    tokens = np.arange(num_tokens, dtype=np.int32)
    store = SnapshotStore(folder / "store", namespace="bench", codec=codec, chunk_tokens=chunk_tokens)
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
        info = timed("save", lambda: store.save(tokens, arrays))
        timed("plain_read", lambda: _read_plain(plain, total))
        snapshot = timed("load", partial(store.load, info.id))
        if turn == 0:
            for name, array in arrays.items():
                if snapshot.arrays[name].tobytes() != array.value.tobytes():
                    raise AssertionError(f"{name} came back changed")
            for values in seconds.values():
                values.clear()  # the first turn warms up
        del snapshot
        stored_bytes = info.nbytes
        store.delete(info.id)
    median_s = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "state_bytes": total,
        "stored_bytes": stored_bytes,
        "codec": codec,
        "chunk_tokens": chunk_tokens,
        "repeats": repeats,
        "median_s": median_s,
        "gb_per_s": {name: total / value / 1e9 for name, value in median_s.items()},
        "save_share": median_s["plain_write"] / median_s["save"],
        "load_share": median_s["plain_read"] / median_s["load"],
    }


def _write_plain(path: Path, arrays: Mapping[str, StateArray]) -> None:
    with open(path, "wb", buffering=0) as file:
        for array in arrays.values():
            rest = array.value.reshape(-1).view(np.uint8).data
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
    parser.add_argument("--codec", choices=CODECS, default="raw", help="compression of the chunks (default: raw)")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="tokens a chunk file (default: 256)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="snapshot-bench-", dir=options.folder))
    try:
        result = measure(
            folder,
            smollm2_state(options.tokens),
            options.tokens,
            repeats=options.repeats,
            codec=options.codec,
            chunk_tokens=options.chunk_tokens,
        )
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result["median_s"].items():
        print(f"{name:12} {value * 1e3:8.1f} ms {result['gb_per_s'][name]:8.2f} GB/s")
    print(f"save {result['save_share']:.0%} of a plain write, load {result['load_share']:.0%} of a plain read")


if __name__ == "__main__":
    main()
