"""Forced runs: the only text that may come, as the tokenizer itself would cut the whole."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.fence.schema import randomly
from tests.fence.test_machine import members, nested
from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import (
    MIN_TOKENS,
    ForcedRuns,
    Machine,
    Position,
    TokenTables,
    Vocabulary,
    choices,
    compile_tokens,
    forced_text,
    machine_of,
    may_force,
)
from zllm_jax.fence.forced import _whole_characters
from zllm_jax.fence.schema import json_schema

CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "get_current_weather — café"},
        "arguments": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "maxLength": 12},
                "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
                "number_of_days": {"type": "integer", "minimum": 1, "maximum": 40},
            },
            "required": ["location", "temperature_unit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
MACHINES = {
    "call": json_schema(CALL).machine,
    "lines": machine_of(choices(["  one\n    two\n\n", "  one\n    two three\n", "  one\n\t\tfour  five\n"])),
}


def slow_forced_text(machine: Machine, at: Position, limit: int) -> bytes:
    """By the definition, a byte at a time, all 256 tried."""
    text = b""
    while len(text) < limit and not machine.ended(at):
        ways = [byte for byte in range(256) if not machine.step(at, byte).dead]
        if len(ways) != 1:
            break
        text += bytes(ways)
        at = machine.step(at, ways[0])
    return text


def positions(machine: Machine, seed: int) -> Iterator[Position]:
    """Along a random text."""
    rng, at = random.Random(seed), machine.begin
    for _ in range(120):
        yield at
        ways = [after for byte in range(256) if not (after := machine.step(at, byte)).dead]
        if not ways:
            return
        at = rng.choice(ways)


def some_machines() -> Iterator[Machine]:
    yield from (*MACHINES.values(), nested(), members())
    for seed in range(40):
        try:
            yield json_schema(randomly.schema(random.Random(seed)), formats=False).machine
        except UnsupportedGrammar:
            continue


def counts(machine: Machine, state: int) -> bool:
    """Whether it is within a text whose characters are counted."""
    return any(edge.add and not edge.use for edge in (machine.special[~i] for i in machine.edges[state] if i < 0))


def test_a_forced_text_is_the_only_one_and_its_state_was_known_to_have_one() -> None:
    long = 0
    for machine in some_machines():
        may = may_force(machine)
        for at in positions(machine, 1):
            text = forced_text(machine, at, 20)
            assert text == slow_forced_text(machine, at, 20)
            if len(text) >= MIN_TOKENS and not counts(machine, at.state):
                assert may[at.state]
                long += 1
    assert long > 60


def test_where_a_string_goes_on_nothing_pauses() -> None:
    machine = MACHINES["call"]
    opening = b'{"arguments": {"location": "'
    may = may_force(machine)
    assert not any(may[machine.run(opening + text).state] for text in (b"", b"a", b"ab\xc3", b"\\", b"a\xc3\xa9"))
    assert may[machine.run(opening + b'x", "te').state]
    assert may.sum() < machine.num_states


@pytest.fixture(scope="module", params=["words", "no words"])
def library(request: pytest.FixtureRequest) -> Tokenizer:
    """A byte-level BPE, trained on legal texts; without words it merges across everything."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=request.param == "words")
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [text for machine in MACHINES.values() for seed in range(60) if (text := legal_text(machine, seed))]
    made.train_from_iterator(
        [text.decode() for text in texts], trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet)
    )
    return made


def legal_text(machine: Machine, seed: int) -> bytes | None:
    return randomly.text(machine, random.Random(seed))


def vocabulary_of(library: Tokenizer) -> Vocabulary:
    spelled = {character: bytes([byte]) for byte, character in byte_characters()}
    pieces = [library.id_to_token(token) for token in range(library.get_vocab_size())]
    return Vocabulary([b"", *(b"".join(spelled[one] for one in piece) for piece in pieces)], [0])


def byte_characters() -> Iterator[tuple[int, str]]:
    """GPT-2's stand-ins for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    yield from ((byte, chr(byte)) for byte in printable)
    yield from ((byte, chr(256 + i)) for i, byte in enumerate(others))


class Runs:
    """Forced runs over a library's tokens, all ids one higher: 0 is EOS."""

    def __init__(self, library: Tokenizer) -> None:
        self.library, self.vocabulary = library, vocabulary_of(library)
        self.forced = ForcedRuns(self.vocabulary, lambda text: [self.encode(text.encode())])

    def encode(self, text: bytes) -> list[int]:
        return [token + 1 for token in self.library.encode(text.decode()).ids]

    def tables(self, name: str) -> TokenTables:
        return compile_tokens(MACHINES[name], self.vocabulary)

    def spelled(self, tokens: list[int]) -> bytes:
        return b"".join(self.vocabulary.tokens[token] for token in tokens)


@pytest.mark.parametrize("name", MACHINES)
def test_on_the_tokenizers_own_way_a_run_is_what_it_would_say(library: Tokenizer, name: str) -> None:
    runs = Runs(library)
    tables = runs.tables(name)
    appended = 0
    for seed in range(100, 125):
        text = legal_text(tables.machine, seed)
        if text is None:
            continue
        tokens = runs.encode(text)
        for i in range(len(tokens)):
            run = runs.forced.after(tables, tables.machine.run(runs.spelled(tokens[:i])), tokens[:i])
            assert run == tokens[i : i + len(run)], (runs.spelled(tokens[:i]), runs.spelled(run))
            appended += len(run)
    assert appended > 100


def written(runs: Runs, tables: TokenTables, seed: int, *, forced: bool) -> list[int]:
    """Random legal tokens until the text ends, the long ones more often; with runs appended, or without."""
    rng, machine, tokens = random.Random(seed), tables.machine, list[int]()
    at = machine.begin
    while not machine.ended(at) and len(tokens) < 400:
        more = runs.forced.after(tables, at, tokens) if forced else []
        if not more:
            known = runs.vocabulary.tokens
            legal = [token for token, text in enumerate(known) if text and not machine.run(text, at).dead]
            more = rng.choices(legal, [len(known[token]) ** 4 for token in legal])
        tokens += more
        at = machine.run(runs.spelled(more), at)
        assert not at.dead
    return tokens


def test_with_runs_more_outputs_tokenise_to_themselves(library: Tokenizer) -> None:
    runs = Runs(library)
    kept = {False: 0, True: 0}
    for name in MACHINES:
        tables = runs.tables(name)
        for forced in kept:
            several = [written(runs, tables, seed, forced=forced) for seed in range(12)]
            assert all(tables.machine.accepts(runs.spelled(tokens)) for tokens in several)
            kept[forced] += sum(runs.encode(runs.spelled(tokens)) == tokens for tokens in several)
    assert kept[True] > kept[False]


def test_a_token_that_may_grow_is_left_to_be_drawn() -> None:
    vocabulary = Vocabulary([b"", *(bytes([byte]) for byte in b"abcdxy"), b"cd", b"dx"], [0])
    tables = compile_tokens(machine_of(choices(["ababcdx", "ababcdy"])), vocabulary)
    by_byte = ForcedRuns(vocabulary, lambda text: [[1 + b"abcdxy".index(byte) for byte in text.encode()]])
    assert by_byte.after(tables, tables.machine.begin, []) == [1, 2, 1, 2]  # "c" may be the begin of "cd", "d" of "dx"
    sure = compile_tokens(machine_of(choices(["ababcdy"])), vocabulary)
    whole = ForcedRuns(vocabulary, lambda text: [[1, 2, 1, 2, 7, *([6] if text.endswith("y") else [])]])
    assert whole.after(sure, sure.machine.begin, []) == [1, 2, 1, 2, 7, 6]
    assert whole.after(tables, tables.machine.begin, []) == [1, 2, 1, 2]


def test_the_encoder_sees_the_output_before_a_run_unless_it_would_merge_the_two() -> None:
    vocabulary = Vocabulary([b"", *(bytes([byte]) for byte in b"abc"), b"bc"], [0])
    tables = compile_tokens(machine_of(choices(["ababcabc"])), vocabulary)
    seen = list[str]()

    def encode(text: str) -> list[list[int]]:
        seen.append(text)
        return [[vocabulary.tokens.index(piece.encode()) for piece in re.findall("bc|.", text)]]

    runs = ForcedRuns(vocabulary, encode)
    assert runs.after(tables, tables.machine.run(b"ab"), [1, 2]) == [1, 4, 1, 4]
    assert seen == ["ababcabc"]
    assert runs.after(tables, tables.machine.run(b"abab"), [1, 2, 1, 2]) == []
    assert seen[1:] == ["ababcabc", "cabc"]


def test_ids_that_are_another_text_are_not_taken() -> None:
    vocabulary = Vocabulary([b"", *(bytes([byte]) for byte in b"abc")], [0])
    tables = compile_tokens(machine_of(choices(["abcabc"])), vocabulary)
    at = tables.machine.begin
    assert ForcedRuns(vocabulary, lambda text: [[0, 1, 2], [9] * 6]).after(tables, at, []) == []
    assert ForcedRuns(vocabulary, lambda text: [[0, 1], [1, 2, 3, 1, 2, 3]]).after(tables, at, []) == [1, 2, 3] * 2


def test_a_run_that_is_too_short_is_none_and_shorter_ones_cannot_be_asked_for() -> None:
    vocabulary = Vocabulary([b"", *(bytes([byte]) for byte in b"abc")], [0])
    tables = compile_tokens(machine_of(choices(["abcabc"])), vocabulary)

    def runs(min_tokens: int) -> ForcedRuns:
        return ForcedRuns(
            vocabulary, lambda text: [[b"\0abc".index(one) for one in text.encode()]], min_tokens=min_tokens
        )

    assert [len(runs(n).after(tables, tables.machine.begin, [])) for n in (4, 6, 7)] == [6, 6, 0]
    with pytest.raises(ValueError, match="min_tokens is 3"):
        runs(3)


@pytest.mark.parametrize("character", ["é", "—", "🙂"])
def test_a_character_is_not_cut(character: str) -> None:
    text = ("n" + character).encode()
    assert _whole_characters(text) == text
    assert all(_whole_characters(text[:cut]) == b"n" for cut in range(1, len(text)))
