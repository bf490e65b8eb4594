"""Forced runs of real dialects in real tokenizers: what the tokenizer makes of the whole text, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.dialect.test_tokenizer import llama2_files
from tests.fence.schema import randomly
from zllm_jax.checkpoint import open_checkpoint
from zllm_jax.dialect import Tokenizer, load_tokenizer
from zllm_jax.dialect.chatml_json import CHATML_LAYOUT
from zllm_jax.dialect.dsml import dsml_layout
from zllm_jax.dialect.glm_xml import glm_layout
from zllm_jax.dialect.tool_fence import call_machine
from zllm_jax.dialect.tools import Layout, tools_of
from zllm_jax.engine.fences import forced_runs_of, vocabulary_of
from zllm_jax.fence import MIN_TOKENS, TokenTables, choices, compile_tokens, machine_of

LAYOUTS = {"dsml": dsml_layout(), "glm": glm_layout(lines=True), "chatml": CHATML_LAYOUT}
PARAMETERS = {
    "type": "object",
    "properties": {
        "location_city": {"type": "string", "maxLength": 10},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["location_city", "unit"],
    "additionalProperties": False,
}
TOOLS = tools_of([{"type": "function", "function": {"name": "get_weather_forecast", "parameters": PARAMETERS}}])


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Tokenizer:
    files = open_checkpoint(smollm2).tokenizer
    assert files is not None
    return load_tokenizer(files)


def appended_along(tokenizer: Tokenizer, tables: TokenTables, text: bytes, chunk_tokens: int = 32) -> int:
    """How many tokens runs append on the way of the tokenizer's own ids, which they must be."""
    runs = forced_runs_of(tokenizer, tables.vocabulary, chunk_tokens)
    ids = tokenizer.encode(text.decode(), add_bos=False)
    count, i = 0, 0
    while i < len(ids):
        before = b"".join(map(tokenizer.token_bytes, ids[:i]))
        run = runs.after(tables, tables.machine.run(before), ids[:i])
        assert run == ids[i : i + len(run)], (before, [tokenizer.token_bytes(token) for token in run])
        count += len(run)
        i += max(1, len(run))
    return count


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_runs_of_a_call_are_the_tokenizers_own(layout: Layout, smol: Tokenizer) -> None:
    machine = call_machine(layout, TOOLS, "required", parallel=False)
    tables = compile_tokens(machine, vocabulary_of(smol, smol.vocab_size))
    texts = [text for seed in range(8) if (text := randomly.text(machine, random.Random(seed), soon=30)) is not None]
    assert len(texts) >= 3
    for text in texts:
        assert appended_along(smol, tables, text) > 15


def test_a_space_that_the_tokenizer_adds_is_not_part_of_a_run() -> None:
    tokenizer = load_tokenizer(llama2_files())
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    tables = compile_tokens(machine_of(choices(["hello hello hello é"])), vocabulary)
    run = forced_runs_of(tokenizer, vocabulary, 32).after(tables, tables.machine.begin, [])
    assert [tokenizer.token_bytes(token) for token in run] == [
        b"h", b"el", b"lo", b" hello", b" hello", b" ", "é".encode()
    ]  # fmt: skip


def test_a_large_smallest_chunk_needs_long_runs() -> None:
    tokenizer = load_tokenizer(llama2_files())
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    tables = compile_tokens(machine_of(choices(["hello hello hello é"])), vocabulary)

    def length(chunk_tokens: int) -> int:
        return len(forced_runs_of(tokenizer, vocabulary, chunk_tokens).after(tables, tables.machine.begin, []))

    assert [length(8 * MIN_TOKENS), length(56), length(64)] == [7, 7, 0]
