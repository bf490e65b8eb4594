"""The loop guard: legal repetition passes, loops are stopped, the arrays do what the host's form does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from tests.fence.guard_texts import LEGAL, LOOPING
from tests.fence.small_guard import SMALL
from zllm_jax.checkpoint import open_checkpoint
from zllm_jax.dialect import Tokenizer, load_tokenizer
from zllm_jax.fence.guard import (
    NO_TOKEN,
    LoopGuard,
    guard_advance,
    guard_ends,
    guard_excluded,
    guard_start,
    word_tokens,
)
from zllm_jax.fence.guard_device import combine, excluding_mask, guard_rows, rows_advance, rows_end, rows_excluded
from zllm_jax.fence.vocabulary import pack_bits, unpack_bits

GUARD = LoopGuard()


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    files = open_checkpoint(smollm2).tokenizer
    assert files is not None
    return load_tokenizer(files)


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    return word_tokens([tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)])


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> dict[str, list[int]]:
    return {name: tokenizer.encode(text, add_bos=False) for name, text in (LEGAL | LOOPING).items()}


def stopped_at(texts: dict[str, list[int]], words: npt.NDArray[np.bool_], guard: LoopGuard) -> dict[str, int]:
    """The place in each text whose token was excluded; -1 where it passes."""
    names = sorted(texts, key=lambda name: len(texts[name]))
    longest = max(map(len, texts.values()))
    padded = np.full((longest, len(names)), NO_TOKEN, np.int32)
    for row, name in enumerate(names):
        padded[: len(texts[name]), row] = texts[name]

    at = jnp.arange(len(names))

    def step(rows, token):
        excluded = rows_excluded(rows, at)
        hit = (excluded == token[:, None]).any(axis=1) & (token != NO_TOKEN)
        return rows_advance(rows, at, excluded, words, token), hit

    _, hits = jax.lax.scan(step, guard_rows(len(names), guard=guard), jnp.asarray(padded))
    hits = np.asarray(hits)
    return {name: int(hits[:, row].argmax()) if hits[:, row].any() else -1 for row, name in enumerate(names)}


def test_the_lists_are_long_enough() -> None:
    assert len(LEGAL) >= 40
    assert len(LOOPING) >= 40


def test_legal_repetition_passes(ids: dict[str, list[int]], words: npt.NDArray[np.bool_]) -> None:
    found = stopped_at({name: ids[name] for name in LEGAL}, words, GUARD)
    assert not {name: place for name, place in found.items() if place >= 0}


def test_every_loop_is_stopped(ids: dict[str, list[int]], words: npt.NDArray[np.bool_]) -> None:
    found = stopped_at({name: ids[name] for name in LOOPING}, words, GUARD)
    assert not [name for name, place in found.items() if place < 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prose_tokens", "chant_tokens", "symbol_tokens", "passage_tokens", "prose_words"])
def test_thresholds_four_times_off_fail_a_list(
    name: str, ids: dict[str, list[int]], words: npt.NDArray[np.bool_]
) -> None:
    """Each of them is held by the texts, from one side at least."""
    wrong = 0
    for factor in (0.25, 4):
        guard = replace(GUARD, **{name: max(1, int(getattr(GUARD, name) * factor))}) if ordered(name, factor) else None
        if guard is not None:
            found = stopped_at(ids, words, guard)
            wrong += any((found[text] >= 0) != (text in LOOPING) for text in found)
    assert wrong


def ordered(name: str, factor: float) -> bool:
    """Whether the thresholds of the three kinds of pattern keep their order with this one changed."""
    values = {kind: getattr(GUARD, kind) for kind in ("prose_tokens", "chant_tokens", "symbol_tokens")}
    if name in values:
        values[name] = int(values[name] * factor)
    return list(values.values()) == sorted(values.values())


@pytest.mark.parametrize("num_symbols", [2, 3, 6])
def test_the_arrays_do_what_the_host_does(num_symbols: int) -> None:
    """Texts that loop and are broken again, as random walks that mostly go on as they did."""
    rng = np.random.default_rng(num_symbols)
    words = np.array([False, False, True, True, True, True, True])
    B, T = 3, 250
    at = jnp.arange(B)
    excluding, advance = jax.jit(rows_excluded), jax.jit(rows_advance)
    rows, host = guard_rows(B, guard=SMALL), [guard_start(SMALL) for _ in range(B)]
    texts: list[list[int]] = [[] for _ in range(B)]
    excluded = 0
    for _ in range(T):
        tokens = []
        for text in texts:
            goes_on = len(text) > 0 and rng.random() < 0.9
            tokens.append(text[-6:][0] if goes_on else int(rng.integers(num_symbols)))
            text.append(tokens[-1])
        rows = advance(rows, at, excluding(rows, at), words, jnp.asarray(tokens, jnp.int32))
        host = [guard_advance(SMALL, words, state, token) for state, token in zip(host, tokens, strict=True)]
        now = excluding(rows, at)
        got = [set(row) - {NO_TOKEN} for row in np.asarray(now).tolist()]
        assert got == [set(guard_excluded(SMALL, state)) for state in host]
        assert np.asarray(rows.broken).tolist() == [state.broken for state in host]
        assert np.asarray(rows.foreseen).tolist() == [state.foreseen for state in host]
        assert np.asarray(rows_end(rows, at, now)).tolist() == [guard_ends(SMALL, state) for state in host]
        excluded += sum(map(len, got))
    assert excluded > 20
    assert max(state.broken for state in host) >= SMALL.end_after


def test_a_loop_that_was_left_makes_the_next_one_shorter() -> None:
    words = np.array([False, False, True, True, True])
    state, lengths = guard_start(SMALL), []
    for other in (0, 1, 0):
        length = 0
        while not guard_excluded(SMALL, state):
            state = guard_advance(SMALL, words, state, 2 + length % 2)
            length += 1
        lengths.append(length)
        assert guard_excluded(SMALL, state) == {2 + length % 2}
        state = guard_advance(SMALL, words, state, other)
    assert lengths == [10, 6, 6]  # 2 + 8, then 2 + 4: three repetitions are the least
    assert state.broken == 3


def test_where_both_allow_nothing_the_grammar_wins() -> None:
    V = 70
    legal = np.zeros((3, V), np.bool_)
    legal[0, [3, 40]] = legal[1, 69] = legal[2, [1, 2, 3]] = True
    excluded = jnp.asarray([[40, NO_TOKEN], [69, 69], [NO_TOKEN, NO_TOKEN]], jnp.int32)
    mask = combine(jnp.asarray(pack_bits(legal)), excluding_mask(excluded, 3))
    got = unpack_bits(np.asarray(mask), V)
    assert [np.flatnonzero(row).tolist() for row in got] == [[3], [69], [1, 2, 3]]


def test_words() -> None:
    tokens = [b" the", b"ha", b"A", b"AAAA", b"--", b"", b"0a", b"x", "é".encode(), "我".encode(), "═".encode()]
    assert word_tokens(tokens).tolist() == [True, True, *[False] * 6, True, True, False]
    assert word_tokens([b"\xe6\x88", b"\xe2\x95", b"\xf0\x9f", b"\x88"]).tolist() == [True, False, False, False]


def test_thresholds_that_make_no_sense_are_refused() -> None:
    for wrong in ({"prose_tokens": 0}, {"chant_tokens": 5000}, {"min_repeats": 1}, {"num_slots": 100}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LoopGuard(**wrong)
