"""Whatever was done to the files: the saved bits, or CorruptSnapshot, or not listed. Never anything else."""

from __future__ import annotations

import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cache.snapshots import assert_same, entry_folder, ids, layout, open_store, read_in_groups, state
from zllm_jax.cache.manifest import CODECS, Codec, seal
from zllm_jax.cache.snapshot import SnapshotStore
from zllm_jax.errors import CorruptSnapshot

TOKENS = 40


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def refuses(store: SnapshotStore, id: str, match: str | None = None) -> None:
    """`load`, `verify` and a reader find the fault; a new process lists the entry and finds it too, or drops it."""

    def read(id: str) -> None:
        read_in_groups(store, id, state(TOKENS), group=16)

    for method in (store.load, store.verify, read):
        with pytest.raises(CorruptSnapshot, match=match) as caught:
            method(id)
        assert caught.value.path
    again = open_store(Path(store.where).parent)
    if id in [info.id for info in again.list()]:
        with pytest.raises(CorruptSnapshot):
            again.load(id)
    else:
        assert not entry_folder(store, id).exists()  # in quarantine
        assert list(Path(store.where).glob(f"quarantine/{id}-*"))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[SnapshotStore, str, Path]:
    store = open_store(tmp_path)
    info = store.save(ids(TOKENS), state(TOKENS))
    return store, info.id, entry_folder(store, info.id)


def flip(data: bytes, rng: random.Random) -> bytes:
    position = rng.randrange(len(data))
    return data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": flip,
    "truncate": lambda data, rng: data[: rng.randrange(len(data))],
    "extend": lambda data, rng: data + rng.randbytes(rng.randint(1, 64)),
    "overwrite": lambda data, rng: rng.randbytes(len(data)),
    "zeros": lambda data, rng: bytes(len(data) + 1),
    "swap": lambda data, rng: data[len(data) // 2 :] + data[: len(data) // 2 + 1],
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(tmp_path: Path, codec: Codec, damage: str) -> None:
    """Every file of a snapshot, damaged one at a time at random places."""
    rng = random.Random(f"{codec} {damage}")
    store = open_store(tmp_path, codec=codec)
    info = store.save(ids(TOKENS), state(TOKENS))
    folder = entry_folder(store, info.id)
    for path in files_of(folder):
        good = path.read_bytes()
        for _ in range(4):
            path.write_bytes(DAMAGES[damage](good, rng))
            with pytest.raises(CorruptSnapshot):
                store.load(info.id)
        path.write_bytes(good)
    assert_same(store.load(info.id), ids(TOKENS), state(TOKENS))


def test_one_damaged_file_and_a_restart(saved: tuple[SnapshotStore, str, Path]) -> None:
    store, id, folder = saved
    path = folder / "manifest"
    path.write_bytes(flip(path.read_bytes(), random.Random(0)))
    refuses(store, id)


def test_missing_and_extra_files(saved: tuple[SnapshotStore, str, Path], tmp_path: Path) -> None:
    store, id, folder = saved
    shutil.copytree(folder, tmp_path / "good")
    for name in [path.relative_to(folder) for path in files_of(folder)]:
        (folder / name).unlink()
        with pytest.raises(CorruptSnapshot):
            store.load(id)
        shutil.copy(tmp_path / "good" / name, folder / name)
    assert_same(store.load(id), ids(TOKENS), state(TOKENS))
    (folder / "extra").write_bytes(b"")
    refuses(store, id, "extra has 0 bytes, the manifest says none")


def test_swapped_chunks_of_one_snapshot(saved: tuple[SnapshotStore, str, Path]) -> None:
    store, id, folder = saved
    one, two = folder / "paged.k@0/c.0.0.0", folder / "paged.k@0/c.0.1.0"
    first, second = one.read_bytes(), two.read_bytes()
    assert len(first) == len(second)
    one.write_bytes(second)
    two.write_bytes(first)
    refuses(store, id, "checksum")


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_of_another_snapshot(tmp_path: Path, codec: Codec) -> None:
    """Whole, consistent files that belong to another conversation."""
    store = open_store(tmp_path, codec=codec)
    mine, other = (store.save(ids(TOKENS, seed), state(TOKENS, seed)).id for seed in range(2))
    for path in files_of(entry_folder(store, mine)):
        good = path.read_bytes()
        path.write_bytes((entry_folder(store, other) / path.relative_to(entry_folder(store, mine))).read_bytes())
        with pytest.raises(CorruptSnapshot):
            store.load(mine)
        path.write_bytes(good)


def test_renamed_snapshots(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one, two = (store.save(ids(TOKENS, seed), state(TOKENS, seed)).id for seed in range(2))
    entry_folder(store, one).rename(tmp_path / "aside")
    entry_folder(store, two).rename(entry_folder(store, one))
    (tmp_path / "aside").rename(entry_folder(store, two))
    refuses(store, one, "belongs to another")


def test_what_is_no_regular_file(saved: tuple[SnapshotStore, str, Path], tmp_path: Path) -> None:
    store, id, folder = saved
    for name in ("manifest", "tokens@0/c.0.0.0", "paged.k@0/c.0.0.0"):
        path = folder / name
        good = path.read_bytes()
        (tmp_path / "elsewhere").write_bytes(good)
        makers: list[Callable[[Path], object]] = [
            os.mkdir,
            os.mkfifo,
            lambda path: path.symlink_to(tmp_path / "elsewhere"),
            lambda path: path.symlink_to(path),
        ]
        for make in makers:
            path.unlink()
            make(path)
            with pytest.raises(CorruptSnapshot):
                store.load(id)
            with pytest.raises(CorruptSnapshot):
                store.tokens(id)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            path.write_bytes(good)
    assert_same(store.load(id), ids(TOKENS), state(TOKENS))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and give it a right checksum."""
    path = folder / "manifest"
    value = json.loads(path.read_bytes().split(b"\n", 1)[1])
    change(value)
    path.write_bytes(seal(json.dumps(value).encode()))


def in_array(index: int, **fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda value: value["arrays"][index].update(fields)


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "absurd tokens": in_array(0, shape=[1 << 40]),
    "more tokens": in_array(0, shape=[TOKENS + 1]),
    "no tokens": in_array(0, shape=[0]),
    "negative": in_array(1, shape=[3, 2, TOKENS, -8]),
    "absurd shape": in_array(1, shape=[1 << 30, 1 << 30, TOKENS, 1 << 30]),
    "overflowing shape": in_array(3, shape=[1 << 40] * 4),
    "larger shape": in_array(1, shape=[3, 2, TOKENS, 16]),
    "huge number": in_array(1, shape=[3, 2, TOKENS, 10**400]),
    "fraction": in_array(1, shape=[3, 2, TOKENS, 8.0]),
    "truth": in_array(1, shape=[3, 2, TOKENS, True]),
    "rank": in_array(1, shape=[1] * 100),
    "other axis": in_array(1, token_axis=0),
    "axis out of range": in_array(1, token_axis=4),
    "same size, other dtype": in_array(1, dtype="int32"),
    "unknown dtype": in_array(1, dtype="object"),
    "dtype of another kind": in_array(1, dtype=["f4"]),
    "path as a name": in_array(1, name="../../paged.k"),
    "absolute name": in_array(1, name="/etc"),
    "same name twice": in_array(1, name="ring.k"),
    "renamed": in_array(1, name="other"),
    "no chunks": in_array(1, chunks=[]),
    "chunks of nothing": in_array(1, chunks=[[0, "0" * 32]] * 3),
    "chunks null": in_array(1, chunks=None),
    "absurd chunk": in_array(1, chunks=[[1 << 60, "0" * 32]] * 3),
    "digest": in_array(1, chunks=[[3072, "x" * 32]] * 3),
    "other digests": in_array(3, chunks=[[640, "0" * 32]]),
    "no arrays": lambda value: value.update(arrays=[]),
    "arrays null": lambda value: value.update(arrays=None),
    "arrays of null": lambda value: value.update(arrays=[None]),
    "tokens not first": lambda value: value["arrays"].reverse(),
    "one array less": lambda value: value["arrays"].pop(),
    "other chunking": lambda value: value.update(chunk_tokens=8),
    "chunking by zero": lambda value: value.update(chunk_tokens=0),
    "other codec": lambda value: value.update(codec="blosc-lz4"),
    "unknown codec": lambda value: value.update(codec="exec"),
    "codec list": lambda value: value.update(codec=[]),
    "other id": lambda value: value.update(id="0" * 32),
    "other namespace": lambda value: value.update(namespace="0" * 32),
    "id null": lambda value: value.update(id=None),
    "time": lambda value: value.update(created_s=float("inf")),
    "meta": lambda value: value.update(meta=[]),
    "more fields": lambda value: value.update(extra=1),
    "fewer fields": lambda value: value.pop("meta"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_with_a_right_checksum(saved: tuple[SnapshotStore, str, Path], lie: str) -> None:
    """A manifest that is well formed and untrue is found out before anything large is allocated."""
    store, id, folder = saved
    arrays = state(TOKENS)
    honest_bytes = sum(array.value.nbytes for array in arrays.values())
    edit(folder, LIES[lie])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptSnapshot):
            store.load(id, expect=layout(arrays))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < honest_bytes + (256 << 10)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"{}",
        b"zllm-snapshot 1 \n{}",
        b"zllm-snapshot 99999999999999999999 " + b"0" * 64 + b"\n{}",
        seal(b""),
        seal(b"null"),
        seal(b"[]"),
        seal(b"{}"),
        seal(b"\xff\xfe"),
        seal(b"[" * 100_000),
        seal(b"9" * 10_000),
    ],
    ids=range(12),
)
def test_manifests_of_another_kind(saved: tuple[SnapshotStore, str, Path], text: bytes) -> None:
    store, id, folder = saved
    (folder / "manifest").write_bytes(text)
    refuses(store, id)


def test_sparse_giants(saved: tuple[SnapshotStore, str, Path]) -> None:
    """Files that claim terabytes without taking them."""
    store, id, folder = saved
    for name in ("manifest", "paged.k@0/c.0.0.0"):
        good = (folder / name).read_bytes()
        os.truncate(folder / name, 1 << 40)
        with pytest.raises(CorruptSnapshot, match="bytes"):
            store.load(id)
        (folder / name).write_bytes(good)


@pytest.mark.parametrize("codec", ["blosc-lz4", "blosc-zstd"])
def test_a_frame_that_claims_more_than_its_chunk(tmp_path: Path, codec: Codec) -> None:
    store = open_store(tmp_path, codec=codec)
    id = store.save(ids(TOKENS), state(TOKENS)).id
    path = entry_folder(store, id) / "paged.k@0/c.0.0.0"
    data = bytearray(path.read_bytes())
    data[4:8] = (1 << 31).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(CorruptSnapshot, match="not a blosc frame"):
        store.load(id)


def test_strange_company(saved: tuple[SnapshotStore, str, Path]) -> None:
    """What others leave in the folder is neither listed nor touched."""
    _, id, folder = saved
    (folder.parent / "notes.txt").write_text("mine")
    (folder.parent / "a folder").mkdir()
    (folder.parent / ("e" * 32)).write_text("a file with an entry's name")
    assert [info.id for info in open_store(folder.parents[1]).list()] == [id]
    assert (folder.parent / "notes.txt").read_text() == "mine"
    assert (folder.parent / "a folder").is_dir()
