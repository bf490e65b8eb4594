"""Whatever was done to the files: the saved bits, or CorruptSnapshot, or not listed. Never anything else."""

from __future__ import annotations

import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.faulty import Fault, FaultyFiles
from tests.cache.snapshots import (
    NAMESPACE,
    assert_same,
    assert_saved,
    chunk_files,
    layout,
    load_in_groups,
    manifest_file,
    open_store,
    save,
)
from zllm_jax.cache import snapshot_files
from zllm_jax.cache.manifest import BadManifest, parse, seal
from zllm_jax.cache.snapshot import Base, SnapshotStore, namespace_key
from zllm_jax.cache.snapshot_bench import load_whole
from zllm_jax.cache.snapshot_files import LocalFiles
from zllm_jax.errors import CorruptSnapshot, StoreUnavailable

TOKENS = 40
BUDGET_BYTES = 512 << 10  # above what an honest read of the small states here allocates


def refuses(store: SnapshotStore, id: str, match: str | None = None) -> None:
    """Every way to read finds the fault; a new process lists the entry and finds it too, or drops it with a reason."""
    ways: list[Callable[[], object]] = [
        lambda: load_whole(store, id, layout()),
        lambda: store.verify(id),
        lambda: load_in_groups(store, id, 16),
    ]
    for way in ways:
        with pytest.raises(CorruptSnapshot, match=match) as caught:
            way()
        assert caught.value.path
    again = open_store(Path(store.where).parent)
    if id in [info.id for info in again.list()]:
        with pytest.raises(CorruptSnapshot):
            again.verify(id)
    else:
        assert not manifest_file(store, id).exists()
        assert list(Path(store.where).glob(f"quarantine/*-{id}/reason"))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[SnapshotStore, str]:
    store = open_store(tmp_path)
    return store, save(store, TOKENS).id


def flip(data: bytes, rng: random.Random) -> bytes:
    position = rng.randrange(len(data))
    return data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :]


def absurd_number(data: bytes, rng: random.Random) -> bytes:
    """One number of a manifest becomes another one, under a right checksum; elsewhere eight bytes do."""
    number = rng.choice([0, -1, 1, 1 << 31, 1 << 40, 1 << 63, 10**30, TOKENS + 1])
    head, _, body = data.partition(b"\n")
    if not head.startswith(b"zllm-snapshot"):
        position = rng.randrange(max(1, len(data) - 8))
        return data[:position] + (number % (1 << 64)).to_bytes(8, "little") + data[position + 8 :]
    text, _, tokens = body.partition(b"\n")
    numbers = [place for place in range(len(text)) if text[place : place + 1].isdigit()]
    start = rng.choice(numbers)
    return seal(text[:start] + str(number).encode() + text[start + 1 :] + b"\n" + tokens)


def wrong_version(data: bytes, rng: random.Random) -> bytes:
    version = str(rng.choice([0, 1, 3, 99, 10**8, 10**12])).encode()
    if data.startswith(b"zllm-snapshot"):
        return data.replace(b"snapshot 2 ", b"snapshot " + version + b" ", 1)
    return version + data


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": flip,
    "truncate": lambda data, rng: data[: rng.randrange(len(data))],
    "extend": lambda data, rng: data + rng.randbytes(rng.randint(1, 64)),
    "overwrite": lambda data, rng: rng.randbytes(len(data)),
    "zeros": lambda data, rng: bytes(len(data)),
    "turn": lambda data, rng: data[len(data) // 2 :] + data[: len(data) // 2],
    "absurd number": absurd_number,
    "wrong version": wrong_version,
}


def corrupt(root: Path, count: int, seed: int) -> int:
    """Damage one file of a store of forks, `count` times; all the snapshots that need it, and no others, are misses.

    Nothing else than CorruptSnapshot is raised, no wrong byte is returned, and nothing large is allocated. Returns how
    many damages were seen (a number may be replaced by itself, or a chunk's bytes by equal ones).
    """
    rng = random.Random(seed)
    store = open_store(root)
    sizes = [TOKENS, 2 * TOKENS, 2 * TOKENS + 5]
    first = save(store, sizes[0], meta={"n": 7})
    found = [
        first,
        save(store, sizes[1], base=Base(first.id, sizes[0])),
        save(store, sizes[2], base=Base(first.id, 33)),
    ]
    needs = {info.id: {manifest_file(store, info.id), *chunk_files(store, info.id)} for info in found}
    files = sorted(set().union(*needs.values()))
    good = {path: path.read_bytes() for path in files}
    seen = 0
    for _ in range(count):
        path = rng.choice(files)
        other = rng.choice([one for one in files if one.parent == path.parent and one != path])
        damage = rng.choice([*DAMAGES, "swap"])
        bad = good[other] if damage == "swap" else DAMAGES[damage](good[path], rng)
        path.write_bytes(bad)
        seen += bad != good[path]
        for info, size in zip(found, sizes, strict=True):
            tracemalloc.start()
            try:
                tokens, arrays = load_whole(store, info.id, layout())
            except CorruptSnapshot as error:
                assert path in needs[info.id], (damage, error)  # noqa: PT017
            else:
                assert bad == good[path] or path not in needs[info.id] or harmless(path, bad, good[path]), damage
                assert_same(tokens, arrays, size, 0, None)
            finally:
                peak_bytes = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak_bytes < BUDGET_BYTES, (damage, path, peak_bytes)
        path.write_bytes(good[path])
        if seen % 50 == 0:
            restart(root, store, path, bad, good[path])
    for info in found:
        store.verify(info.id)
    return seen


def harmless(path: Path, bad: bytes, good: bytes) -> bool:
    """A manifest that says the same of the state: another time, or other words that nobody checks."""
    if path.parent.name != "manifests":
        return False
    one, two = parse(bad), parse(good)
    same = (one.id, one.namespace, one.chunk_tokens, one.layout) == (
        two.id,
        two.namespace,
        two.chunk_tokens,
        two.layout,
    )
    return same and (one.pieces, one.fixed) == (two.pieces, two.fixed) and np.array_equal(one.tokens, two.tokens)


def restart(root: Path, store: SnapshotStore, path: Path, bad: bytes, good: bytes) -> None:
    """A start that only looks lists nothing broken, and changes nothing."""
    path.write_bytes(bad)
    look = open_store(root, repair=False)
    for info in look.list():
        try:
            load_whole(look, info.id, layout())
        except CorruptSnapshot:
            assert len(bad) == len(good)  # the sizes were right; only reading finds out
    path.write_bytes(good)


def test_corruptions(tmp_path: Path) -> None:
    assert corrupt(tmp_path, 150, seed=0) > 120


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_corruptions(tmp_path: Path) -> None:
    assert corrupt(tmp_path, 10_000, seed=1) > 9_000


@pytest.mark.parametrize("damage", ["truncate", "extend"])
def test_a_restart_quarantines_what_has_another_size(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path)
    first, other = save(store, TOKENS), save(store, TOKENS, 1)
    second = save(store, 2 * TOKENS, base=Base(first.id, TOKENS))
    bad = chunk_files(store, first.id)[0]
    bad.write_bytes(DAMAGES[damage](bad.read_bytes(), random.Random(0)))
    again = open_store(tmp_path)
    assert [info.id for info in again.list()] == [other.id]
    reasons = [path.read_text() for path in Path(store.where).glob("quarantine/*/reason")]
    assert len(reasons) == 2
    assert all(str(bad) in reason and "the manifest says" in reason for reason in reasons)
    assert not bad.exists()
    assert_saved(again, save(again, TOKENS).id, TOKENS)
    assert second.id not in [info.id for info in open_store(tmp_path, grace_s=0.0).list()]


def test_missing_files(saved: tuple[SnapshotStore, str], tmp_path: Path) -> None:
    store, id = saved
    for path in [manifest_file(store, id), *chunk_files(store, id)]:
        shutil.move(path, tmp_path / "aside")
        with pytest.raises(CorruptSnapshot):
            load_whole(store, id, layout())
        shutil.move(tmp_path / "aside", path)
    assert_saved(store, id, TOKENS)
    chunk_files(store, id)[0].unlink()
    refuses(store, id, "No such file|is missing")


def test_renamed_snapshots(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    one, two = (save(store, TOKENS, seed).id for seed in range(2))
    manifest_file(store, one).rename(tmp_path / "aside")
    manifest_file(store, two).rename(manifest_file(store, one))
    (tmp_path / "aside").rename(manifest_file(store, two))
    refuses(store, one, "belongs to another")


def test_what_is_no_regular_file(saved: tuple[SnapshotStore, str], tmp_path: Path) -> None:
    store, id = saved
    for path in (manifest_file(store, id), *chunk_files(store, id)[:2], chunk_files(store, id)[-1]):
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
                load_whole(store, id, layout())
            with pytest.raises(CorruptSnapshot):
                store.verify(id)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            path.write_bytes(good)
    assert_saved(store, id, TOKENS)


def test_a_manifest_that_is_no_file_is_moved_away(saved: tuple[SnapshotStore, str]) -> None:
    store, id = saved
    manifest_file(store, id).unlink()
    manifest_file(store, id).mkdir()
    assert open_store(Path(store.where).parent).list() == []
    assert not manifest_file(store, id).exists()


def edit(store: SnapshotStore, id: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and give it a right checksum."""
    path = manifest_file(store, id)
    _, text, tokens = path.read_bytes().split(b"\n", 2)
    value = json.loads(text)
    change(value)
    path.write_bytes(seal(json.dumps(value).encode() + b"\n" + tokens))


@pytest.mark.parametrize("by", ["a reader", "the next start"])
def test_a_lie_about_anothers_file_costs_only_the_liar(tmp_path: Path, by: str) -> None:
    """A chunk is right for one tenant, place and size: a manifest may also be wrong in naming it."""
    store = open_store(tmp_path)
    honest, liar = save(store, TOKENS, tenant="a"), save(store, TOKENS, 1, tenant="b")
    whose = json.loads(manifest_file(store, honest.id).read_bytes().split(b"\n", 2)[1])["pieces"][0]

    def lie(value: dict[str, Any]) -> None:
        """Another's file, or in another's place, where it has another size too."""
        value["pieces"][0][3:] = whose[3:] if by == "a reader" else [*value["pieces"][-1][3:-1], whose[3]]

    edit(store, liar.id, lie)
    if by == "a reader":
        with pytest.raises(CorruptSnapshot) as caught:
            load_whole(store, liar.id, layout())
        store.quarantine(liar.id, str(caught.value))
    else:
        store = open_store(tmp_path)
    assert [info.id for info in store.list()] == [honest.id]
    assert_saved(store, honest.id, TOKENS)
    assert_saved(open_store(tmp_path), honest.id, TOKENS)


def test_what_others_broke_is_set_aside_by_who_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking changes nothing; while files move, other processes are out."""
    one, two = open_store(tmp_path), open_store(tmp_path)
    bad, good = save(one, TOKENS), save(one, TOKENS, 1)
    chunk_files(one, bad.id)[0].unlink()
    alone: list[bool] = []
    set_aside = LocalFiles.set_aside

    def watched(self: LocalFiles, *arguments: Any) -> str:
        monkeypatch.setattr(snapshot_files, "LOCK_WAIT_S", 0.0)
        with pytest.raises(StoreUnavailable), LocalFiles(self.root).exclusive():
            pass
        alone.append(True)
        return set_aside(self, *arguments)

    monkeypatch.setattr(LocalFiles, "set_aside", watched)
    two.refresh()
    assert [info.id for info in two.list()] == [good.id]
    assert list(two.broken) == [bad.id]
    assert manifest_file(two, bad.id).exists()
    two.gc()
    assert alone == [True]
    assert not two.broken
    assert not manifest_file(two, bad.id).exists()
    assert_saved(two, good.id, TOKENS, 1)


@pytest.mark.parametrize("fault", [("read", 1), ("stat", 0), ("read_into", 0)])
def test_who_cannot_be_asked_is_not_set_aside_with_a_liar(tmp_path: Path, fault: tuple[str, int]) -> None:
    store = open_store(tmp_path)
    honest, liar = save(store, TOKENS, tenant="a"), save(store, TOKENS, 1, tenant="b")
    whose = json.loads(manifest_file(store, honest.id).read_bytes().split(b"\n", 2)[1])["pieces"][0]
    edit(store, liar.id, lambda value: value["pieces"][0].__setitem__(slice(3, None), whose[3:]))
    files = FaultyFiles(store._files)
    again = open_store(files)
    with pytest.raises(CorruptSnapshot):
        again.verify(liar.id)  # finds one bad file
    files.plant(Fault(fault[0], "EIO", at=fault[1]))
    with suppress(StoreUnavailable):
        again.quarantine(liar.id, "a lie")
    assert files.fired == 1
    assert_saved(open_store(tmp_path, grace_s=0.0), honest.id, TOKENS)


def test_what_was_misread_once_keeps_its_files(tmp_path: Path) -> None:
    """Misread by one process, which then cannot even look again: for others it is whole."""
    files = FaultyFiles(open_store(tmp_path)._files)
    one, two = open_store(files, grace_s=0.0), open_store(tmp_path)
    good = save(two, TOKENS)
    files.plant(Fault("read", "flip"))
    one.refresh()
    assert list(one.broken) == [good.id]
    files.plant(Fault("stat", "EIO"))
    assert one.gc() == 0
    assert_saved(two, good.id, TOKENS)
    files.plant()
    one.gc()  # looks again
    assert [info.id for info in one.list()] == [good.id]


def test_a_deletion_that_failed_is_tried_again(tmp_path: Path) -> None:
    """Until then nobody loses a file that the manifest names."""
    files = FaultyFiles(open_store(tmp_path)._files)
    one = open_store(files)
    first, second = save(one, TOKENS), save(one, TOKENS)  # the same files
    two = open_store(tmp_path)
    files.plant(Fault("delete", "EIO", on=True))
    for info in (first, second):
        with pytest.raises(StoreUnavailable):
            one.delete(info.id)
    assert one.list() == []
    assert_saved(two, first.id, TOKENS)
    files.plant()
    other = save(one, TOKENS, 1)  # whoever is alone next
    two.refresh()
    assert [info.id for info in two.list()] == [other.id]
    assert {path.name for path in (Path(one.where) / "chunks").iterdir()} == {
        p.name for p in chunk_files(one, other.id)
    }


def in_array(index: int, **fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda value: value["arrays"][index].update(fields)


def in_piece(index: int, place: int, number: object) -> Callable[[dict[str, Any]], object]:
    return lambda value: value["pieces"][index].__setitem__(place, number)


def set_to(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda value: value.update(fields)


# arrays: count.0, paged.k.0 f32[3, 2, S, 8], paged.k.1, paged.v.0, paged.v.1, ring.k.0; pieces: 16, 16 and 8 rows
LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "absurd tokens": set_to(num_tokens=1 << 40),
    "more tokens": set_to(num_tokens=TOKENS + 1),
    "no tokens": set_to(num_tokens=0),
    "tokens null": set_to(num_tokens=None),
    "negative": in_array(1, shape=[3, 2, None, -8]),
    "absurd shape": in_array(1, shape=[1 << 30, 1 << 30, None, 1 << 30]),
    "overflowing shape": in_array(5, shape=[1 << 40] * 4),
    "larger shape": in_array(1, shape=[3, 2, None, 16]),
    "huge number": in_array(1, shape=[3, 2, None, 10**400]),
    "fraction": in_array(1, shape=[3, 2, None, 8.0]),
    "truth": in_array(1, shape=[3, 2, None, True]),
    "rank": in_array(1, shape=[1] * 100),
    "shape null": in_array(1, shape=None),
    "two token axes": in_array(1, shape=[3, None, None, 8]),
    "other axis": in_array(1, token_axis=0),
    "axis out of range": in_array(1, token_axis=4),
    "other stage": in_array(1, stage=1),
    "absurd stage": in_array(1, stage=1 << 40),
    "negative stage": in_array(1, stage=-1),
    "same size, other dtype": in_array(1, dtype="int32"),
    "unknown dtype": in_array(1, dtype="object"),
    "dtype of another kind": in_array(1, dtype=["f4"]),
    "path as a name": in_array(1, name="../../paged.k"),
    "absolute name": in_array(1, name="/etc"),
    "same name twice": in_array(1, name="ring.k.0"),
    "renamed": in_array(1, name="other"),
    "arrays null": set_to(arrays=None),
    "arrays of null": set_to(arrays=[None]),
    "no arrays": set_to(arrays=[]),
    "one array less": lambda value: value["arrays"].pop(),
    "no pieces": set_to(pieces=[]),
    "pieces null": set_to(pieces=None),
    "pieces of null": set_to(pieces=[None] * 3),
    "a piece less": lambda value: value["pieces"].pop(),
    "a piece twice": lambda value: value["pieces"].append(value["pieces"][-1]),
    "pieces turned": lambda value: value["pieces"].reverse(),
    "files of pieces turned": lambda value: [
        piece.__setitem__(slice(3, 5), piece[4:2:-1]) for piece in value["pieces"]
    ],
    "files of two pieces swapped": lambda value: (
        value["pieces"].__setitem__(0, [0, 16, 16, *value["pieces"][1][3:]]),
        value["pieces"].__setitem__(1, [16, 32, 16, *value["pieces"][0][3:]]),
    ),
    "a piece over a window": in_piece(0, 1, 17),
    "an empty piece": in_piece(0, 1, 0),
    "a gap": in_piece(1, 0, 17),
    "more rows": in_piece(2, 2, 16),
    "fewer rows": in_piece(0, 2, 8),
    "absurd rows": in_piece(2, 2, 1 << 60),
    "negative rows": in_piece(2, 2, -8),
    "a path as a chunk": in_piece(0, 3, "../manifests/" + "0" * 32),
    "no such chunk": in_piece(0, 3, "0" * 32),
    "chunk null": in_piece(0, 3, None),
    "chunk too long": in_piece(0, 3, "0" * 33),
    "a chunk less": lambda value: value["pieces"][0].pop(),
    "a chunk of two sizes": lambda value: value["pieces"][2].__setitem__(3, value["pieces"][0][3]),
    "fixed null": set_to(fixed=None),
    "no fixed": set_to(fixed=[]),
    "fixed of the wrong stage": lambda value: value["fixed"].reverse(),
    "fixed of nothing": set_to(fixed=["0" * 32, None]),
    "a piece's file as fixed": lambda value: value.update(fixed=[value["pieces"][0][3], None]),
    "other chunking": set_to(chunk_tokens=8),
    "chunking by zero": set_to(chunk_tokens=0),
    "absurd chunking": set_to(chunk_tokens=1 << 40),
    "large chunking": set_to(chunk_tokens=1 << 16),
    "other id": set_to(id="0" * 32),
    "other namespace": set_to(namespace="0" * 32),
    "other tenant": set_to(tenant="another"),
    "id null": set_to(id=None),
    "tenant null": set_to(tenant=None),
    "time": set_to(created_s=float("inf")),
    "time null": set_to(created_s=None),
    "meta": set_to(meta=[]),
    "more fields": set_to(extra=1),
    "fewer fields": lambda value: value.pop("meta"),
}
SAME_BITS = ("large chunking",)  # it lies about windows only


@pytest.mark.parametrize("lie", LIES)
def test_lies_with_a_right_checksum(saved: tuple[SnapshotStore, str], lie: str) -> None:
    """A manifest that is well formed and untrue is found out before anything large is allocated."""
    store, id = saved
    edit(store, id, LIES[lie])
    tracemalloc.start()
    try:
        if lie in SAME_BITS:
            assert_saved(store, id, TOKENS)
        else:
            with pytest.raises(CorruptSnapshot):
                load_whole(store, id, layout())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < BUDGET_BYTES


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"{}",
        b"zllm-snapshot 2 \n{}",
        b"zllm-snapshot 99999999999999999999 " + b"0" * 64 + b"\n{}",
        seal(b""),
        seal(b"\n"),
        seal(b"{}"),
        seal(b"null\n"),
        seal(b"[]\n"),
        seal(b"{}\n"),
        seal(b"\xff\xfe\n"),
        seal(b"[" * 100_000 + b"\n"),
        seal(b"9" * 10_000 + b"\n"),
        seal(b" " * (5 << 20) + b"\n"),
    ],
    ids=range(15),
)
def test_manifests_of_another_kind(saved: tuple[SnapshotStore, str], text: bytes) -> None:
    store, id = saved
    manifest_file(store, id).write_bytes(text)
    refuses(store, id)
    with pytest.raises(BadManifest):
        parse(text)


def test_sparse_giants(saved: tuple[SnapshotStore, str]) -> None:
    """Files that claim terabytes without taking them."""
    store, id = saved
    for path in (manifest_file(store, id), *chunk_files(store, id)[:1], chunk_files(store, id)[-1]):
        good = path.read_bytes()
        os.truncate(path, 1 << 40)
        with pytest.raises(CorruptSnapshot, match="bytes"):
            load_whole(store, id, layout())
        path.write_bytes(good)


def test_strange_company(saved: tuple[SnapshotStore, str]) -> None:
    """What others leave in the folders is neither listed nor touched."""
    store, id = saved
    folder = Path(store.where)
    strangers = [folder / "notes.txt", folder / "manifests" / "notes.txt", folder / "chunks" / "notes.txt"]
    for path in strangers:
        path.write_text("mine")
    (folder / "chunks" / ("e" * 32)).mkdir()
    again = open_store(folder.parent, grace_s=0.0)
    again.gc()
    assert [info.id for info in again.list()] == [id]
    assert all(path.read_text() == "mine" for path in strangers)
    assert (folder / "chunks" / ("e" * 32)).is_dir()
    assert folder.name == namespace_key(NAMESPACE)
