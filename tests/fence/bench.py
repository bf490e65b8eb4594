"""How long fences take to compile: `python -m tests.fence.bench [NUMBER OF SCHEMAS]` (default 500).

Schemas of `corpus.py` over SmolLM2's vocabulary, each compiled once: schema to machine, machine to tables. Then about
512 states over 131,072 tokens. Times are of the wall and, where others use the machine too, of the processor.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from tests.fence import corpus
from zllm_jax.checkpoint import open_checkpoint, pull
from zllm_jax.dialect import load_tokenizer
from zllm_jax.engine.fences import vocabulary_of
from zllm_jax.fence import Machine, Vocabulary, compile_tokens, machine_of
from zllm_jax.fence.regular import fullmatch_regex
from zllm_jax.fence.schema import json_schema

T = TypeVar("T")
LIMIT_MS = 50
NUM_STATES, NUM_TOKENS = 512, 131_072


def main(count: int = 500) -> None:
    checkpoint = open_checkpoint(pull("smollm2-135m"))
    assert checkpoint.tokenizer is not None
    vocabulary = vocabulary_of(load_tokenizer(checkpoint.tokenizer), checkpoint.config.vocab_size)
    _, trie_s = timed(lambda: vocabulary.levels)
    print(f"vocabulary of {len(vocabulary):,} tokens, its trie once: {trie_s * 1e3:.0f} ms")
    several(corpus.schemas(count), vocabulary)
    large = larger(vocabulary)
    _, trie_s = timed(lambda: large.levels)
    print(f"\nvocabulary of {len(large):,} tokens, its trie once: {trie_s * 1e3:.0f} ms")
    for name, machine in large_machines().items():
        one_large(name, machine, large)


def several(schemas: list[corpus.Schema], vocabulary: Vocabulary) -> None:
    found = []
    for schema in schemas:
        begun = time.process_time()
        compiled, schema_s = timed(lambda schema=schema: json_schema(schema))
        tables, tables_s = timed(lambda machine=compiled.machine: compile_tokens(machine, vocabulary))
        cpu_s = time.process_time() - begun
        times = (one * 1e3 for one in (schema_s, tables_s, schema_s + tables_s, cpu_s))
        found.append((*times, len(tables.row), len(tables.masks)))
    names = ("schema ms", "tables ms", "both ms", "processor ms", "states", "masks")
    columns = dict(zip(names, np.array(found).T, strict=True))
    under = {name: np.mean(columns[name] < LIMIT_MS) for name in ("both ms", "processor ms")}
    print(
        f"{len(schemas)} schemas: {under['both ms']:.1%} under {LIMIT_MS} ms, {under['processor ms']:.1%} in processor"
    )
    print(f"{'':12} {'median':>8} {'p95':>8} {'worst':>8}")
    for name, column in columns.items():
        print(f"{name:12} " + " ".join(f"{np.percentile(column, percent):8.1f}" for percent in (50, 95, 100)))


def one_large(name: str, machine: Machine, vocabulary: Vocabulary) -> None:
    begun = time.process_time()
    tables, seconds = timed(lambda: compile_tokens(machine, vocabulary))
    cpu_s, mib = time.process_time() - begun, tables.masks.nbytes / 2**20
    print(f"{name}: {machine.num_states} states, {len(tables.masks)} masks of {mib:.1f} MiB", end=", ")
    print(f"tables in {seconds:.2f} s ({cpu_s:.2f} of the processor)")


def large_machines() -> dict[str, Machine]:
    """Of about NUM_STATES states: a record of many fields, and a text that counts its characters."""
    rng, fields = random.Random(0), dict[str, corpus.Schema]()
    machine = json_schema({}).machine
    for name in corpus.NOUNS:
        more = fields | {name: corpus.scalar(rng)}
        grown = json_schema(corpus.record(random.Random(0), more)).machine
        if grown.num_states <= NUM_STATES:
            fields, machine = more, grown
    return {"a record": machine, "a text": machine_of(fullmatch_regex(f"[a-z ]{{0,{NUM_STATES - 2}}}"))}


def larger(vocabulary: Vocabulary) -> Vocabulary:
    """NUM_TOKENS tokens: those that are there, and words made of two of them."""
    rng = random.Random(0)
    tokens, known = list(vocabulary.tokens), set(vocabulary.tokens)
    while len(tokens) < NUM_TOKENS:
        word = rng.choice(vocabulary.tokens) + rng.choice(vocabulary.tokens).strip()
        if len(word) <= 16 and word not in known:
            known.add(word)
            tokens.append(word)
    return Vocabulary(tokens, vocabulary.eos_ids)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    begun = time.perf_counter()
    made = work()
    return made, time.perf_counter() - begun


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
