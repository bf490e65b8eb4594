"""Masks and the device step against brute force: a bit is set exactly where its token can still become a whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fence.schema import randomly
from tests.fence.test_machine import members, nested
from zllm_jax.errors import Overloaded, UnsupportedGrammar
from zllm_jax.fence import (
    DEAD,
    FREE,
    FencePool,
    FenceState,
    Machine,
    Place,
    Position,
    Vocabulary,
    choices,
    compile_fence,
    compile_tokens,
    decimal_number,
    fence_advance,
    fence_mask,
    machine_of,
    pack_bits,
    pack_positions,
    tables,
    unpack_bits,
)
from zllm_jax.fence.schema import json_schema
from zllm_jax.runtime.fences import DeviceFences
from zllm_jax.values import Fence

EOS = 0
# Tokens that span several states, share prefixes, cut a character, or contain bytes no automaton here knows.
PIECES = [
    *(b"", b"", b"0", b"1", b"9", b"-", b".", b"-0", b"0.", b".5", b"12", b"-1.0", b"00", b"1.2.3", b"x"),
    *(b"y", b"ye", b"yes", b"es", b"s", b"n", b"no", b"o", b"yesno", b"\xc3", b"\xa9", b"n\xc3", b"\xa9!", b"\n"),
]
JSON_PIECES = [
    b'{"',
    b'": ',
    b'", "',
    b'"}',
    b"}}",
    b"}]",
    b'"], "',
    b"[[",
    b"]]",
    b"tru",
    b"null",
    b', "a',
    b"ab",
    b"a\xc3",
    b"abcdef",
    b"\xa9abcdef",
    b'\xc3\xa9\\n"',
    b'me": ',
]
BYTES = [bytes([byte]) for byte in range(256) if byte not in (0xF1, 0xF2, 0xF3)]
WORDS = machine_of(choices(["yes", "no", "né"]))
NUMBER = machine_of(decimal_number())


class Device:
    """One machine on the device, driven from the host."""

    def __init__(self, machine: Machine, vocabulary: Vocabulary, states: int = 1024) -> None:
        self.tables = compile_tokens(machine, vocabulary)
        self.fences = DeviceFences(FencePool(vocabulary, states))
        self.place = self.fences.load(self.tables)
        self.vocabulary = vocabulary
        self._mask, self._advance = jax.jit(fence_mask), jax.jit(fence_advance)

    def at(self, *positions: Position | None) -> FenceState:
        place = self.place
        return pack_positions([None if one is None else (place.states, place.returns, one) for one in positions])

    def legal(self, state: FenceState) -> np.ndarray:
        """bool[B, V]"""
        return unpack_bits(np.asarray(self._mask(self.fences.tables, state)), len(self.vocabulary))

    def after(self, state: FenceState, *tokens: int) -> FenceState:
        return jax.tree.map(np.asarray, self._advance(self.fences.tables, state, jnp.array(tokens, jnp.int32)))


def completable(machine: Machine, state: int, tokens: Sequence[bytes]) -> bool:
    """Whether some tokens lead from `state` to an accepting one; by search, one text after the other."""
    seen, todo = set(), [state]
    while todo:
        state = todo.pop()
        if machine.accepting[state]:
            return True
        if state != DEAD and state not in seen:
            seen.add(state)
            todo += [machine.run(token, Position(state)).state for token in tokens if token]
    return False


@pytest.mark.parametrize("machine", [NUMBER, WORDS], ids=["number", "words"])
def test_masks_equal_brute_force_along_every_path(machine: Machine) -> None:
    vocabulary = Vocabulary(PIECES, [EOS])
    device = Device(machine, vocabulary)
    seen = set()
    paths = [machine.begin]
    while paths:
        at = paths.pop()
        legal = device.legal(device.at(at))[0].tolist()
        expected = [
            machine.ended(at)
            if token == EOS
            else bool(text) and completable(machine, machine.run(text, at).state, PIECES)
            for token, text in enumerate(PIECES)
        ]
        assert legal == expected, at
        for token, text in enumerate(PIECES):
            after = machine.run(text, at)
            if legal[token] and text and after not in seen:
                seen.add(after)
                paths.append(after)
    assert len(seen) >= machine.num_states - 2  # all but DEAD and perhaps the start


def test_a_token_that_ends_in_a_blind_alley_is_not_legal() -> None:
    # "ab" could only go on with "c", which this vocabulary has not.
    device = Device(machine_of(choices(["abc", "ad"])), Vocabulary([b"", b"ab", b"a", b"d"], [EOS]))
    assert device.legal(device.at(device.tables.machine.begin))[0].tolist() == [False, False, True, False]
    with pytest.raises(UnsupportedGrammar, match="cannot be satisfied with this vocabulary"):
        compile_tokens(machine_of(choices(["b"])), Vocabulary([b"", b"a"], [EOS]))


@pytest.fixture(scope="module")
def json_vocabulary() -> Vocabulary:
    return Vocabulary([b"", *BYTES, *JSON_PIECES], [EOS])


CLOSED = {"type": "object", "additionalProperties": False}
SCHEMAS = {
    "anything": True,
    "closed": {**CLOSED, "properties": {"a": {"type": "integer"}, "ab": {"type": "string"}}},
    "open": {"properties": {"a": {"type": "integer"}}, "required": ["a", "b"], "type": "object"},
    "tree": {**CLOSED, "properties": {"a": {"items": {"$ref": "#"}, "type": "array"}}},
    "few": {"type": "object", "maxProperties": 2, "required": ["ab"]},
    "either": {"type": "object", "anyOf": [{"required": ["ab"]}, {"properties": {"a": {"const": 1}}}]},
    "long": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 9}},
    "lengths": {**CLOSED, "properties": {"a": {"type": "string", "maxLength": 8}, "b": {"maxLength": 12}}},
    "names": {"type": "object", "properties": {key: {"type": "null"} for key in ("a", "name", "né", "nèé")}},
    "pattern": {"type": "string", "pattern": "^[^a]*(ab?)?[^b]*$"},
    "short": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
}  # fmt: skip


def walks(machine: Machine, vocabulary: Vocabulary, rng: random.Random, steps: int) -> list[Position]:
    """Positions along a random legal path of tokens."""
    at, found = machine.begin, [machine.begin]
    for _ in range(steps):
        ways = [after for text in vocabulary.tokens if text and not (after := machine.run(text, at)).dead]
        if not ways:
            break
        at = rng.choice(ways)
        found.append(at)
    return found


def agree(device: Device, positions: Sequence[Position]) -> None:
    """Mask and advance of the device are those of the machine, for all tokens."""
    machine, tokens = device.tables.machine, device.vocabulary.tokens
    for at, legal in zip(positions, device.legal(device.at(*positions)), strict=True):
        expected = [bool(text) and not machine.run(text, at).dead for text in tokens]
        expected[EOS] = machine.ended(at) or not any(expected)
        assert legal.tolist() == expected, at


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_device_is_the_machine(name: str, json_vocabulary: Vocabulary) -> None:
    rng = random.Random(name)
    device = Device(json_schema(SCHEMAS[name]).machine, json_vocabulary)
    for _ in range(3):
        agree(device, walks(device.tables.machine, json_vocabulary, rng, 12))


@pytest.mark.parametrize("pattern", [r"b[\s\S]*", r"(b|c)[\s\S]*d?", r"[\s\S]*", r"x{3}[^a]*", r"<<[\s\S]*>>|\d{3,}"])
def test_a_free_stretch_that_nothing_leaves(pattern: str, json_vocabulary: Vocabulary) -> None:
    machine = compile_fence(Fence(regex=pattern)).machine
    made = compile_tokens(machine, json_vocabulary)
    machine = made.machine
    for state in range(1, machine.num_states):
        legal = unpack_bits(made.masks[made.row[state]], len(json_vocabulary))
        expected = [bool(text) and not machine.run(text, Position(state)).dead for text in json_vocabulary.tokens]
        assert legal.tolist() == expected, state


def test_what_a_count_decides_is_one_row_where_it_is_much(
    json_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "FEW", 16)
    rng = random.Random(1)
    for name in ("long", "lengths"):
        device = Device(json_schema(SCHEMAS[name]).machine, json_vocabulary)
        assert len(device.tables.counts)
        for _ in range(4):
            agree(device, walks(device.tables.machine, json_vocabulary, rng, 14))


@pytest.mark.parametrize("machine", [nested(), members()], ids=["nested", "members"])
def test_frames_and_registers_on_the_device(machine: Machine) -> None:
    tokens = [b"", *(bytes([byte]) for byte in b"[]()abc"), b"[[", b"]]", b"(a", b"ab", b"ca)", b"(cab)", b"aa"]
    device = Device(machine, Vocabulary(tokens, [EOS]))
    rng = random.Random(0)
    for _ in range(6):
        agree(device, walks(device.tables.machine, device.vocabulary, rng, 30))


@pytest.mark.parametrize("block", range(3))
def test_random_schemas_on_the_device(block: int, json_vocabulary: Vocabulary) -> None:
    done = 0
    for seed in range(block * 100, block * 100 + 12):
        rng = random.Random(seed)
        try:
            machine = json_schema(randomly.schema(rng), formats=False).machine
        except UnsupportedGrammar:
            continue
        device = Device(machine, json_vocabulary, 2048)
        agree(device, walks(device.tables.machine, json_vocabulary, rng, 10))
        done += 1
    assert done


def test_advance_is_the_machines_step(json_vocabulary: Vocabulary) -> None:
    rng = random.Random(5)
    device = Device(json_schema(SCHEMAS["tree"]).machine, json_vocabulary)
    machine = device.tables.machine
    at, state = machine.begin, device.at(machine.begin)
    for _ in range(60):
        legal = np.flatnonzero(device.legal(state)[0][1:]) + 1
        if not len(legal):
            break
        token = int(rng.choice(legal.tolist()))
        at, state = machine.run(json_vocabulary.tokens[token], at), device.after(state, token)
        expected = device.at(at)
        assert int(state.state[0]) == int(expected.state[0])
        assert int(state.depth[0]) == int(expected.depth[0])
        frames = len(at.stack)
        np.testing.assert_array_equal(state.stack[0, :frames], expected.stack[0, :frames])


def test_rows_follow_their_own_grammar_or_none(json_vocabulary: Vocabulary) -> None:
    number = compile_tokens(NUMBER, json_vocabulary)
    device = Device(json_schema(SCHEMAS["closed"]).machine, json_vocabulary)
    place = device.fences.load(number)
    rows = [
        (device.place.states, device.place.returns, device.tables.machine.begin),
        (place.states, place.returns, NUMBER.begin),
        None,
    ]
    legal = device.legal(pack_positions(rows))
    assert legal[2].all()
    spelled = [[text for text, ok in zip(json_vocabulary.tokens, row, strict=True) if ok] for row in legal[:2]]
    assert set(spelled[0]) == {b"{", b'{"'}
    assert set(spelled[1]) == {bytes([byte]) for byte in b"-0123456789"}


def test_eos_leaves_the_state_and_an_illegal_token_kills_it() -> None:
    device = Device(NUMBER, Vocabulary(PIECES, [EOS]))
    begin = device.at(NUMBER.begin)
    five = device.after(begin, PIECES.index(b"12"))
    assert int(device.after(five, EOS).state[0]) == int(five.state[0])
    for illegal in (PIECES.index(b"x"), 1):
        assert int(device.after(begin, illegal).state[0]) == DEAD
    assert int(device.after(device.at(None), 1).state[0]) == FREE


def test_a_draft_is_judged_on_a_copy() -> None:
    device = Device(NUMBER, Vocabulary(PIECES, [EOS]))
    begin = device.at(NUMBER.begin)
    probe = begin
    for token in (PIECES.index(b"-"), PIECES.index(b"x"), PIECES.index(b"0")):
        probe = device.after(probe, token)
    assert int(probe.state[0]) == DEAD  # no error
    assert device.legal(begin)[0].any()


def test_a_grammar_of_the_empty_text_alone_ends_at_once() -> None:
    machine = machine_of(choices([""]))
    device = Device(machine, Vocabulary(PIECES, [EOS]))
    assert np.flatnonzero(device.legal(device.at(machine.begin))[0]).tolist() == [EOS]


def test_grammars_lie_side_by_side_however_many_blocks_they_need() -> None:
    vocabulary = Vocabulary(PIECES, [EOS])
    machines = [machine_of(choices(["no" * 150, "yes"])), NUMBER, machine_of(choices(["no" * 100])), WORDS]
    together = DeviceFences(FencePool(vocabulary, 1024))
    places, masked = [together.load(compile_tokens(machine, vocabulary)) for machine in machines], jax.jit(fence_mask)
    for machine, place in zip(machines, places, strict=True):
        alone = Device(machine, vocabulary)
        for state in range(1, machine.num_states):
            at = Position(state)
            there = masked(together.tables, pack_positions([(place.states, place.returns, at)]))
            np.testing.assert_array_equal(unpack_bits(np.asarray(there), len(vocabulary)), alone.legal(alone.at(at)))


def test_a_full_pool_forgets_who_is_idle_and_refuses_beside_who_is_not() -> None:
    vocabulary = Vocabulary(PIECES, [EOS])
    first, second = compile_tokens(NUMBER, vocabulary), compile_tokens(WORDS, vocabulary)
    pool = FencePool(vocabulary, 12)
    pool.load(first)
    with pytest.raises(Overloaded, match="try again later"):
        pool.load(second)
    pool.release(first)
    place, patch = pool.load(second)
    assert place == Place(1, 0)
    assert patch is not None
    pool.release(second)
    assert pool.load(second) == (Place(1, 0), None)
    large = compile_tokens(machine_of(choices(["no" * 40])), vocabulary)
    with pytest.raises(UnsupportedGrammar, match=r"raise EngineConfig\.fence_states"):
        pool.load(large)


def test_a_grammar_that_could_not_be_written_is_written_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary(PIECES, [EOS])
    tables = compile_tokens(NUMBER, vocabulary)
    fences = DeviceFences(FencePool(vocabulary, 64))
    with monkeypatch.context() as broken:
        broken.setattr(fences, "_write", lambda patch: [][0])
        with pytest.raises(IndexError):
            fences.load(tables)
    place = fences.load(tables)
    begin = pack_positions([(place.states, place.returns, NUMBER.begin)])
    alone = Device(NUMBER, vocabulary)
    there = unpack_bits(np.asarray(fence_mask(fences.tables, begin)), len(vocabulary))
    np.testing.assert_array_equal(there, alone.legal(alone.at(NUMBER.begin)))


@pytest.mark.parametrize("num_tokens", range(1, 66))
def test_bits_are_packed_for_every_width(num_tokens: int) -> None:
    bits = np.random.default_rng(num_tokens).integers(0, 2, (3, num_tokens)).astype(np.bool_)
    packed = pack_bits(bits)
    assert packed.shape == (3, -(-num_tokens // 32))
    assert packed.dtype == np.uint32
    np.testing.assert_array_equal(unpack_bits(packed, num_tokens), bits)


def test_the_step_takes_no_host_round_trip() -> None:
    device = Device(NUMBER, Vocabulary(PIECES, [EOS]))
    compiled = jax.jit(partial(_both, device.fences.tables)).lower(device.at(NUMBER.begin)).compile()
    assert not any(word in compiled.as_text() for word in ("callback", "infeed", "outfeed"))


def _both(tables: object, state: FenceState) -> FenceState:
    mask = fence_mask(tables, state)  # type: ignore[arg-type]
    return fence_advance(tables, state, jnp.argmax(mask, axis=1).astype(jnp.int32))  # type: ignore[arg-type]
