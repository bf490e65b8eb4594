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

from tests.cache.snapshots import (
    CHUNK_TOKENS,
    assert_same,
    assert_saved,
    bytes_below,
    chunk_files,
    ids,
    layout,
    load_in_groups,
    manifest_file,
    open_store,
    python,
    save,
    spec,
    state,
)
from zllm_jax.buffers import RowSpec
from zllm_jax.cache.snapshot import Base, SnapshotStore
from zllm_jax.cache.snapshot_bench import load_whole, measure, measure_drivers, save_whole, smollm2_state
from zllm_jax.cache.snapshot_layout import dtypes
from zllm_jax.errors import CacheError, CorruptSnapshot, StoreUnavailable


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33, 160])
@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_round_trip(tmp_path: Path, num_stages: int, num_tokens: int) -> None:
    store, of = open_store(tmp_path), layout(num_stages)
    info = save(store, num_tokens, of=of, tenant="t", meta={"turns": [1, 2], "text": "é"})
    assert_saved(store, info.id, num_tokens, of=of)
    assert (info.tenant, info.num_tokens, info.meta) == ("t", num_tokens, {"turns": [1, 2], "text": "é"})
    assert np.array_equal(store.tokens(info.id), ids(num_tokens))
    store.verify(info.id)


@pytest.mark.parametrize("group", [1, 16, 24, 32, 208])
def test_read_in_groups(tmp_path: Path, group: int) -> None:
    store = open_store(tmp_path)
    for num_tokens in (1, 16, 33, 160):
        info = save(store, num_tokens)
        assert_same(*load_in_groups(store, info.id, group), num_tokens, 0, None)


def test_a_part_is_read_without_the_rest(tmp_path: Path) -> None:
    store, of = open_store(tmp_path), {"rows": spec(np.int64, (None, 4)), "more": spec(np.int8, (None,), 1)}
    info = save(store, 64, of=of)
    with store.reader(info.id, of) as reader:
        before = reader.bytes_read
        room = np.zeros((40, 4), np.int64)
        filling = reader.fill(0, 16, 41, {"rows": room})
        filling.wait()
        assert filling.done()
        assert reader.bytes_read - before == 32 * 4 * 8  # the whole pieces of the 25 rows
    wanted = state(64, of=of)["rows"]
    assert np.array_equal(room[:25], wanted[16:41])
    assert not room[25:].any()


def test_all_that_was_read_is_counted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    info = save(store, 50)
    with store.reader(info.id, layout()) as reader:
        for stage in range(2):
            names = [name for name, one in layout().items() if one.stage == stage and one.token_axis is not None]
            reader.fill(stage, 0, 50, {name: state(50)[name] for name in names}).wait()
            reader.fixed(stage)
        assert reader.bytes_read == info.nbytes


@pytest.mark.parametrize("dtype", sorted(dtypes()))
@pytest.mark.parametrize("token_axis", [0, 1, 2, None])
def test_every_type_and_axis(tmp_path: Path, dtype: str, token_axis: int | None) -> None:
    shape: list[int | None] = [3, 4, 5]
    if token_axis is not None:
        shape[token_axis] = None
    of = {"a": spec(dtypes()[dtype], shape), "zero": spec(dtypes()[dtype], shape, 1)}
    arrays = state(37, of=of)
    arrays["zero"] = np.zeros_like(arrays["zero"])
    store = open_store(tmp_path)
    _, found = load_whole(store, save_whole(store, ids(37), of, arrays).id, of)
    assert all(found[name].tobytes() == arrays[name].tobytes() for name in of)


def test_rows_are_put_in_any_portions_and_from_any_strides(tmp_path: Path) -> None:
    of = {"view": spec(np.float32, (2, None, 3))}
    whole = np.arange(2 * 50 * 6, dtype=np.float32).reshape(50, 2, 6).transpose(1, 0, 2)[..., ::2]
    store = open_store(tmp_path)
    with store.writer(ids(50), of) as writer:
        room = np.empty((2, 50, 3), np.float32)
        for start, stop in ((0, 7), (7, 16), (16, 17), (17, 49), (49, 50)):
            part = room[:, : stop - start]
            part[...] = whole[:, start:stop]
            writer.put(start, stop, 0, {"view": part})
            part[...] = np.nan  # the writer has what it needs
        info = writer.commit()
    assert load_whole(store, info.id, of)[1]["view"].tobytes() == whole.tobytes()


def test_stages_may_come_in_any_order(tmp_path: Path) -> None:
    store, of = open_store(tmp_path), {"a": spec(np.int16, (None,)), "b": spec(np.int16, (None,), 3)}
    arrays = state(40, of=of)
    with store.writer(ids(40), of) as writer:
        writer.put(0, 20, 3, {"b": arrays["b"][:20]})
        writer.put(0, 40, 0, {"a": arrays["a"]})
        writer.put(20, 40, 3, {"b": arrays["b"][20:]})
        info = writer.commit()
    assert_saved(store, info.id, 40, of=of)


@pytest.mark.parametrize(
    ("start", "stop", "stage", "rows", "message"),
    [
        (0, 8, 1, {"a": np.zeros(8, np.int16)}, "stage 1 has no token arrays"),
        (0, 8, 0, {}, "token arrays are"),
        (0, 8, 0, {"a": np.zeros(8, np.int32)}, "must be int16"),
        (0, 8, 0, {"a": np.zeros(9, np.int16)}, "must be int16"),
        (8, 9, 0, {"a": np.zeros(1, np.int16)}, "row 0 is the next"),
        (0, 41, 0, {"a": np.zeros(41, np.int16)}, "row 0 is the next"),
        (0, 0, 0, {"a": np.zeros(0, np.int16)}, "row 0 is the next"),
    ],
)
def test_rows_that_do_not_fit(
    tmp_path: Path, start: int, stop: int, stage: int, rows: dict[str, Any], message: str
) -> None:
    store = open_store(tmp_path)
    with store.writer(ids(40), {"a": spec(np.int16, (None,)), "f": spec(np.int8, (2,))}) as writer:
        with pytest.raises(ValueError, match=message):
            writer.put(start, stop, stage, rows)
        with pytest.raises(ValueError, match="lacks the rows from 0 on"):
            writer.commit()
        writer.put(0, 40, 0, {"a": np.zeros(40, np.int16)})
        with pytest.raises(ValueError, match="lacks its fixed arrays"):
            writer.commit()
        for arrays in ({}, {"f": np.zeros(3, np.int8)}, {"f": np.zeros(2, np.int16)}):
            with pytest.raises(ValueError, match=r"fixed arrays|not int8"):
                writer.put_fixed(0, arrays)
        writer.put_fixed(0, {"f": np.zeros(2, np.int8)})
        info = writer.commit()
        with pytest.raises(ValueError, match="has ended"):
            writer.commit()
        writer.abort()  # too late: it stays
    assert [found.id for found in store.list()] == [info.id]


def test_room_that_does_not_fit(tmp_path: Path) -> None:
    store, of = open_store(tmp_path), {"a": spec(np.int16, (2, None))}
    info = save(store, 40, of=of)
    good = np.zeros((2, 48), np.int16)
    with store.reader(info.id, of) as reader:
        for start, stop, room in (
            (0, 41, good),
            (16, 16, good),
            (-16, 16, good),
            (0, 40, good[:, :39]),
            (0, 40, good.astype(np.int32)),
            (0, 40, np.zeros((48, 2), np.int16).T),
            (0, 16, good[:1]),
        ):
            with pytest.raises(ValueError, match=r"must be"):
                reader.fill(0, start, stop, {"a": room})
        with pytest.raises(ValueError, match="token arrays"):
            reader.fill(0, 0, 16, {})
    with pytest.raises(StoreUnavailable, match="closed"):
        reader.fill(0, 0, 16, {"a": good})
    reader.close()


def test_many_leading_rows_take_several_reads(tmp_path: Path) -> None:
    store, of = open_store(tmp_path), {"wide": spec(np.int16, (3000, None))}
    info = save(store, 33, of=of)
    with store.reader(info.id, of) as reader:
        room = np.zeros((3000, 40), np.int16)
        reader.fill(0, 0, 33, {"wide": room}).wait()
    assert room[:, :33].tobytes() == state(33, of=of)["wide"].tobytes()


def test_other_kvstores(tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}"
    store = open_store(root)
    first = save(store, 50)
    forked = save(store, 70, base=Base(first.id, 50))
    again = open_store(root, grace_s=0.0)
    assert {info.id for info in again.list()} == {first.id, forked.id}
    assert again.nbytes == store.nbytes
    assert_saved(again, forked.id, 70)
    assert not store.drop_page_cache(first.id)
    store.delete(first.id)
    assert_saved(store, forked.id, 70)
    store.quarantine(forked.id, "a test")
    assert store.nbytes == 0
    again.refresh()
    assert again.list() == []
    with pytest.raises(CorruptSnapshot, match="missing"):
        load_whole(store, forked.id, layout())
    again.gc()
    assert again._files.list("chunks") == {}


def test_file_url_is_a_folder(tmp_path: Path) -> None:
    info = save(open_store(f"file://{tmp_path}"), 3)
    assert [found.id for found in open_store(tmp_path).list()] == [info.id]


def test_a_restart_finds_what_was_saved(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    saved = [save(store, n, n, meta={"n": n}) for n in (5, 40)]
    again = open_store(tmp_path)
    assert {info.id: (info.nbytes, info.meta) for info in again.list()} == {i.id: (i.nbytes, i.meta) for i in saved}
    assert again.nbytes == store.nbytes
    for n, info in zip((5, 40), saved, strict=True):
        assert_saved(again, info.id, n, n)


def test_another_process_restores(tmp_path: Path) -> None:
    """...the bits that this one saved."""
    info = save(open_store(tmp_path), 70)
    code = """
import sys
from tests.cache.snapshots import assert_saved, open_store
store = open_store(sys.argv[1])
(info,) = store.list()
assert_saved(store, info.id, 70)
print(info.id)
"""
    done = python(code, tmp_path)
    assert done.stdout.strip() == info.id, done.stderr


def test_namespaces_never_meet(tmp_path: Path) -> None:
    mine, other = (SnapshotStore(tmp_path, namespace=name) for name in ("mine", "other"))
    info = save(mine, 4)
    other.refresh()
    assert other.list() == []
    with pytest.raises(CorruptSnapshot):
        other.tokens(info.id)
    save(other, 5, 1)
    manifest_file(mine, info.id).rename(manifest_file(other, info.id))
    with pytest.raises(CorruptSnapshot, match="another snapshot or namespace"):
        other.tokens(info.id)


def test_tenants_never_share_a_file(tmp_path: Path) -> None:
    """Not even for equal rows: whether a file exists says nothing about another tenant's prompts."""
    store = open_store(tmp_path)
    one = save(store, 40, tenant="one")
    two = save(store, 40, tenant="two", base=Base(one.id, 40))
    assert not set(chunk_files(store, one.id)) & set(chunk_files(store, two.id))
    assert_saved(store, two.id, 40)


def test_the_ledger_is_what_the_files_take(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = save(store, 100)
    second = save(store, 300, base=Base(first.id, 100))
    other = save(store, 20, 1)
    for info in (first, second, other):
        files = [manifest_file(store, info.id), *chunk_files(store, info.id)]
        assert info.nbytes == sum(path.stat().st_size for path in files)
    assert store.nbytes == bytes_below(tmp_path) < first.nbytes + second.nbytes + other.nbytes
    assert store.own_bytes(other.id) == other.nbytes
    for info in (first, other, second):
        before, own = store.nbytes, store.own_bytes(info.id)
        store.delete(info.id)
        assert before - own == store.nbytes == bytes_below(tmp_path)
    assert store.nbytes == store.own_bytes(first.id) == 0


def test_use_is_remembered_across_restarts(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first, second = (save(store, 8, n) for n in range(2))
    os.utime(manifest_file(store, second.id), (1e9, 1e9))
    store.reader(first.id, layout()).close()
    assert [info.id for info in open_store(tmp_path).list()] == [second.id, first.id]


def test_expectations(tmp_path: Path) -> None:
    store, right = open_store(tmp_path), layout()
    info = save(store, 12)
    wrong: list[dict[str, RowSpec]] = [
        {**right, "paged.k.0": spec(np.float16, (3, 2, None, 8))},
        {**right, "paged.k.0": spec(np.float32, (3, 2, 8, None))},
        {**right, "paged.k.0": spec(np.float32, (3, 2, None, 8), 1)},
        {**right, "ring.k.0": spec(np.float32, (2, 6, 8))},
        {**right, "more": spec(np.float32, (1,))},
        {name: value for name, value in right.items() if name != "count.0"},
    ]
    for expect in wrong:
        with pytest.raises(CorruptSnapshot, match="is expected"):
            store.reader(info.id, expect)
    store.reader(info.id, right).close()


def test_leftovers_of_a_crash_go_after_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    kept, lost = save(store, 30), save(store, 30, 1)
    left = [*chunk_files(store, lost.id), manifest_file(store, lost.id).with_name(lost.id + ".__lock")]
    manifest_file(store, lost.id).rename(left[-1])  # half-written, as the crash of a commit leaves it
    assert [found.id for found in open_store(tmp_path).list()] == [kept.id]
    assert all(path.exists() for path in left)  # young: another process may be writing it
    again = open_store(tmp_path)
    assert again.gc() == 0
    freed = sum(path.stat().st_size for path in left)
    assert open_store(tmp_path, repair=False, grace_s=0.0).gc() == freed
    assert not any(path.exists() for path in left)
    assert_saved(again, kept.id, 30)
    for path in left:
        path.write_bytes(b"again")
    with caplog.at_level(logging.WARNING):
        open_store(tmp_path, grace_s=0.0)
    assert not any(path.exists() for path in left)
    assert "never committed" in caplog.text


def test_a_look_changes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    whole, cut, left = (save(store, 30, seed) for seed in range(3))
    os.truncate(chunk_files(store, cut.id)[0], 10)
    manifest_file(store, left.id).unlink()
    before = sorted(tmp_path.rglob("*"))
    look = open_store(tmp_path, grace_s=0.0, repair=False)
    assert [info.id for info in look.list()] == [whole.id]
    assert list(look.broken) == [cut.id]
    assert "10 bytes" in look.broken[cut.id]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("version", [b"1", b"3"])
def test_another_version_is_left_alone(tmp_path: Path, version: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    info = save(store, 3)
    path = manifest_file(store, info.id)
    path.write_bytes(path.read_bytes().replace(b"snapshot 2 ", b"snapshot " + version + b" ", 1))
    again = open_store(tmp_path, grace_s=0.0)
    assert again.list() == []
    assert f"version {int(version)}" in caplog.text
    with pytest.raises(CorruptSnapshot, match="this program reads 2"):
        again.tokens(info.id)
    assert again.gc() == 0  # its chunks may be any
    assert path.exists()
    assert again.list() == []


def test_folders_of_version_1_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    old = Path(store.where) / ("0" * 32)
    old.mkdir(parents=True)
    (old / "manifest").write_bytes(b"zllm-snapshot 1 ")
    again = open_store(tmp_path, grace_s=0.0)
    assert "1 snapshots of version 1" in caplog.text
    again.gc()
    assert (old / "manifest").exists()


def test_quarantine_keeps_the_manifest_and_the_reason(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    infos = [save(store, 2, n) for n in range(10)]
    for info in infos:
        store.quarantine(info.id, f"reason of {info.id}")
    assert store.list() == []
    assert store.nbytes == bytes_below(tmp_path) == 0
    kept = sorted((Path(store.where) / "quarantine").iterdir())
    assert [path.name[21:] for path in kept] == [info.id for info in infos[2:]]
    for path in kept:
        assert path.name[21:] in (path / "reason").read_text()
        assert (path / f"manifests-{path.name[21:]}").exists()
    assert open_store(tmp_path).list() == []
    store.quarantine(infos[0].id, "again")  # already gone


def test_a_broken_file_takes_all_that_need_it_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """...and is never shared again: what is saved next is whole."""
    store = open_store(tmp_path)
    first = save(store, 40)
    second = save(store, 60, base=Base(first.id, 40))
    other = save(store, 40, 1)
    bad = next(path for path in chunk_files(store, first.id) if path in chunk_files(store, second.id))
    data = bytearray(bad.read_bytes())
    data[0] ^= 1
    bad.write_bytes(data)
    with pytest.raises(CorruptSnapshot, match="checksum") as caught:
        load_whole(store, second.id, layout())
    assert caught.value.path == str(bad)
    store.quarantine(second.id, str(caught.value))
    assert [info.id for info in store.list()] == [other.id]
    assert f"snapshot {first.id}" in caplog.text
    assert not bad.exists()
    assert store.nbytes == bytes_below(tmp_path)
    (aside,) = (Path(store.where) / "quarantine").iterdir()
    assert sorted(path.name for path in aside.iterdir()) == sorted(
        [f"chunks-{bad.name}", f"manifests-{first.id}", f"manifests-{second.id}", "reason"]
    )
    assert_saved(store, save(store, 60).id, 60)


def test_a_broken_file_is_written_again_by_who_needs_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    info = save(store, 40)
    bad = chunk_files(store, info.id)[0]
    bad.write_bytes(bytes(bad.stat().st_size))
    with pytest.raises(CorruptSnapshot):
        store.verify(info.id)
    again = save(store, 40, base=Base(info.id, 40))
    for id in (info.id, again.id):
        assert_saved(store, id, 40)


def test_page_cache_can_be_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    info = save(store, 20)
    assert store.drop_page_cache(info.id) is hasattr(os, "posix_fadvise")
    assert_saved(store, info.id, 20)


@pytest.mark.parametrize(
    ("tokens", "name", "one", "message"),
    [
        ([], "a", spec(float, (3,)), "tokens must be"),
        ([[1]], "a", spec(float, (3,)), "tokens must be"),
        ([0.5], "a", spec(float, (3,)), "tokens must be"),
        ([2**31], "a", spec(float, (3,)), "2\\*\\*31"),
        ([1], "../a", spec(float, (3,)), "array name"),
        ([1], "a", spec(complex, (3,)), "cannot be stored"),
        ([1], "a", spec(">f4", (3,)), "cannot be stored"),
        ([1], "a", spec(float, (0, 3)), "hold an element"),
        ([1], "a", spec(float, (1 << 20, 1 << 20)), "a chunk file holds"),
        ([1], "a", spec(float, (None, 1 << 24)), "a chunk file holds"),
        ([1], "a", RowSpec(np.dtype(float), (2, None), 2), "token_axis 2"),
        ([1], "a", RowSpec(np.dtype(float), (2, None), 0), "must have None"),
        ([1], "a", RowSpec(np.dtype(float), (2, 3), 0), "must have None"),
        ([1], "a", RowSpec(np.dtype(float), (2,), None, -1), "stage -1"),
        ([1], "a", RowSpec(np.dtype(float), (2,), None, 1 << 20), "stage 1048576"),
    ],
)
def test_what_cannot_be_stored(tmp_path: Path, tokens: object, name: str, one: RowSpec, message: str) -> None:
    store = open_store(tmp_path / "store")
    with pytest.raises(ValueError, match=message):
        store.writer(tokens, {name: one})  # type: ignore[arg-type]
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("meta", [{"a": {1, 2}}, {"a": float("nan")}, {"a": "x" * (9 << 20)}])
def test_meta_must_be_small_json(tmp_path: Path, meta: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        open_store(tmp_path).writer([1], {}, meta=meta)
    assert list(Path(tmp_path).rglob("*")) == []


def test_a_state_may_have_no_arrays(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    info = save_whole(store, ids(40), {}, {})
    assert np.array_equal(load_whole(store, info.id, {})[0], ids(40))


@pytest.mark.parametrize("chunk_tokens", [0, 1 << 20])
def test_bad_options(tmp_path: Path, chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match="chunk_tokens"):
        open_store(tmp_path, chunk_tokens=chunk_tokens)


def test_strange_ids_are_misses(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for id in ("", "..", "../x", "0" * 31, "0" * 32):
        for method in (store.tokens, store.verify):
            with pytest.raises(CorruptSnapshot):
                method(id)
        with pytest.raises(CorruptSnapshot):
            store.reader(id, layout())


def test_threads_save_load_fork_and_delete(tmp_path: Path) -> None:
    """All threads write the same conversation, so that they share, and delete, each other's files."""
    store = open_store(tmp_path)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            last = None
            for turn in range(6):
                count = 20 * (turn + 1) + number
                base = None if last is None else Base(last.id, last.num_tokens)
                info = save(store, count, base=base)
                assert_saved(store, info.id, count)
                store.refresh()
                if last is not None:
                    store.delete(last.id)
                last = info
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.list()) == 4
    assert store.nbytes == bytes_below(tmp_path) == open_store(tmp_path).nbytes


def test_a_closed_store_reads_no_more(tmp_path: Path) -> None:
    store, of = open_store(tmp_path), {"a": spec(np.int8, (None,))}
    info = save(store, 20, of=of)
    store.close()
    with store.reader(info.id, of) as reader:
        filling = reader.fill(0, 0, 20, {"a": np.zeros(20, np.int8)})
        with pytest.raises(StoreUnavailable, match="cannot read"):
            filling.wait()


def test_room_belongs_to_the_reads_that_began_until_all_have_ended(tmp_path: Path, monkeypatch: Any) -> None:
    """The second of three reads cannot begin; the first is still under way."""
    store, of = open_store(tmp_path), {"a": spec(np.int8, (None,))}
    info = save(store, 3 * CHUNK_TOKENS, of=of)
    gate, submit, calls = threading.Event(), store._threads.submit, [0]
    read_into = store._files.read_into

    def slowly(path: str, blocks: Any) -> None:
        assert gate.wait(20)
        read_into(path, blocks)

    def submitted(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("can't start new thread")
        return submit(*arguments)

    monkeypatch.setattr(store._files, "read_into", slowly)
    monkeypatch.setattr(store._threads, "submit", submitted)
    with store.reader(info.id, of) as reader:
        filling = reader.fill(0, 0, 3 * CHUNK_TOKENS, {"a": np.zeros(3 * CHUNK_TOKENS, np.int8)})
        assert not filling.done()
        gate.set()
        with pytest.raises(StoreUnavailable, match="new thread"):
            filling.wait()
        assert filling.done()


def test_the_bench_measures(tmp_path: Path) -> None:
    result = measure(tmp_path, *smollm2_state(40), 40, repeats=2)
    assert json.loads(json.dumps(result)) == result
    assert result["stored_bytes"] > result["state_bytes"] > 0
    assert all(value > 0 for value in result["median_s"].values())
    drivers = measure_drivers(tmp_path, values=4, value_bytes=1000, repeats=1)
    assert drivers["bytes"]["file written"] == 4000
    assert len(drivers["median_s"]) == 4


def test_errors_are_of_the_cache() -> None:
    assert issubclass(CorruptSnapshot, CacheError)
    assert issubclass(StoreUnavailable, CacheError)
