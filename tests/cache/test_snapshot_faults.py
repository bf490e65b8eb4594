"""Whatever fails at whatever call: a save raises StoreUnavailable and leaves nothing listed, a read is a miss."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.cache.faulty import Fault, FaultyFiles, every_call
from tests.cache.snapshots import NAMESPACE, assert_saved, bytes_below, layout, open_store, save, spec
from zllm_jax.cache.snapshot import Base, SnapshotStore, namespace_key
from zllm_jax.cache.snapshot_bench import load_whole
from zllm_jax.cache.snapshot_files import LocalFiles, open_files
from zllm_jax.errors import CacheError, CorruptSnapshot, StoreUnavailable

SOFT = ("announce", "touch")  # what fails there is no failure of the work


def faulty(root: Path) -> FaultyFiles:
    return FaultyFiles(open_files(root, namespace_key(NAMESPACE)))


def pins(store: SnapshotStore) -> int:
    return len(store._shelf.ledger._pins) + len(store._shelf.underway)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "late"])
@pytest.mark.parametrize("on", [False, True])
def test_a_save_that_fails_at_any_call(tmp_path: Path, kind: str, on: bool) -> None:
    files = faulty(tmp_path)
    store = open_store(files)
    base = save(store, 40)
    kept = save(store, 30, 1)
    threads, open_files_before = threading.active_count(), descriptors()

    def continued() -> str:
        return save(store, 90, base=Base(base.id, 40)).id

    calls = every_call(files, lambda: store.delete(continued()))
    for verb, number in [call for call in every_call(files, continued) if kind != "late" or call[0] == "write"]:
        for info in store.list():
            if info.num_tokens == 90:
                files.plant()
                store.delete(info.id)
        files.plant(Fault(verb, kind, number, on))
        if verb in SOFT or (verb, number) == ("changes", 1):  # the look after the work
            assert_saved(store, continued(), 90)
        else:
            with pytest.raises(StoreUnavailable):
                continued()
            assert files.fired
            listed = {info.id for info in store.list()}
            assert listed == {base.id, kept.id}
        assert pins(store) == 0
        files.plant()
        store.refresh()
        assert {info.num_tokens for info in store.list()} <= {40, 30, 90}
    assert len(calls) > 20
    for info in store.list():
        if info.num_tokens == 90:
            store.delete(info.id)
    again = open_store(tmp_path, grace_s=0.0)  # what could not be removed at the time is collected
    for info in again.list():
        again.verify(info.id)
    assert {base.id, kept.id} <= {info.id for info in again.list()}
    assert again.nbytes == bytes_below(tmp_path)
    assert threading.active_count() <= threads + 16  # TensorStore's own, which stay
    assert descriptors() <= open_files_before + 4


@pytest.mark.parametrize("kind", ["EIO", "short", "flip"])
def test_a_read_that_fails_at_any_call(tmp_path: Path, kind: str) -> None:
    files = faulty(tmp_path)
    store = open_store(files)
    info = save(store, 60)

    def load() -> None:
        load_whole(store, info.id, layout())

    for verb, number in every_call(files, load):
        if verb in SOFT or (kind != "EIO" and verb not in ("read", "read_into")):
            continue
        files.plant(Fault(verb, kind, number))
        with pytest.raises(CacheError) as caught:
            load()
        assert isinstance(caught.value, StoreUnavailable if kind == "EIO" else CorruptSnapshot)
        files.plant()
    assert_saved(store, info.id, 60)


def test_a_start_on_a_failing_disk(tmp_path: Path) -> None:
    """Either it says so, or it lists only what it could check."""
    info = save(open_store(tmp_path), 60)
    files = faulty(tmp_path)
    for verb, number in every_call(files, lambda: open_store(files)):
        files.plant(Fault(verb, "EIO", number))
        try:
            store = open_store(files)
        except StoreUnavailable:
            continue
        files.plant()
        for found in store.list():
            store.verify(found.id)
        store.refresh()
        assert [found.id for found in store.list()] == [info.id]


@pytest.mark.parametrize("verb", ["exclusive", "delete", "set_aside", "list", "changes"])
def test_what_cannot_be_removed_is_not_listed_again(tmp_path: Path, verb: str) -> None:
    files = faulty(tmp_path)
    store = open_store(files)
    one, two = save(store, 40), save(store, 40, 1)
    for method, info in ((store.delete, one), (lambda id: store.quarantine(id, "a test"), two)):
        files.plant(Fault(verb, "EIO"))
        try:
            method(info.id)
        except StoreUnavailable:
            if verb in ("delete", "set_aside"):
                assert info.id not in [found.id for found in store.list()]
                store.refresh()
                assert info.id not in [found.id for found in store.list()]
        files.plant()
        store.delete(info.id)
    assert store.list() == []
    store.gc()
    again = open_store(tmp_path, grace_s=0.0)
    assert again.list() == []
    assert again.nbytes == bytes_below(tmp_path) == 0


def test_closing_a_reader_waits_for_what_reads_into_the_room(tmp_path: Path) -> None:
    files = faulty(tmp_path)
    store, of = open_store(files), {"a": spec(np.int64, (None, 8))}
    info = save(store, 400, of=of)
    files.plant(Fault("read_into", "slow", 0, on=True))
    room = {"a": np.zeros((400, 8), np.int64)}
    reader = store.reader(info.id, of)
    filling = reader.fill(0, 0, 400, room)
    assert not filling.done()
    closing = threading.Thread(target=reader.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    files.gate.set()
    closing.join(30)
    assert not closing.is_alive()
    assert filling.done()
    with pytest.raises(StoreUnavailable, match="closed"):
        filling.wait()
    assert files.calls["read_into"] < 25  # those that had not begun never do
    before = room["a"].copy()
    assert np.array_equal(room["a"], before)
    files.plant()
    assert_saved(store, info.id, 400, of=of)


def test_a_writer_waits_while_too_much_is_unwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of writes that nobody has waited for never exceed the budget."""
    unwritten = most = 0

    class Counted:
        def __init__(self, writing: object, nbytes: int) -> None:
            self.writing, self.nbytes = writing, nbytes

        def wait(self) -> None:
            nonlocal unwritten
            self.writing.wait()  # type: ignore[attr-defined]
            unwritten -= self.nbytes

    write = LocalFiles.write

    def counting(files: LocalFiles, path: str, data: bytes) -> Counted:
        nonlocal unwritten, most
        unwritten += len(data)
        most = max(most, unwritten)
        return Counted(write(files, path, data), len(data))

    monkeypatch.setattr(LocalFiles, "write", counting)
    monkeypatch.setattr("zllm_jax.cache.snapshot_writer.IN_FLIGHT_BYTES", 10_000)
    store = open_store(tmp_path)
    assert_saved(store, save(store, 200).id, 200)
    assert unwritten == 0
    assert 5_000 < most <= 10_000


def test_the_lock_of_a_process_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for, but not for ever."""
    monkeypatch.setattr("zllm_jax.cache.snapshot_files.LOCK_WAIT_S", 0.1)
    store = open_store(tmp_path)
    info = save(store, 20)
    with LocalFiles(Path(store.where)).exclusive():
        with pytest.raises(StoreUnavailable, match="held by another process"):
            save(store, 20, 1)
        assert_saved(store, info.id, 20)
    assert [found.id for found in store.list()] == [info.id]
    assert_saved(store, save(store, 20, 1).id, 20, 1)
