"""Turns and forks share files on disk: what a new state writes, what it refers to, what a quota may remove."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.cache.snapshots import (
    assert_saved,
    bytes_below,
    chunk_files,
    ids,
    layout,
    manifest_of,
    open_store,
    save,
    spec,
    state,
)
from zllm_jax.buffers import tokens_of
from zllm_jax.cache.snapshot import Base, SnapshotInfo, SnapshotWriter
from zllm_jax.cache.snapshot_bench import load_whole, save_whole
from zllm_jax.cache.snapshot_layout import MAX_PIECES, Piece, joined, missing_pieces, shared_pieces
from zllm_jax.cache.snapshot_ledger import Ledger, value_per_byte
from zllm_jax.errors import StoreUnavailable

ROWS = {"paged.k.0": spec(np.float32, (2, None, 4)), "paged.k.1": spec(np.int8, (None, 3), 1)}
ROW_BYTES = 2 * 4 * 4 + 3


def whole(ranges: list[tuple[int, int]]) -> list[Piece]:
    return [Piece(start, stop, stop - start, ("0" * 32,)) for start, stop in ranges]


def grown(pieces: list[Piece], shared: int, total: int, chunk_tokens: int) -> tuple[list[Piece], int]:
    """The pieces of a state that continues another one after `shared` rows, and the rows that it writes."""
    kept = shared_pieces(pieces, shared, total, chunk_tokens)
    new = missing_pieces(kept, total, chunk_tokens)
    return sorted([*kept, *whole(new)], key=lambda piece: piece.start), sum(stop - start for start, stop in new)


@pytest.mark.parametrize("seed", range(20))
def test_turns_and_forks_write_their_own_tokens_and_a_fifth(seed: int) -> None:
    """No window ends up in many pieces, and only windows that would are written anew."""
    rng = random.Random(seed)
    chunk_tokens = rng.choice([8, 64, 128])
    least = chunk_tokens // 8
    states: list[list[Piece]] = [whole(missing_pieces([], 3 * chunk_tokens, chunk_tokens))]
    for _ in range(200):
        base = rng.choice(states[-5:])
        shared = base[-1].stop if rng.random() < 0.7 else rng.randint(1, base[-1].stop)
        new = rng.randint(least, 3 * chunk_tokens) if rng.random() < 0.5 else least
        pieces, written = grown(base, shared, shared + new, chunk_tokens)
        in_window = [piece for piece in base if shared - shared % chunk_tokens <= piece.start < shared]
        assert new <= written <= 1.2 * new or (len(in_window) == MAX_PIECES and written < new + chunk_tokens)
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == shared + new
        for piece in pieces:
            assert piece.start // chunk_tokens == (piece.start + piece.rows - 1) // chunk_tokens
            assert piece.stop - piece.start <= piece.rows
        windows = [piece.start // chunk_tokens for piece in pieces]
        assert max(map(windows.count, windows)) <= MAX_PIECES
        states.append(pieces)


def test_turns_of_at_least_an_eighth_of_a_window_are_never_written_twice() -> None:
    rng = random.Random(0)
    pieces, total = whole(missing_pieces([], 100, 128)), 100
    for _ in range(500):
        new = rng.choice([16, 17, rng.randint(16, 400)])
        pieces, written = grown(pieces, total, total + new, 128)
        total += new
        assert written <= 1.2 * new


def test_small_pieces_at_the_end_join_what_comes_next() -> None:
    base = whole([(0, 16), (16, 20), (20, 21), (21, 22)])
    assert shared_pieces(base, 22, 27, 16) == base[:-1]  # one row more for five new ones
    assert shared_pieces(base, 22, 32, 16) == base[:-2]
    assert shared_pieces(base, 22, 52, 16) == base[:1]
    assert shared_pieces(base, 22, 22, 16) == base
    assert shared_pieces(base, 16, 99, 16) == base[:1]
    assert shared_pieces(base, 18, 19, 16) == [base[0], Piece(16, 18, 4, base[1].chunks)]
    assert shared_pieces(base, 0, 9, 16) == []


def test_missing_pieces_end_at_windows() -> None:
    assert missing_pieces([], 40, 16) == [(0, 16), (16, 32), (32, 40)]
    assert missing_pieces(whole([(0, 16), (20, 25)]), 40, 16) == [(16, 20), (25, 32), (32, 40)]
    assert joined([(0, 4), (4, 9), (12, 13)]) == ((0, 9), (12, 13))


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_of_turns_on_disk(tmp_path: Path, seed: int) -> None:
    """Each writes at most 1.2 times its own rows, and all hold their bits, whatever is deleted in between."""
    rng = random.Random(seed)
    store = open_store(tmp_path)
    saved: dict[str, tuple[np.ndarray, dict[str, np.ndarray]]] = {}

    def continued(base: str | None, shared: int, new: int, number: int) -> SnapshotInfo:
        tokens, arrays = ids(new, number), state(new, number, ROWS)
        if base is not None:
            old_tokens, old = saved[base]
            tokens = np.concatenate([old_tokens[:shared], tokens])
            arrays = {
                name: np.concatenate([tokens_of(old[name], one, 0, shared), arrays[name]], one.token_axis)
                for name, one in ROWS.items()
            }
        with store.writer(tokens, ROWS, base=None if base is None else Base(base, shared)) as writer:
            for stage, (name, one) in enumerate(ROWS.items()):
                for start, stop in writer.spans:
                    writer.put(start, stop, stage, {name: tokens_of(arrays[name], one, start, stop)})
            of_rows = writer.bytes_written
            info = writer.commit()
        assert new * ROW_BYTES <= of_rows <= 1.2 * new * ROW_BYTES
        assert writer.bytes_written > of_rows  # the manifest
        saved[info.id] = tokens, arrays
        return info

    continued(None, 0, 50, 1)
    for number in range(2, 30):
        base = rng.choice(list(saved))
        length = len(saved[base][0])
        shared = length if rng.random() < 0.6 else rng.randint(1, length)
        info = continued(base, shared, rng.randint(10, 60), number)
        assert info.num_tokens == len(saved[info.id][0])
        if len(saved) > 6:
            victim = rng.choice(list(saved))
            store.delete(victim)
            del saved[victim]
        assert store.nbytes == bytes_below(tmp_path)
    again = open_store(tmp_path, grace_s=0.0)
    assert again.nbytes == store.nbytes == bytes_below(tmp_path)
    for id, (tokens, arrays) in saved.items():
        found_tokens, found = load_whole(again, id, ROWS)
        assert np.array_equal(found_tokens, tokens)
        assert all(found[name].tobytes() == arrays[name].tobytes() for name in ROWS)
        again.verify(id)


def test_the_same_rows_are_written_once_without_a_base_too(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first, second = save(store, 64), save(store, 80)
    assert set(chunk_files(store, first.id)) < set(chunk_files(store, second.id))
    store.delete(first.id)
    assert_saved(store, second.id, 80)


def test_fixed_arrays_are_those_of_the_new_state(tmp_path: Path) -> None:
    """A base gives rows; its ring is another one."""
    store = open_store(tmp_path)
    first = save(store, 40)
    arrays = state(40) | {"ring.k.0": np.ones((2, 5, 8), np.float32)}
    second = save_whole(store, ids(40), layout(), arrays, base=Base(first.id, 40))
    assert load_whole(store, second.id, layout())[1]["ring.k.0"].tobytes() == arrays["ring.k.0"].tobytes()
    assert_saved(store, first.id, 40)


def test_a_base_that_does_not_fit_is_done_without(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    coarse = save(open_store(tmp_path, chunk_tokens=32), 40)
    other = save(store, 40, of=layout(1))
    store.refresh()
    for base in (coarse.id, other.id, "0" * 32):
        assert store.writer(ids(50), layout(), base=Base(base, 40)).spans == ((0, 50),)
    with pytest.raises(ValueError, match="not those of snapshot"):
        store.writer(ids(50, 1), layout(), base=Base(other.id, 40))
    for count in (-1, 41):
        with pytest.raises(ValueError, match="num_tokens"):
            store.writer(ids(50), layout(), base=Base(other.id, count))


def test_a_lost_file_of_the_base_is_written_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = save(store, 64)
    lost = manifest_of(store, first.id).pieces[1].chunks[0]
    (Path(store.where) / "chunks" / lost).unlink()
    with store.writer(ids(80), layout(), base=Base(first.id, 64)) as writer:
        assert writer.spans == ((16, 32), (64, 80))
    assert_saved(store, save(store, 80, base=Base(first.id, 64)).id, 80)
    store.verify(first.id)


def test_a_base_may_be_deleted_while_it_is_shared(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = save(store, 64)
    with store.writer(ids(70), layout(), base=Base(first.id, 64)) as writer:
        store.delete(first.id)
        assert store.gc() == 0
        put_all(writer, 70)
        info = writer.commit()
    assert_saved(store, info.id, 70)
    assert store.nbytes == bytes_below(tmp_path)


def test_deleting_spares_what_another_snapshot_names(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = save(store, 64)
    second = save(store, 100, base=Base(first.id, 64))
    fork = save(store, 40, base=Base(first.id, 40))
    store.delete(first.id)
    assert_saved(store, second.id, 100)
    store.delete(second.id)
    assert_saved(store, fork.id, 40)
    assert store.nbytes == bytes_below(tmp_path)


def test_a_base_that_another_process_deletes_is_said_to_be_gone(tmp_path: Path) -> None:
    """...and the caller may try again without it."""
    store, other = open_store(tmp_path), open_store(tmp_path)
    first = save(store, 64)
    with store.writer(ids(70), layout(), base=Base(first.id, 64)) as writer:
        other.delete(first.id)
        put_all(writer, 70)
        with pytest.raises(StoreUnavailable, match="write without a base"):
            writer.commit()
    assert store.list() == []
    assert bytes_below(tmp_path) == store.nbytes == 0
    assert_saved(store, save(store, 70).id, 70)


def put_all(writer: SnapshotWriter, num_tokens: int) -> None:
    arrays = state(num_tokens)
    for stage in range(2):
        mine = {name: one for name, one in layout().items() if one.stage == stage}
        for start, stop in writer.spans:
            paged = {n: tokens_of(arrays[n], one, start, stop) for n, one in mine.items() if one.token_axis is not None}
            writer.put(start, stop, stage, paged)
        writer.put_fixed(stage, {name: arrays[name] for name, one in mine.items() if one.token_axis is None})


def test_an_aborted_snapshot_leaves_what_others_share(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = save(store, 64)
    before = bytes_below(tmp_path)
    writer = store.writer(ids(90), layout(), base=Base(first.id, 64))
    put_all(writer, 90)
    for _ in range(2):
        writer.abort()
    assert bytes_below(tmp_path) == before
    assert_saved(store, first.id, 64)
    store.delete(first.id)
    assert bytes_below(tmp_path) == 0


def test_what_a_snapshot_is_worth() -> None:
    def info(num_tokens: int, last_used_s: float) -> SnapshotInfo:
        return SnapshotInfo("", "", "", num_tokens, 0, 0.0, last_used_s, {})

    now_s = 10_000.0
    plain = value_per_byte(info(1000, now_s), 1000, now_s)
    assert value_per_byte(info(2000, now_s), 1000, now_s) == 2 * plain
    assert value_per_byte(info(1000, now_s), 2000, now_s) == plain / 2
    assert value_per_byte(info(1000, now_s - 600), 1000, now_s) == plain / 2
    assert value_per_byte(info(1000, now_s + 600), 0, now_s) == 1000 * plain  # clocks differ; nothing is freed


def test_the_ledger_knows_what_is_owned_alone() -> None:
    def info(id: str) -> SnapshotInfo:
        return SnapshotInfo(id, "", "", 10, 0, 0.0, 0.0, {})

    rng = random.Random(0)
    ledger, live = Ledger(), dict[str, tuple[dict[str, int], int]]()
    sizes = {f"chunk {number}": rng.randint(1, 100) for number in range(12)}
    for step in range(400):
        if live and rng.random() < 0.45:
            id = rng.choice(list(live))
            chunks, _ = live.pop(id)
            others = {name for other, _ in live.values() for name in other}
            assert set(ledger.remove(id)) == chunks.keys() - others
        else:
            chunks = {name: sizes[name] for name in rng.sample(sorted(sizes), 4)}
            live[f"s{step}"] = chunks, step
            ledger.add(info(f"s{step}"), chunks, step)
        named = [name for chunks, _ in live.values() for name in chunks]
        assert ledger.nbytes == sum(sizes[name] for name in set(named)) + sum(own for _, own in live.values())
        for id, (chunks, own) in live.items():
            alone = sum(size for name, size in chunks.items() if named.count(name) == 1)
            assert ledger.own_bytes(id) == alone + own
    assert ledger.remove("unknown") == []


def test_the_quota_removes_what_is_worth_least(tmp_path: Path) -> None:
    size = save(open_store(tmp_path / "probe"), 64).nbytes
    quota = 3 * size + 300  # manifests differ by a few digits
    store = open_store(tmp_path / "store", max_bytes=quota)
    first, second, third = (save(store, 64, n) for n in range(3))
    for info, age_s in ((first, 0), (second, 7200), (third, 3600)):
        store._shelf.ledger.update(replace(info, last_used_s=info.created_s - age_s))
    fourth = save(store, 64, 3)
    assert {info.id for info in store.list()} == {first.id, third.id, fourth.id}
    assert store.nbytes == bytes_below(tmp_path / "store") <= quota
    with pytest.raises(StoreUnavailable, match="quota"):
        save(store, 1000)
    assert len(store.list()) == 3


def test_the_quota_never_removes_the_base(tmp_path: Path) -> None:
    first = save(open_store(tmp_path), 64)
    store = open_store(tmp_path, max_bytes=int(2.2 * first.nbytes))
    other = save(store, 64, 1)
    store._shelf.ledger.update(replace(first, last_used_s=0.0))
    second = save(store, 128, base=Base(first.id, 64))
    assert {info.id for info in store.list()} == {first.id, second.id}
    assert_saved(store, second.id, 128)
    with pytest.raises(StoreUnavailable, match="quota"):
        save(store, 500, base=Base(second.id, 128))
    assert other.id not in [info.id for info in store.list()]


def test_what_does_not_fit_beside_its_base_is_refused(tmp_path: Path) -> None:
    """...by its whole size at once; by what a fork leaves of the base unused, when that is known."""
    first = save(open_store(tmp_path), 128)
    store = open_store(tmp_path, max_bytes=int(1.5 * first.nbytes))
    with pytest.raises(StoreUnavailable, match="over the quota"):
        store.writer(ids(256), layout(), base=Base(first.id, 128))
    before = bytes_below(tmp_path)
    forked = state(180, 1)
    for name, one in layout().items():
        if one.token_axis is not None:
            tokens_of(forked[name], one, 0, 16)[...] = tokens_of(state(128)[name], one, 0, 16)
    tokens = np.concatenate([ids(16), ids(164, 1)])
    with pytest.raises(StoreUnavailable, match="and the bases"):
        save_whole(store, tokens, layout(), forked, base=Base(first.id, 16))
    assert [info.id for info in store.list()] == [first.id]
    assert bytes_below(tmp_path) == store.nbytes == before
    again = save(store, 180, 1)
    assert [info.id for info in store.list()] == [again.id]
    assert store.nbytes <= 1.5 * first.nbytes


def test_a_quota_that_was_lowered_is_met_by_gc(tmp_path: Path) -> None:
    infos = [save(open_store(tmp_path), 64, n) for n in range(3)]
    store = open_store(tmp_path, max_bytes=2 * infos[0].nbytes + 300)
    before = store.nbytes
    assert store.gc() == before - store.nbytes > 0
    assert len(store.list()) == 2
