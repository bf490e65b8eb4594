"""Processes that die, disks that fill, folders that cannot be written: a whole snapshot, or none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cache.snapshots import assert_saved, bytes_below, layout, manifest_file, open_store, python, save
from tests.killing import killed
from zllm_jax.cache.manifest import parse
from zllm_jax.cache.snapshot import Base
from zllm_jax.cache.snapshot_files import LocalFiles, Writing
from zllm_jax.errors import StoreUnavailable

WIDE = layout(3, width=64)


def write_forever(root: str, first: int) -> None:
    """Turns of conversations, each continuing the one before, of which every third is deleted."""
    store = open_store(root)
    for seed in range(first, 1 << 30):
        base = None
        for count in (100, 230, 300):
            info = save(store, count, seed, WIDE, base=base, meta={"seed": seed})
            base = Base(info.id, count)
            print(info.id, flush=True)
        if seed % 3 == 0:
            store.delete(info.id)
            print("deleted", info.id, flush=True)


def kill_and_check(root: Path, turns: int, seed: int) -> int:
    """Kill writers at random instants; after each, what is listed is whole and nothing that was committed is lost.

    Returns how many unfinished files the kills left behind.
    """
    writers = killed("tests.cache.test_snapshot_crash:write_forever", [root], turns=turns, seed=seed, within_s=0.15)
    return sum(check_after_kill(root, lines) for lines in writers)


def check_after_kill(root: Path, lines: list[str]) -> int:
    gone = {line.split()[1] for line in lines if line.startswith("deleted ")}
    committed = [line for line in lines if " " not in line and line not in gone]
    before = len(list(root.glob("*/chunks/*")))
    store = open_store(root, grace_s=0.0)
    left = before - len(list(root.glob("*/chunks/*")))
    listed = store.list()
    # The last one printed may have been deleted without word of it.
    assert set(committed[:-1]) <= {info.id for info in listed}
    assert not list(root.glob("*/quarantine"))
    for info in listed:
        store.verify(info.id)
        assert_saved(store, info.id, info.num_tokens, info.meta["seed"], WIDE)
    assert store.nbytes == bytes_below(root)
    for info in listed:
        store.delete(info.id)
    assert bytes_below(root) == 0
    return left


def test_killed_while_saving(tmp_path: Path) -> None:
    kill_and_check(tmp_path, turns=5, seed=0)


@pytest.mark.slow
def test_killed_while_saving_a_hundred_times(tmp_path: Path) -> None:
    assert kill_and_check(tmp_path, turns=100, seed=1) > 0  # some kills did hit the middle of a save


def test_the_manifest_is_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is written, every file that it names lies there under its final name, written to its end."""
    store = open_store(tmp_path)
    waited: set[str] = set()
    seen: list[str] = []
    write = LocalFiles.write

    def writing(files: LocalFiles, path: str, data: bytes) -> Writing:
        folder, name = path.split("/")
        if folder == "manifests":
            named = parse(data).chunks()
            assert waited == set(named)
            found = {name: stat.nbytes for name, stat in files.list("chunks").items()}
            assert found == named
            seen.append(name)
        begun = write(files, path, data)

        class Noted:
            def wait(self) -> None:
                begun.wait()
                waited.add(name)

        return Noted()

    monkeypatch.setattr(LocalFiles, "write", writing)
    info = save(store, 50)
    assert seen == [info.id]


def test_new_folders_are_on_disk_before_what_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore flushes a file and its folder; the folders above are flushed here, when each is made."""
    flushed: list[str] = []
    monkeypatch.setattr("zllm_jax.cache.snapshot_files._fsync", lambda folder: flushed.append(str(folder)))
    root = tmp_path / "new" / "root"
    store = open_store(root)
    save(store, 5)
    assert flushed[:4] == [str(tmp_path), str(root.parent), str(root), store.where]
    assert set(flushed[4:]) == {store.where}


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on file sizes stands for it: no chunk fits."""
    code = """
import resource, sys
from pathlib import Path
from tests.cache.snapshots import bytes_below, open_store, save
from tests.cache.test_snapshot_crash import WIDE
from zllm_jax.errors import StoreUnavailable
store = open_store(sys.argv[1])
kept = save(store, 20)
before = bytes_below(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    save(store, 20, 1, WIDE)
except StoreUnavailable as error:
    print(error)
assert bytes_below(Path(sys.argv[1])) == before
store.verify(kept.id)
print(len(store.list()))
"""
    done = python(code, tmp_path)
    message, count = done.stdout.splitlines() or [done.stderr, ""]
    assert message.startswith(f"cannot write {tmp_path}"), done.stderr
    assert "raise the limit on file sizes" in message
    assert count == "1"


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small disk needs root on Linux")
def test_a_really_full_disk(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    try:
        store = open_store(tmp_path)
        kept = save(store, 20)
        before = bytes_below(tmp_path)
        with pytest.raises(StoreUnavailable, match="free some space") as caught:
            save(store, 400, 1, WIDE)
        assert str(tmp_path) in str(caught.value)
        assert bytes_below(tmp_path) == before
        store.verify(kept.id)
        store.delete(kept.id)
        assert save(store, 20, 2) in store.list()
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
        save(store, 3)
    with pytest.raises(StoreUnavailable, match="choose another store"):
        store.refresh()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading goes on; root ignores modes, so the system calls themselves refuse."""
    store = open_store(tmp_path)
    info = save(store, 5)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    open_file = os.open

    def read_only(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            refuse()
        return open_file(path, flags, *rest, **more)

    for call in ("mkdir", "utime", "unlink"):
        monkeypatch.setattr(os, call, refuse)
    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(StoreUnavailable, match="make it accessible"):
        save(store, 5, 1)
    assert_saved(store, info.id, 5)
    look = open_store(tmp_path)
    assert_saved(look, info.id, 5)
    assert not look.changed()


def test_a_store_that_vanishes_comes_back(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    save(store, 5)
    shutil.rmtree(tmp_path / "store")
    assert store.changed()
    store.refresh()
    assert store.list() == []
    info = save(store, 5)
    assert manifest_file(store, info.id).is_file()
    assert_saved(store, info.id, 5)
