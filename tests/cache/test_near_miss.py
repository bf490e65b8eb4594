"""A near miss says where a prompt and a stored state part."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cache.driver import Driver, open_store, prompt
from zllm_jax.cache.near_miss import near_miss
from zllm_jax.testing import ScriptedBackend


def parted(common: int, here: int, there: int) -> tuple[np.ndarray, np.ndarray]:
    """A prompt and a stored state with so many equal tokens, then so many of their own."""
    shared = np.arange(common) % 100
    return np.append(shared, np.full(here, 200)), np.append(shared, np.full(there, 201))


@pytest.mark.parametrize(
    ("common", "here", "there", "reused", "is_one"),
    [
        (1024, 5, 5000, 0, True),  # long, and nothing of it is reused
        (1023, 5, 5000, 0, False),
        (1024, 5, 5000, 1024, False),  # an ordinary fork
        (90, 5, 10, 0, True),
        (89, 5, 11, 0, False),
        (90, 5, 10, 90, True),  # nearly all, and yet the rest is lost
        (90, 5, 0, 90, False),  # a continuation
        (90, 0, 10, 89, False),  # the same prompt again
    ],
)
def test_what_counts_as_one(common: int, here: int, there: int, reused: int, is_one: bool) -> None:
    tokens, stored = parted(common, here, there)
    assert (near_miss(tokens, stored, common, reused) is not None) is is_one


def test_it_names_the_tokens_around() -> None:
    tokens, stored = parted(1500, 20, 3)
    found = near_miss(tokens, stored, 1500, 7)
    assert found is not None
    assert (found.common, found.stored_tokens, found.reused_tokens) == (1500, 1503, 7)
    assert found.before == tuple(range(92, 100))
    assert (found.here, found.there) == ((200,) * 8, (201,) * 3)


def test_a_nonce_at_the_start_of_the_last_turn_is_explained(tmp_path: object) -> None:
    one = Driver(ScriptedBackend(window=6, max_pages=32, num_pages=64))
    rows = one.run(prompt(60)).rows
    changed = [*rows[:-2], 255 - rows[-2], 5, 5]
    lease = one.acquire(changed)
    assert lease is not None
    assert lease.cached_tokens == 0  # a ring cannot be cut
    assert lease.near_miss is not None
    assert (lease.near_miss.common, lease.near_miss.here[0]) == (len(rows) - 2, 255 - rows[-2])
    one.cache.abort(lease)
    again = one.acquire([*rows, 1])
    assert again is not None
    assert again.near_miss is None
    one.cache.abort(again)
    one.close()


def test_a_state_on_disk_is_named_too(tmp_path: object) -> None:
    one = Driver(ScriptedBackend(window=6, max_pages=32, num_pages=64), open_store(tmp_path))  # type: ignore[arg-type]
    rows = one.run(prompt(60)).rows
    one.cache.evict()
    lease = one.acquire([*rows[:-2], 255 - rows[-2], 5, 5])
    assert lease is not None
    assert lease.near_miss is not None
    one.cache.abort(lease)
    one.close()
