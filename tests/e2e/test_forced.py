"""Forced runs on a model: the same seed, the same tokens, whatever else runs and however many steps a call takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
import pytest

from tests.runtime import drive
from zllm_jax.cache import PrefixCache
from zllm_jax.fence import FencePool, ForcedRuns, TokenTables, Vocabulary, compile_tokens
from zllm_jax.fence.schema import json_schema
from zllm_jax.runtime import StateShape, init_params
from zllm_jax.scheduler import Job, Outcome, Scheduler, Ticket
from zllm_jax.testing import tiny_config
from zllm_jax.values import Sampling, Status

EOS = 257
PIECES = [
    '": ',
    '", "',
    '{"',
    '"}',
    "na",
    "name",
    "me",
    "tem",
    "per",
    "temper",
    "ature",
    "un",
    "it",
    "unit",
    "_u",
    "cel",
]
VOCABULARY = Vocabulary(
    [bytes([i]) for i in range(128)] + [piece.encode() for piece in PIECES] + [b""] * (259 - 128 - len(PIECES)), [EOS]
)
LONGEST_FIRST = re.compile("|".join(map(re.escape, sorted(PIECES, key=len, reverse=True))) + "|(?s:.)")
CLOSED = {"type": "object", "additionalProperties": False}
CALL = {
    **CLOSED,
    "properties": {
        "name": {"const": "temperature"},
        "arguments": {**CLOSED, "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "number": {"type": "boolean"}}},
    },
    "required": ["name", "arguments"],
}
WARM = Sampling(temperature=1.3)
Bench = tuple[Scheduler, TokenTables]


def encode(text: str) -> list[list[int]]:
    return [[VOCABULARY.tokens.index(piece.encode()) for piece in LONGEST_FIRST.findall(text)]]


RUNS = ForcedRuns(VOCABULARY, encode)


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    arch: Literal["llama", "gemma3"] = request.param
    cfg = tiny_config(arch)
    shape = StateShape(num_pages=64, page_tokens=8, num_rings=8, num_slots=4, max_pages=16)
    runner = drive.scorer(
        init_params(cfg, jax.random.key(0)),
        cfg,
        shape,
        prefill_buckets=(32,),
        decode_buckets=(1, 4),
        fences=FencePool(VOCABULARY, 512),
    )
    scheduler = Scheduler(runner, PrefixCache(runner, None), max_seq_tokens=128)
    tables = compile_tokens(json_schema(CALL).machine, VOCABULARY)
    yield scheduler, tables
    scheduler.close()


def submitted(bench: Bench, seed: int, **options: Any) -> Ticket:
    scheduler, tables = bench
    fields = {
        "request_id": str(seed),
        "prompt": np.array(list(b"Call:" + bytes([60 + seed])), np.int32),
        "max_tokens": 100,
        "sampling": WARM,
        "seed": seed,
        "stop_ids": (EOS,),
        "fence": tables,
        "forced": RUNS,
        "cache": False,
    }
    return scheduler.submit(Job(**fields | options))


def ended(ticket: Ticket) -> tuple[list[int], Outcome]:
    tokens: list[int] = []
    while True:
        for event in ticket.wait():
            if isinstance(event, Outcome):
                return tokens, event
            tokens += [one.token for one in event]


def test_the_same_tokens_alone_in_a_batch_in_single_steps_and_in_several(bench: Bench) -> None:
    _, tables = bench
    alone = [ended(submitted(bench, seed)) for seed in range(6)]
    for tokens, outcome in alone:
        assert outcome.status is Status.COMPLETED
        assert tables.machine.accepts(b"".join(VOCABULARY.tokens[token] for token in tokens[:-1]))
        assert outcome.telemetry.forced_tokens > 8
    expected = [tokens for tokens, _ in alone]
    assert len({tuple(tokens) for tokens in expected}) > 3
    free = submitted(bench, 9, fence=None, forced=None)  # it decodes several steps a call, and the others beside it
    together = [submitted(bench, seed) for seed in range(6)]
    assert [ended(ticket)[0] for ticket in together] == expected
    ended(free)
    beside_single = submitted(bench, 9, fence=None, forced=None, single_step=True)
    together = [submitted(bench, seed) for seed in range(6)]
    assert [ended(ticket)[0] for ticket in together] == expected
    ended(beside_single)


def test_runs_change_the_tokens_but_not_which_texts_there_are(bench: Bench) -> None:
    _, tables = bench
    differ = 0
    for seed in range(3):
        with_runs, _ = ended(submitted(bench, seed))
        without, outcome = ended(submitted(bench, seed, forced=None))
        assert outcome.telemetry.forced_tokens == 0
        assert tables.machine.accepts(b"".join(VOCABULARY.tokens[token] for token in without[:-1]))
        differ += with_runs != without
    assert differ
