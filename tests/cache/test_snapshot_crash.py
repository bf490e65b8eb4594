"""Processes that die, disks that fill, folders that cannot be written: a whole snapshot, or none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cache.snapshots import assert_same, entry_folder, ids, open_store, python, state
from tests.killing import killed
from zllm_jax.cache.manifest import parse
from zllm_jax.cache.snapshot_files import Files
from zllm_jax.errors import StoreUnavailable


def write_forever(root: str, first: int) -> None:
    store = open_store(root)
    for seed in range(first, 1 << 30):
        info = store.save(ids(300, seed), state(300, seed, width=64), meta={"seed": seed})
        print(info.id, flush=True)
        if seed % 3 == 0:
            store.delete(info.id)
            print("deleted", info.id, flush=True)


def kill_and_check(root: Path, turns: int, seed: int) -> int:
    """Kill writers at random instants; after each, what is listed is whole and nothing that was committed is lost.

    Returns how many unfinished entries the kills left behind.
    """
    writers = killed("tests.cache.test_snapshot_crash:write_forever", [root], turns=turns, seed=seed, within_s=0.15)
    return sum(check_after_kill(root, lines) for lines in writers)


def check_after_kill(root: Path, lines: list[str]) -> int:
    gone = {line.split()[1] for line in lines if line.startswith("deleted ")}
    committed = [line for line in lines if " " not in line and line not in gone]
    before = len(list(root.glob("*/*")))
    store = open_store(root, grace_s=0.0)
    listed = store.list()
    # The last one printed may have been deleted without word of it.
    assert set(committed[:-1]) <= {info.id for info in listed}
    for info in listed:
        seed = info.meta["seed"]
        store.verify(info.id)
        assert_same(store.load(info.id), ids(300, seed), state(300, seed, width=64))
    assert store.nbytes == sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    for info in listed:
        store.delete(info.id)
    return before - len(listed)


def test_killed_while_saving(tmp_path: Path) -> None:
    kill_and_check(tmp_path, turns=5, seed=0)


@pytest.mark.slow
def test_killed_while_saving_fifty_times(tmp_path: Path) -> None:
    assert kill_and_check(tmp_path, turns=50, seed=1) > 0  # some kills did hit the middle of a save


@pytest.mark.parametrize("step", ["prepare", "settle", "write"])
def test_a_failure_at_any_step_leaves_nothing(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    kept = store.save(ids(20), state(20))
    files: Files = store._files
    original = getattr(files, step)

    def fail(*arguments: object) -> object:
        original(*arguments)
        raise StoreUnavailable("on purpose")

    monkeypatch.setattr(files, step, fail)
    with pytest.raises(StoreUnavailable, match="on purpose"):
        store.save(ids(20, 1), state(20, 1))
    assert os.listdir(store.where) == [kept.id]
    assert store.list() == [kept]


def test_the_manifest_is_last_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is written, every other file lies there under its final name and the folders are on disk."""
    store = open_store(tmp_path)
    files: Files = store._files
    settled: list[str] = []
    seen: dict[str, int] = {}
    write, settle = files.write, files.settle

    def writing(path: str, data: bytes) -> int:
        id, name = path.split("/", 1)
        assert name == "manifest"
        assert settled == [id]
        seen.update(files.sizes(id) or {})
        assert seen == parse(data).files()
        return write(path, data)

    monkeypatch.setattr(files, "settle", lambda id: (settle(id), settled.append(id)))
    monkeypatch.setattr(files, "write", writing)
    store.save(ids(50), state(50))
    assert seen


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on file sizes stands for it: the third chunk does not fit."""
    code = """
import os, resource, sys
from tests.cache.snapshots import ids, open_store, state
from zllm_jax.errors import StoreUnavailable
store = open_store(sys.argv[1])
kept = store.save(ids(20), state(20))
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    store.save(ids(20, 1), state(20, 1, width=64))
except StoreUnavailable as error:
    print(error)
assert os.listdir(store.where) == [kept.id], os.listdir(store.where)
store.verify(kept.id)
print(len(store.list()))
"""
    done = python(code, tmp_path)
    message, count = done.stdout.splitlines() or [done.stderr, ""]
    assert message.startswith(f"cannot write {tmp_path}")
    assert "raise the limit on file sizes" in message
    assert count == "1"


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small disk needs root on Linux")
def test_a_really_full_disk(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    try:
        store = open_store(tmp_path)
        kept = store.save(ids(20), state(20))
        with pytest.raises(StoreUnavailable, match="free some space") as caught:
            store.save(ids(400, 1), state(400, 1, width=64))
        assert str(tmp_path) in str(caught.value)
        assert os.listdir(store.where) == [kept.id]
        store.verify(kept.id)
        store.delete(kept.id)
        assert store.save(ids(20, 2), state(20, 2)) in store.list()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnavailable, match="choose another store") as caught:
            open_store(root)
        assert str(root) in str(caught.value)


def test_the_folder_becomes_a_file(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    (tmp_path / "store").write_text("in the way")
    with pytest.raises(StoreUnavailable, match="choose another store"):
        store.save(ids(3), state(3))
    with pytest.raises(StoreUnavailable, match="choose another store"):
        store.refresh()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading goes on; root ignores modes, so the system call itself refuses."""
    store = open_store(tmp_path)
    info = store.save(ids(5), state(5))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    with pytest.raises(StoreUnavailable, match="make it accessible"):
        store.save(ids(5, 1), state(5, 1))
    assert_same(store.load(info.id), ids(5), state(5))


def test_a_store_that_vanishes_comes_back(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.save(ids(5), state(5))
    shutil.rmtree(tmp_path / "store")
    store.refresh()
    assert store.list() == []
    info = store.save(ids(5), state(5))
    assert entry_folder(store, info.id).is_dir()
