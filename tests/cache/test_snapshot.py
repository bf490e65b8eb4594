"""What is saved comes back, here and in another process; the index and the ledger follow the files."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.snapshots import assert_same, entry_folder, ids, layout, open_store, python, read_in_groups, state
from zllm_jax.cache.manifest import CODECS, Codec, dtypes
from zllm_jax.cache.snapshot import SnapshotStore, StateArray
from zllm_jax.cache.snapshot_bench import measure
from zllm_jax.cache.snapshot_files import LocalFiles
from zllm_jax.errors import CacheError, CorruptSnapshot, StoreUnavailable


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33, 160])
@pytest.mark.parametrize("codec", CODECS)
def test_round_trip(tmp_path: Path, codec: Codec, num_tokens: int) -> None:
    store = open_store(tmp_path, codec=codec)
    tokens, arrays = ids(num_tokens), state(num_tokens)
    info = store.save(tokens, arrays, meta={"turns": [1, 2], "text": "é"})
    snapshot = store.load(info.id, expect=layout(arrays))
    assert_same(snapshot, tokens, arrays)
    assert snapshot.info.meta == {"turns": [1, 2], "text": "é"}
    assert snapshot.bytes_read == info.nbytes
    assert np.array_equal(store.tokens(info.id), tokens)
    store.verify(info.id)


@pytest.mark.parametrize("group", [1, 16, 24, 32, 200])
@pytest.mark.parametrize("codec", CODECS)
def test_read_in_groups(tmp_path: Path, codec: Codec, group: int) -> None:
    """Groups that hold whole chunks (of 16 tokens), cut through them, or hold everything."""
    store = open_store(tmp_path, codec=codec)
    for num_tokens in (1, 16, 33, 160):
        tokens, arrays = ids(num_tokens), state(num_tokens)
        info = store.save(tokens, arrays)
        snapshot = read_in_groups(store, info.id, arrays, group)
        assert_same(snapshot, tokens, arrays)
        assert snapshot.bytes_read == info.nbytes


def test_a_part_is_read_without_the_rest(tmp_path: Path) -> None:
    store, arrays = open_store(tmp_path), {"rows": StateArray(np.arange(64 * 4).reshape(64, 4), 0)}
    info = store.save(ids(64), arrays)
    with store.reading(info.id, expect=layout(arrays)) as reader:
        before = reader.bytes_read
        room = np.zeros((32, 4), np.int64)
        reader.fill(16, {"rows": room})()
        assert reader.bytes_read - before == room.nbytes
    assert np.array_equal(room, arrays["rows"].value[16:48])


@pytest.mark.parametrize("dtype", sorted(dtypes()))
@pytest.mark.parametrize("token_axis", [0, 1, 2, None])
def test_every_type_and_axis(tmp_path: Path, dtype: str, token_axis: int | None) -> None:
    shape = [3, 4, 5]
    if token_axis is not None:
        shape[token_axis] = 37
    itemsize = dtypes()[dtype].itemsize
    value = np.random.default_rng(0).integers(0, 2, (*shape, itemsize), dtype=np.uint8).view(dtypes()[dtype])[..., 0]
    store = open_store(tmp_path)
    arrays = {"a": StateArray(value, token_axis), "zero": StateArray(np.zeros_like(value), token_axis)}
    info = store.save(ids(37), arrays)
    assert_same(store.load(info.id), ids(37), arrays)


def test_arrays_that_are_views(tmp_path: Path) -> None:
    value = np.arange(2 * 20 * 6, dtype=np.float32).reshape(20, 2, 6)
    arrays = {"view": StateArray(value.transpose(1, 0, 2)[..., ::2], 1)}
    store = open_store(tmp_path)
    assert_same(store.load(store.save(ids(20), arrays).id), ids(20), arrays)


def test_many_leading_rows_take_several_reads(tmp_path: Path) -> None:
    arrays = {"wide": StateArray(np.arange(3000 * 17, dtype=np.int16).reshape(3000, 17), 1)}
    store = open_store(tmp_path)
    assert_same(store.load(store.save(ids(17), arrays).id), ids(17), arrays)


@pytest.mark.parametrize("codec", CODECS)
def test_other_kvstores(codec: Codec, tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}"
    store = open_store(root, codec=codec)
    tokens, arrays = ids(50), state(50)
    info = store.save(tokens, arrays)
    assert_same(open_store(root).load(info.id, expect=layout(arrays)), tokens, arrays)
    assert not store.drop_page_cache(info.id)
    store.quarantine(info.id, "a test")
    assert open_store(root).list() == []
    with pytest.raises(CorruptSnapshot, match="missing"):
        store.load(info.id)


def test_file_url_is_a_folder(tmp_path: Path) -> None:
    info = open_store(f"file://{tmp_path}").save(ids(3), state(3))
    assert [found.id for found in open_store(tmp_path).list()] == [info.id]


def test_a_restart_finds_what_was_saved(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    saved = [store.save(ids(n, n), state(n, n), meta={"n": n}) for n in (5, 40)]
    again = open_store(tmp_path)
    assert again.list() == saved
    assert again.nbytes == store.nbytes
    for n, info in zip((5, 40), saved, strict=True):
        assert_same(again.load(info.id), ids(n, n), state(n, n))


def test_another_process_restores(tmp_path: Path) -> None:
    """...the bits that this one saved."""
    info = open_store(tmp_path).save(ids(70), state(70))
    code = """
import sys
from tests.cache.snapshots import assert_same, ids, layout, open_store, state
store = open_store(sys.argv[1])
(info,) = store.list()
assert_same(store.load(info.id, expect=layout(state(70))), ids(70), state(70))
print(info.id)
"""
    done = python(code, tmp_path)
    assert done.stdout.strip() == info.id, done.stderr


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    info = one.save(ids(9), state(9))
    assert_same(two.load(info.id), ids(9), state(9))
    two.refresh()
    assert [found.id for found in two.list()] == [found.id for found in one.list()]
    two.delete(info.id)
    with pytest.raises(CorruptSnapshot, match="No such file"):
        one.load(info.id)
    one.refresh()
    assert one.list() == []
    one.delete(info.id)  # already gone: nothing to do


def test_namespaces_never_meet(tmp_path: Path) -> None:
    mine = SnapshotStore(tmp_path, namespace="mine")
    other = SnapshotStore(tmp_path, namespace="other")
    info = mine.save(ids(4), state(4))
    other.refresh()
    assert other.list() == []
    with pytest.raises(CorruptSnapshot):
        other.load(info.id)
    Path(other.where).mkdir()
    entry_folder(mine, info.id).rename(entry_folder(other, info.id))
    with pytest.raises(CorruptSnapshot, match="another snapshot or namespace"):
        other.load(info.id)


def test_the_ledger_is_what_the_files_take(tmp_path: Path) -> None:
    store = open_store(tmp_path, codec="blosc-zstd")
    infos = [store.save(ids(n), state(n)) for n in (10, 20, 300)]
    for info in infos:
        files = [path for path in entry_folder(store, info.id).rglob("*") if path.is_file()]
        assert info.nbytes == sum(path.stat().st_size for path in files)
    assert store.nbytes == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    store.delete(infos[0].id)
    assert store.nbytes == sum(info.nbytes for info in infos[1:])
    assert not entry_folder(store, infos[0].id).exists()


def test_raw_files_hold_the_arrays_bytes_and_nothing_else(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    info = store.save(ids(50), state(50))
    manifest_bytes = (entry_folder(store, info.id) / "manifest").stat().st_size
    arrays_bytes = sum(array.value.nbytes for array in state(50).values())
    assert info.nbytes - manifest_bytes == arrays_bytes + 50 * 4


def test_the_quota_evicts_the_least_recently_used(tmp_path: Path) -> None:
    size = open_store(tmp_path / "probe").save(ids(64), state(64)).nbytes
    store = open_store(tmp_path / "store", max_bytes=3 * size + 100)  # manifests differ by a few digits
    first, second, third = (store.save(ids(64, n), state(64, n)) for n in range(3))
    store.load(first.id)
    fourth = store.save(ids(64, 3), state(64, 3))
    assert [info.id for info in store.list()] == [third.id, first.id, fourth.id]
    assert store.nbytes <= 3 * size + 100
    assert not entry_folder(store, second.id).exists()
    with pytest.raises(StoreUnavailable, match="quota"):
        store.save(ids(1000), state(1000))
    assert len(store.list()) == 3


def test_use_is_remembered_across_restarts(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first, second = (store.save(ids(8, n), state(8, n)) for n in range(2))
    os.utime(entry_folder(store, second.id) / "manifest", (1e9, 1e9))
    store.load(first.id)
    assert [info.id for info in open_store(tmp_path).list()] == [second.id, first.id]


def test_expectations(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    arrays = state(12)
    info = store.save(ids(12), arrays)
    right = layout(arrays)
    wrong = [
        {**right, "paged.k": (np.float16, right["paged.k"][1])},
        {**right, "paged.k": (np.float32, (3, 2, 8, None))},
        {**right, "ring.k": (np.float32, (2, 2, 6, 8))},
        {**right, "more": (np.float32, (1,))},
        {name: value for name, value in right.items() if name != "fixed"},
    ]
    for expect in wrong:
        with pytest.raises(CorruptSnapshot, match="is expected"):
            store.load(info.id, expect=expect)
    store.load(info.id, expect=right)


def test_leftovers_of_a_crash_go_after_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    info = store.save(ids(30), state(30))
    kept = store.save(ids(30, 1), state(30, 1))
    (entry_folder(store, info.id) / "manifest").unlink()
    assert [found.id for found in open_store(tmp_path).list()] == [kept.id]
    assert entry_folder(store, info.id).exists()  # young: another process may be writing it
    with caplog.at_level(logging.WARNING):
        open_store(tmp_path, grace_s=0.0)
    assert not entry_folder(store, info.id).exists()
    assert info.id in caplog.text
    assert "never committed" in caplog.text


def test_a_snapshot_committed_while_it_is_looked_at_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes the manifest between two looks of one that opens the store."""
    store = open_store(tmp_path)
    info = store.save(ids(30), state(30))
    manifest = entry_folder(store, info.id) / "manifest"
    hidden = manifest.rename(tmp_path / "hidden")
    age_s = LocalFiles.age_s

    def commits(files: LocalFiles, id: str) -> float:
        age = age_s(files, id)
        hidden.rename(manifest)
        return age + 7200

    monkeypatch.setattr(LocalFiles, "age_s", commits)
    open_store(tmp_path)
    assert [found.id for found in open_store(tmp_path).list()] == [info.id]


def test_the_age_of_what_vanishes_is_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    info = store.save(ids(30), state(30))
    assert store._files.age_s("0" * 32) == 0
    lstat = os.lstat

    def vanishing(path: str, **options: Any) -> os.stat_result:
        if path.endswith("manifest"):
            raise FileNotFoundError(path)
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", vanishing)
    assert 0 <= store._files.age_s(info.id) < 60


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    whole, cut, left = (store.save(ids(30, seed), state(30, seed)) for seed in range(3))
    os.truncate(next(path for path in entry_folder(store, cut.id).rglob("c.*")), 10)
    (entry_folder(store, left.id) / "manifest").unlink()
    before = sorted(tmp_path.rglob("*"))
    look = open_store(tmp_path, grace_s=0.0, repair=False)
    assert [info.id for info in look.list()] == [whole.id]
    assert list(look.broken) == [cut.id]
    assert "10 bytes" in look.broken[cut.id]
    assert sorted(tmp_path.rglob("*")) == before


def test_another_version_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    info = store.save(ids(3), state(3))
    path = entry_folder(store, info.id) / "manifest"
    path.write_bytes(path.read_bytes().replace(b"snapshot 1 ", b"snapshot 2 ", 1))
    again = open_store(tmp_path, grace_s=0.0)
    assert again.list() == []
    assert "version 2" in caplog.text
    assert path.exists()
    with pytest.raises(CorruptSnapshot, match="version 2"):
        again.load(info.id)


def test_quarantine_keeps_files_and_reason(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    infos = [store.save(ids(2, n), state(2, n)) for n in range(10)]
    for info in infos:
        store.quarantine(info.id, f"reason of {info.id}")
    assert store.list() == []
    assert store.nbytes == 0
    kept = sorted(Path(store.where).joinpath("quarantine").glob("*.reason"))
    assert len(kept) == 8
    for path in kept:
        assert path.name[:32] in path.read_text()
        assert (path.with_suffix("") / "manifest").exists()
    assert open_store(tmp_path).list() == []
    store.quarantine(infos[0].id, "again")  # already gone


def test_page_cache_can_be_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    info = store.save(ids(20), state(20))
    assert store.drop_page_cache(info.id) is hasattr(os, "posix_fadvise")
    assert_same(store.load(info.id), ids(20), state(20))


@pytest.mark.parametrize(
    ("tokens", "name", "array", "message"),
    [
        ([], "a", StateArray(np.zeros(3), None), "tokens must be"),
        ([[1]], "a", StateArray(np.zeros(3), None), "tokens must be"),
        ([0.5], "a", StateArray(np.zeros(3), None), "tokens must be"),
        ([2**31], "a", StateArray(np.zeros(3), None), "2\\*\\*31"),
        ([1], "../a", StateArray(np.zeros(3), None), "array name"),
        ([1], "tokens", StateArray(np.zeros(3), None), "is taken"),
        ([1], "a", StateArray(np.zeros(3, complex), None), "cannot be stored"),
        ([1], "a", StateArray(np.zeros(3, ">f4"), None), "cannot be stored"),
        ([1], "a", StateArray(np.zeros((0, 3)), None), "no element"),
        ([1], "a", StateArray(np.zeros((2, 3)), 1), "token_axis 1"),
        ([1], "a", StateArray(np.zeros((2, 3)), -1), "token_axis -1"),
    ],
)
def test_what_cannot_be_stored(tmp_path: Path, tokens: object, name: str, array: StateArray, message: str) -> None:
    store = open_store(tmp_path / "store")
    with pytest.raises(ValueError, match=message):
        store.save(tokens, {name: array})  # type: ignore[arg-type]
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("meta", [{"a": {1, 2}}, {"a": float("nan")}, {"a": "x" * (9 << 20)}])
def test_meta_must_be_small_json(tmp_path: Path, meta: dict[str, object]) -> None:
    store = open_store(tmp_path)
    with pytest.raises((ValueError, TypeError)):
        store.save([1], {}, meta=meta)
    assert list(Path(tmp_path).rglob("*")) == []


@pytest.mark.parametrize("options", [{"chunk_tokens": 0}, {"codec": "gzip"}])
def test_bad_options(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        open_store(tmp_path, **options)


def test_strange_ids_are_misses(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for id in ("", "..", "../x", "0" * 31, "0" * 32):
        for method in (store.load, store.tokens, store.verify):
            with pytest.raises(CorruptSnapshot):
                method(id)


def test_threads_save_load_and_delete(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(4):
                tokens, arrays = ids(20 + seed, turn), state(20 + seed, turn)
                info = store.save(tokens, arrays)
                assert_same(store.load(info.id), tokens, arrays)
                store.refresh()
                if turn % 2:
                    store.delete(info.id)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.list()) == 8
    assert open_store(tmp_path).nbytes == store.nbytes


def test_the_bench_measures(tmp_path: Path) -> None:
    result = measure(tmp_path, state(40), 40, repeats=2)
    assert json.loads(json.dumps(result)) == result
    assert result["stored_bytes"] > result["state_bytes"] > 0
    assert all(value > 0 for value in result["median_s"].values())


def test_errors_are_of_the_cache() -> None:
    assert issubclass(CorruptSnapshot, CacheError)
    assert issubclass(StoreUnavailable, CacheError)
