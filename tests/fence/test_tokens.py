"""Masks and the device step against brute force: a bit is set exactly where its token can still become a whole text."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zllm_jax.fence import (
    DEAD,
    FREE,
    ByteAutomaton,
    Fences,
    FenceState,
    choices,
    compile_fences,
    decimal_number,
    fence_advance,
    fence_mask,
    fence_start,
    pack_bits,
    unpack_bits,
)
from zllm_jax.testing import ByteTokenizer

EOS = 0
# Tokens that span several states, share prefixes, cut a character, or contain bytes no automaton here knows.
VOCABULARY = [
    *(b"", b"", b"0", b"1", b"9", b"-", b".", b"-0", b"0.", b".5", b"12", b"-1.0", b"00", b"1.2.3", b"x"),
    *(b"y", b"ye", b"yes", b"es", b"s", b"n", b"no", b"o", b"yesno", b"\xc3", b"\xa9", b"n\xc3", b"\xa9!", b"\n"),
]
WORDS = choices(["yes", "no", "né"])


def completable(automaton: ByteAutomaton, state: int, vocabulary: Sequence[bytes]) -> bool:
    """Whether some tokens lead from `state` to an accepting one; by search, one text after the other."""
    seen, todo = set(), [state]
    while todo:
        state = todo.pop()
        if automaton.accepting[state]:
            return True
        if state != DEAD and state not in seen:
            seen.add(state)
            todo += [automaton.run(token, state) for token in vocabulary if token]
    return False


def brute_force(automaton: ByteAutomaton, prefix: bytes, vocabulary: Sequence[bytes], eos: int) -> list[bool]:
    return [
        automaton.accepts(prefix)
        if token == eos
        else bool(text) and completable(automaton, automaton.run(prefix + text), vocabulary)
        for token, text in enumerate(vocabulary)
    ]


@pytest.mark.parametrize("automaton", [decimal_number(), WORDS], ids=["number", "words"])
def test_masks_equal_brute_force_along_every_path(automaton: ByteAutomaton) -> None:
    fences = compile_fences([automaton], VOCABULARY, [EOS])
    advance, mask = jax.jit(fence_advance), jax.jit(fence_mask)
    seen = set()
    paths: list[tuple[FenceState, bytes]] = [(fence_start(fences.starts), b"")]
    while paths:
        state, prefix = paths.pop()
        legal = unpack_bits(np.asarray(mask(fences.tables, state)), len(VOCABULARY))[0]
        assert legal.tolist() == brute_force(automaton, prefix, VOCABULARY, EOS), prefix
        assert legal.any(), f"stuck after {prefix!r}"
        for token, text in enumerate(VOCABULARY):
            after = advance(fences.tables, state, jnp.array([token], jnp.int32))
            assert (int(after.state[0]) != DEAD) == legal[token]
            if legal[token] and text and int(after.state[0]) not in seen:
                seen.add(int(after.state[0]))
                paths.append((after, prefix + text))
    assert len(seen) >= automaton.num_states - 2  # all but DEAD and perhaps the start


def test_a_bit_is_a_tokens_bytes_having_transitions() -> None:
    # With every byte in the vocabulary a text can be completed wherever the automaton itself can go on.
    tokenizer = ByteTokenizer()
    vocabulary = [*tokenizer.vocabulary(), *VOCABULARY]
    automaton = decimal_number()
    fences = compile_fences([automaton], vocabulary, tokenizer.eos_ids)
    for state in range(1, automaton.num_states):
        legal = unpack_bits(np.asarray(fences.tables.masks), len(vocabulary))[
            state + fences.starts[0] - automaton.start
        ]
        expected = [bool(text) and automaton.run(text, state) != DEAD for text in vocabulary]
        expected[tokenizer.eos_id] = bool(automaton.accepting[state])
        assert legal.tolist() == expected


def test_a_token_that_ends_in_a_blind_alley_is_not_legal() -> None:
    # "ab" could only go on with "c", which this vocabulary has not.
    fences = compile_fences([choices(["abc", "ad"])], [b"", b"ab", b"a", b"d"], [EOS])
    first = unpack_bits(np.asarray(fences.tables.masks), 4)[fences.starts[0]]
    assert first.tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match="automaton 1 cannot be completed"):
        compile_fences([choices(["a"]), choices(["b"])], [b"", b"a"], [EOS])


@pytest.fixture(scope="module")
def both() -> Fences:
    return compile_fences([decimal_number(), WORDS], VOCABULARY, [EOS])


def test_each_row_follows_its_own_fence(both: Fences) -> None:
    alone = [compile_fences([automaton], VOCABULARY, [EOS]) for automaton in (decimal_number(), WORDS)]
    state = fence_start([both.starts[1], FREE, both.starts[0]])
    single = [fence_start(fences.starts) for fences in alone]
    row = {text: token for token, text in enumerate(VOCABULARY)}
    for words, number in ((b"n", b"-1.0"), (b"\xc3", b"9"), (b"\xa9", b"12")):
        mask = np.asarray(fence_mask(both.tables, state))
        for i, one in ((0, 1), (2, 0)):
            np.testing.assert_array_equal(mask[i], np.asarray(fence_mask(alone[one].tables, single[one]))[0])
        assert unpack_bits(mask[1], len(VOCABULARY)).all()
        tokens = jnp.array([row[words], EOS, row[number]], jnp.int32)
        state = fence_advance(both.tables, state, tokens)
        single = [fence_advance(alone[one].tables, single[one], tokens[i : i + 1]) for one, i in ((0, 2), (1, 0))]
    accepting = np.asarray(both.tables.accepting)[np.asarray(state.state)]
    assert accepting.all()


def test_a_draft_is_probed_on_a_copy(both: Fences) -> None:
    start = fence_start([both.starts[0]])
    draft = [VOCABULARY.index(text) for text in (b"-1.0", b"yes", b"9")]

    def step(state: FenceState, token: jax.Array) -> tuple[FenceState, tuple[FenceState, jax.Array]]:
        after = fence_advance(both.tables, state, token[None])
        return after, (after, fence_mask(both.tables, after))

    _, (states, masks) = jax.jit(lambda state, draft: jax.lax.scan(step, state, draft))(
        start, jnp.array(draft, jnp.int32)
    )
    verified = FenceState(states.state[0])
    assert verified.state.tolist() == fence_advance(both.tables, start, jnp.array(draft[:1], jnp.int32)).state.tolist()
    assert states.state[1:].tolist() == [[DEAD], [DEAD]]
    assert not np.asarray(masks[1:]).any()
    assert start.state.tolist() == [both.starts[0]]


def test_the_step_compiles_once(both: Fences) -> None:
    compiled = jax.jit(lambda *arguments: fence_advance(*arguments))  # its own function: the cache is the function's
    state = fence_start(both.starts)
    for tokens in ([2, 15], [11, 17], [1, 1]):
        state = compiled(both.tables, state, jnp.array(tokens, jnp.int32))
    assert compiled._cache_size() == 1


def test_eos_leaves_the_state_and_specials_lead_nowhere(both: Fences) -> None:
    state = fence_advance(both.tables, fence_start([both.starts[0]]), jnp.array([2], jnp.int32))
    assert fence_advance(both.tables, state, jnp.array([EOS], jnp.int32)).state.tolist() == state.state.tolist()
    assert fence_advance(both.tables, state, jnp.array([1], jnp.int32)).state.tolist() == [DEAD]


def test_an_eos_with_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="EOS token has bytes"):
        compile_fences([WORDS], VOCABULARY, [2])


@pytest.mark.parametrize("num_tokens", [1, *range(32_001, 32_033)])
def test_packing_at_every_vocabulary_size(num_tokens: int) -> None:
    bits = np.random.default_rng(num_tokens).random((3, num_tokens)) < 0.5
    words = pack_bits(bits)
    assert words.shape == (3, -(-num_tokens // 32))
    assert words.dtype == np.uint32
    for token in {0, num_tokens // 2, num_tokens - 1}:
        assert ((words[:, token // 32] >> np.uint32(token % 32)) & 1 == bits[:, token]).all()
    np.testing.assert_array_equal(unpack_bits(words, num_tokens), bits)
    assert np.bitwise_count(words).sum() == bits.sum()  # nothing is set beyond V
