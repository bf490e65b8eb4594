"""Fenced decoding: masked, drawn and advanced on the device, as a host that masks logits with the machine would."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.runtime import drive
from tests.runtime.drive import Place, Scorer
from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import Machine, Position, TokenTables, Vocabulary, choices, compile_tokens, machine_of
from zllm_jax.fence.schema import json_schema
from zllm_jax.runtime import Fenced, StateShape, count_compilations, init_params
from zllm_jax.testing import ByteTokenizer, tiny_config
from zllm_jax.values import Sampling

SHAPE = StateShape(num_pages=64, page_tokens=8, num_rings=4, num_slots=4, max_pages=16)
PLACES = [Place(tuple(range(16 * i, 16 * i + 16)), ring=i, slot=i) for i in range(3)]
TOKENIZER = ByteTokenizer()
VOCABULARY = Vocabulary(TOKENIZER.vocabulary(), TOKENIZER.eos_ids)
EOS = TOKENIZER.eos_id
PROMPT = list(b"Say it.")
OBJECT = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "maximum": 99},
        "b": {"enum": ["x", "yy"]},
        "c": {"items": {"type": "null"}},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
    "maxProperties": 2,
}
WARM = Sampling(temperature=1.5)


@pytest.fixture
def runner(fenced_runner: Scorer) -> Scorer:
    return fenced_runner


@pytest.fixture(scope="module")
def grammar() -> TokenTables:
    return compile_tokens(json_schema(OBJECT).machine, VOCABULARY)


def generated(
    runner: Scorer, tables: TokenTables, place: Place, *, steps: int, sampling: Sampling = drive.GREEDY, count: int = 60
) -> list[int]:
    """Up to `count` fenced tokens, EOS among them where it came."""
    where, at = runner.load_fence(tables), tables.machine.begin
    first = runner.prefill(drive.chunk(PROMPT, 0, place, last=True, sampling=sampling, seed=7, fence=Fenced(where, at)))
    assert first is not None
    drawn = [first.token]
    at = tables.machine.run(VOCABULARY.tokens[first.token], at)
    while len(drawn) < count and drawn[-1] != EOS:
        position = len(PROMPT) + len(drawn) - 1
        left = count - len(drawn)
        row = drive.row(
            drawn[-1], position, place, budget=left, stop_ids=(EOS,), sampling=sampling, seed=7, fence=Fenced(where, at)
        )
        (more,) = runner.decode([row], min(steps, left))
        for one in more:
            drawn.append(one.token)
            at = tables.machine.run(VOCABULARY.tokens[one.token], at)
    runner.release_fence(tables)
    return drawn


def by_hand(runner: Scorer, machine: Machine, place: Place, count: int) -> list[int]:
    """The same, greedy, by a host that masks the logits itself."""
    at, drawn = machine.begin, list[int]()
    while len(drawn) < count and EOS not in drawn:
        logits = runner.score([*PROMPT, *drawn], place, size=16)[-1].copy()
        for token, text in enumerate(VOCABULARY.tokens):
            allowed = machine.ended(at) if token == EOS else bool(text) and not machine.run(text, at).dead
            if not allowed:
                logits[token] = -np.inf
        drawn.append(int(logits.argmax()))
        at = machine.run(VOCABULARY.tokens[drawn[-1]], at)
    return drawn


def test_tokens_are_those_of_a_host_that_masks(runner: Scorer, grammar: TokenTables) -> None:
    assert generated(runner, grammar, PLACES[0], steps=4, count=40) == by_hand(runner, grammar.machine, PLACES[1], 40)


@pytest.mark.parametrize("sampling", [drive.GREEDY, WARM], ids=["greedy", "warm"])
def test_several_steps_a_call_are_single_steps(runner: Scorer, grammar: TokenTables, sampling: Sampling) -> None:
    single = generated(runner, grammar, PLACES[0], steps=1, sampling=sampling)
    assert generated(runner, grammar, PLACES[0], steps=4, sampling=sampling) == single
    at = grammar.machine.run(b"".join(VOCABULARY.tokens[token] for token in single))
    assert not at.dead
    assert single[-1] != EOS or grammar.machine.ended(at)


def test_rows_of_a_batch_obey_their_own_fence_or_none(runner: Scorer, grammar: TokenTables) -> None:
    word = compile_tokens(machine_of(choices(["no", "never"])), VOCABULARY)
    machines = [grammar, word, None]
    places = [None if tables is None else runner.load_fence(tables) for tables in machines]
    positions: list[Position | None] = [None if tables is None else tables.machine.begin for tables in machines]
    rows, alone = [], []
    for i, place in enumerate(PLACES):
        where, at = places[i], positions[i]
        fence = None if where is None or at is None else Fenced(where, at)
        runner.prefill(drive.chunk(PROMPT[:-1], 0, place))
        rows.append(
            drive.row(PROMPT[-1], len(PROMPT) - 1, place, budget=4, stop_ids=(EOS,), sampling=WARM, seed=i, fence=fence)
        )
    for i in range(3):
        runner.prefill(drive.chunk(PROMPT[:-1], 0, PLACES[i]))
        alone.append(drive.ids(runner.decode([rows[i]], 4)[0]))
        runner.prefill(drive.chunk(PROMPT[:-1], 0, PLACES[i]))
    together = [drive.ids(one) for one in runner.decode(rows, 4)]
    assert together == alone
    text = b"".join(VOCABULARY.tokens[token] for token in together[1])
    assert b"no".startswith(text) or b"never".startswith(text)
    assert together[0][0] == ord("{")
    for tables in (grammar, word):
        runner.release_fence(tables)


def test_another_grammar_compiles_nothing(runner: Scorer, grammar: TokenTables) -> None:
    other = compile_tokens(
        json_schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}).machine, VOCABULARY
    )
    with count_compilations() as count:
        for tables in (grammar, other, grammar):
            generated(runner, tables, PLACES[2], steps=4, count=12)
    assert count.programs == 0


def test_a_runner_without_a_pool_says_so(grammar: TokenTables) -> None:
    cfg = tiny_config("llama")
    bare = drive.scorer(init_params(cfg, jax.random.key(0)), cfg, SHAPE, prefill_buckets=(16,), decode_buckets=(1,))
    with pytest.raises(UnsupportedGrammar, match="fence_states is 0"):
        bare.load_fence(grammar)
