"""Tables made with texts that are kept for all grammars are those of a walk that knows no free stretch at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import pytest

from tests.fence import corpus
from tests.fence.schema import randomly
from tests.fence.test_tokens import BYTES, JSON_PIECES
from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import Machine, TokenTables, Vocabulary, compile_tokens, regions, walk
from zllm_jax.fence.closed import closed_texts
from zllm_jax.fence.regions import AllExits, Exits, Region, Regions, RegionTables
from zllm_jax.fence.schema import json_schema

WORDS = [b"ann", b"example", b"@exa", b'.org"', b'.org", "', b"://", b"AB-", b"-12", b"2024-0", b'34"', b'a"}', b'\\"']
WORDS += [b"\\u00", b'\\"a"', b"%2", b"0-9", b"name_", b'_x"', b"00Z", b'Z"}', b"[::1", b"a" * 9, b'a"b"c', b"1.0.0"]
VOCABULARY = Vocabulary([b"", *BYTES, *JSON_PIECES, *WORDS], [0])
LEAVES = (
    *({"type": "string", "format": name} for name in corpus.FORMATS),
    *({"type": "string", "pattern": pattern} for pattern in corpus.PATTERNS),
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": r'^a?"+b*$'},
    {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "string", "pattern": "^[a-c]*$"}]},
)


def machines() -> list[Machine]:
    found = [json_schema({"type": "array", "items": one}).machine for one in LEAVES]
    found += [json_schema(one).machine for one in corpus.schemas(44)]
    for seed in range(40):
        try:
            found.append(json_schema(randomly.schema(random.Random(seed))).machine)
        except UnsupportedGrammar:
            continue
    return found


def walked(machine: Machine, vocabulary: Vocabulary) -> TokenTables:
    """Every token byte by byte."""
    nowhere = np.full(machine.num_states, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "regions_of", lambda one: Regions((), one.edges.astype(np.int64), nowhere, nowhere))
        patch.setattr(walk, "with_closed", lambda one, found: found)
        return compile_tokens(machine, vocabulary)


def same(ours: TokenTables, theirs: TokenTables) -> bool:
    names = [one.name for one in fields(ours) if one.name not in ("machine", "vocabulary")]
    return all(np.array_equal(getattr(ours, name), getattr(theirs, name)) for name in names)


@pytest.fixture
def nothing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that count are dependent without a region: only so can both be compared bit by bit."""
    monkeypatch.setattr("zllm_jax.fence.tables.FEW", len(VOCABULARY) + 1)


@pytest.mark.usefixtures("nothing_counts")
def test_kept_texts_change_no_table() -> None:
    closed = 0
    for machine in machines():
        closed += len(closed_texts(machine, np.zeros(machine.num_states, np.bool_)))
        assert same(compile_tokens(machine, VOCABULARY), walked(machine, VOCABULARY))
    assert closed > len(LEAVES)


def _without_a_token(made: RegionTables) -> RegionTables:
    masks = made.masks.copy()
    masks[masks.any(axis=1).argmax()] = 0
    return RegionTables(masks, made.counts, made.exits)


def _all_left_from_the_first(made: RegionTables) -> RegionTables:
    exits = made.exits.exits
    moved = Exits(np.zeros_like(exits.root), exits.node, exits.path, exits.doubt, exits.end)
    return RegionTables(made.masks, made.counts, AllExits(moved, made.exits.starts))


@pytest.mark.parametrize("mutant", [_without_a_token, _all_left_from_the_first])
@pytest.mark.usefixtures("nothing_counts")
def test_a_wrong_text_is_seen(monkeypatch: pytest.MonkeyPatch, mutant: Callable[[RegionTables], RegionTables]) -> None:
    right = walk._closed_tables
    monkeypatch.setattr(walk, "_closed_tables", lambda *given: mutant(right(*given)))
    vocabulary = Vocabulary(VOCABULARY.tokens, VOCABULARY.eos_ids)  # nothing is kept with it yet
    several = machines()[: len(LEAVES)]
    assert not all(same(compile_tokens(one, vocabulary), walked(one, vocabulary)) for one in several)


def test_the_same_text_in_several_grammars_is_kept_once() -> None:
    leaf = {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,15}$"}
    record = {"type": "object", "properties": {"id": {"type": "integer"}, "name": leaf}, "required": ["id", "name"]}
    digests = set()
    for schema in (leaf, {"type": "array", "items": leaf}, record):
        machine = json_schema({**schema, "additionalProperties": False}).machine
        (text,) = closed_texts(machine, np.zeros(machine.num_states, np.bool_))
        digests.add(text.digest)
    assert len(digests) == 1


def test_what_is_kept_is_bounded_and_safe_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "MOST_KEPT", 2)
    vocabulary = Vocabulary(VOCABULARY.tokens, VOCABULARY.eos_ids)
    several = machines()[: len(LEAVES)] * 3
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: compile_tokens(one, vocabulary), several))
    assert len(regions._KEPT[vocabulary]) <= 2
    assert all(same(one, compile_tokens(machine, VOCABULARY)) for one, machine in zip(found, several, strict=True))


def test_a_list_of_names_is_no_text() -> None:
    names = {"type": "object", "properties": {f'{c}"': {"type": "null"} for c in "abcdefgh"}}
    machine = json_schema({**names, "additionalProperties": False}).machine
    found: list[Region] = closed_texts(machine, np.zeros(machine.num_states, np.bool_))
    assert not found
