"""Pages and rings are counted: nobody owns what is free, nothing is free that somebody owns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zllm_jax.cache import Pool


def test_an_id_is_free_when_its_last_owner_lets_go() -> None:
    pool = Pool(3)
    first, second = pool.take(2)
    assert first != second
    pool.share([first])
    pool.release([first, second])
    assert (pool.free, pool.owners(first), pool.owners(second)) == (2, 1, 0)
    pool.release([first])
    assert (pool.free, pool.owners(first)) == (3, 0)


def test_misuse_is_refused_and_changes_nothing() -> None:
    pool = Pool(2)
    (taken,) = pool.take(1)
    with pytest.raises(ValueError, match="2 ids are wanted, 1 are free"):
        pool.take(2)
    pool.release([taken])
    with pytest.raises(ValueError, match=f"id {taken} is already free"):
        pool.release([taken])
    with pytest.raises(ValueError, match=f"id {taken} is free and cannot be shared"):
        pool.share([taken])
    assert pool.free == pool.size == 2


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 5)), max_size=60))
def test_free_and_owned_always_add_up(actions: list[tuple[str, int]]) -> None:
    pool, owned = Pool(6), [0] * 6
    for action, number in actions:
        if action == "take" and number <= pool.free:
            for id in pool.take(number):
                assert owned[id] == 0
                owned[id] = 1
        elif action == "share" and owned[number]:
            pool.share([number])
            owned[number] += 1
        elif action == "release" and owned[number]:
            pool.release([number])
            owned[number] -= 1
        assert [pool.owners(id) for id in range(6)] == owned
        assert pool.free == owned.count(0)
