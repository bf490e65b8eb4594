"""Several processes share a folder: no corruption, and each sees what the others committed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cache.snapshots import REPO, assert_saved, bytes_below, chunk_files, layout, open_store, save, state
from zllm_jax.cache.snapshot import Base
from zllm_jax.cache.snapshot_bench import load_whole
from zllm_jax.errors import CacheError, CorruptSnapshot, StoreUnavailable


def test_each_sees_what_the_other_did(tmp_path: Path) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    assert not two.changed()
    info = save(one, 40)
    assert not one.changed()  # it knows what it did itself
    assert two.changed()
    assert two.changed()  # until it looks
    assert_saved(two, info.id, 40)
    two.refresh()
    assert not two.changed()
    assert [found.id for found in two.list()] == [info.id]
    assert two.nbytes == one.nbytes
    longer = save(two, 60, base=Base(info.id, 40))
    assert one.changed()
    two.delete(info.id)
    with pytest.raises(CorruptSnapshot, match="No such file"):
        one.tokens(info.id)
    one.delete(info.id)  # already gone: nothing to do
    assert [found.id for found in one.list()] == [longer.id]  # who changes something looks first
    assert_saved(one, longer.id, 60)
    assert one.nbytes == bytes_below(tmp_path)


def test_who_deletes_spares_what_others_committed_meanwhile(tmp_path: Path) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    info = save(one, 40)
    two.refresh()
    longer = save(two, 60, base=Base(info.id, 40))
    assert set(chunk_files(one, info.id)) & set(chunk_files(one, longer.id))
    one.delete(info.id)
    two.verify(longer.id)


def test_the_collector_spares_what_is_being_written_elsewhere(tmp_path: Path) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    writer = one.writer([1] * 32, {"a": layout()["paged.v.0"]})
    writer.put(0, 32, 0, {"a": state(32, 0, {"a": layout()["paged.v.0"]})["a"]})
    assert two.gc() == 0
    assert open_store(tmp_path).list() == []
    info = writer.commit()
    two.refresh()
    two.verify(info.id)


def test_the_quota_counts_what_others_wrote(tmp_path: Path) -> None:
    one = open_store(tmp_path)
    size = save(one, 64).nbytes
    two = open_store(tmp_path, max_bytes=int(2.5 * size))
    for seed in range(1, 5):
        save(one, 64, seed)
    kept = save(two, 64, 9)
    assert two.nbytes == bytes_below(tmp_path) <= 2.5 * size
    assert kept.id in [info.id for info in two.list()]


def live(root: str, number: int, steps: int) -> None:
    """Save, continue, load, delete and collect at random, a few conversations only, so that files are shared."""
    rng = random.Random(number)
    store = open_store(root, max_bytes=1 << 20)
    for _ in range(steps):
        store.refresh()
        infos = store.list()
        action = rng.choice(["save", "save", "continue", "continue", "load", "delete", "gc", "verify"])
        one = rng.choice(infos) if infos else None
        try:
            if action == "save":
                seed = rng.randrange(3)
                save(store, rng.randint(1, 150), seed, meta={"seed": seed})
            elif action == "gc":
                store.gc()
            elif one is None:
                continue
            elif action == "continue":
                base, count = rng.randint(1, one.num_tokens), one.num_tokens + rng.randint(1, 60)
                save(store, count, one.meta["seed"], base=Base(one.id, base), meta=dict(one.meta))
            elif action == "load":
                assert_saved(store, one.id, one.num_tokens, one.meta["seed"])
            elif action == "verify":
                store.verify(one.id)
            else:
                store.delete(one.id)
        except StoreUnavailable as error:
            assert "write without a base" in str(error), error  # noqa: PT017
        except CorruptSnapshot as error:  # deleted by another one in between
            assert "No such file" in str(error) or "is missing" in str(error), error  # noqa: PT017
    print("done", flush=True)


def share(root: Path, processes: int, steps: int) -> None:
    code = (
        "import sys; from tests.cache.test_snapshot_processes import live; live(sys.argv[1], *map(int, sys.argv[2:]))"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(root), str(number), str(steps)],
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    for process in running:
        out, errors = process.communicate(timeout=280)
        assert out == "done\n", errors
        assert "quarantine" not in errors
    store = open_store(root, grace_s=0.0)
    assert store.list()
    for info in store.list():
        store.verify(info.id)
        assert_saved(store, info.id, info.num_tokens, info.meta["seed"])
    assert store.nbytes == bytes_below(root)
    assert not list(root.glob("*/quarantine"))


def test_two_processes_at_once(tmp_path: Path) -> None:
    share(tmp_path, 2, 60)


@pytest.mark.slow
def test_four_processes_for_long(tmp_path: Path) -> None:
    share(tmp_path, 4, 1000)


def test_a_load_meets_a_deletion(tmp_path: Path) -> None:
    """Between opening a snapshot and reading it: a miss, and nothing to set aside."""
    one, two = open_store(tmp_path), open_store(tmp_path)
    info = save(one, 64)
    with one.reader(info.id, layout()) as reader:
        two.delete(info.id)
        with pytest.raises(CacheError):
            reader.fixed(0)
    one.quarantine(info.id, "gone")
    assert not list(tmp_path.glob("*/quarantine/*"))
    again = save(one, 64)
    assert load_whole(one, again.id, layout())
    assert_saved(one, again.id, 64)
