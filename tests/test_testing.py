"""The testing room is public, so it is tested itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from zllm_jax.buffers import aligned_empty
from zllm_jax.errors import BudgetExceeded
from zllm_jax.testing import ByteTokenizer, ScriptedBackend, ScriptedEngine, chained_token, tiny_config
from zllm_jax.values import Delta, Request, Sampling, Status

TEXT = "Grüße, 世界 👋!"


def collect(engine: ScriptedEngine, request: Request) -> list[Delta]:
    async def scenario() -> list[Delta]:
        return [delta async for delta in engine.stream(request)]

    return asyncio.run(scenario())


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(TEXT)
    assert tokens == list(TEXT.encode())
    assert tokenizer.decode([tokenizer.bos_id, *tokens, tokenizer.eos_id]) == TEXT
    assert tokenizer.decode(tokens[3:4]) == "\ufffd"
    assert len(tokenizer.vocabulary()) == tokenizer.vocab_size
    assert {token for token, text in enumerate(tokenizer.vocabulary()) if not text} == {256, 257, 258}
    with pytest.raises(ValueError, match="must be in"):
        tokenizer.token_bytes(259)


def test_tiny_configs_keep_what_is_particular() -> None:
    llama, gemma = tiny_config("llama"), tiny_config("gemma3")
    assert llama.num_heads > llama.num_kv_heads > 1
    assert [gemma.is_local(layer) for layer in range(gemma.num_layers)] == [True, True, False]
    assert gemma.window < gemma.max_context_tokens
    assert llama.vocab_size == gemma.vocab_size == ByteTokenizer.vocab_size
    assert llama.vocab_size % 32  # so that the last word of a mask is not full
    with pytest.raises(ValueError, match="must be 'llama' or 'gemma3'"):
        tiny_config("gpt")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text", "num_tokens", "status"),
    [
        ({}, TEXT, len(TEXT.encode()), Status.COMPLETED),
        ({"max_tokens": 4}, "Grü", 4, Status.TRUNCATED),
        ({"max_tokens": 3}, "Gr\ufffd", 3, Status.TRUNCATED),
        ({"stop": ("世界",)}, "Grüße, ", len("Grüße, 世界".encode()), Status.COMPLETED),
        ({"stop": ("!", "e")}, "Grüß", len("Grüße".encode()), Status.COMPLETED),
    ],
)
def test_scripted_engine(options: dict[str, object], text: str, num_tokens: int, status: Status) -> None:
    engine = ScriptedEngine()
    engine.say(TEXT, cached_tokens=2)
    deltas = collect(engine, Request("prompt", **{"sampling": Sampling(logprobs=1)} | options))  # type: ignore[arg-type]
    envelope = deltas[-1].envelope
    assert envelope is not None
    assert engine.envelopes == [envelope]
    assert (envelope.text, len(envelope.tokens), envelope.status) == (text, num_tokens, status)
    assert "".join(delta.text for delta in deltas) == text
    assert [token for delta in deltas for token in delta.tokens] == list(envelope.tokens)
    assert [entry for delta in deltas for entry in delta.logprobs] == list(envelope.logprobs)
    assert len(envelope.logprobs) == num_tokens == envelope.usage.generated_tokens
    assert (envelope.usage.prompt_tokens, envelope.usage.cached_tokens) == (6, 2)


def test_closing_the_stream_cancels() -> None:
    engine = ScriptedEngine()
    engine.say(TEXT)

    async def scenario() -> None:
        async with aclosing(engine.stream(Request("prompt"))) as deltas:
            await anext(deltas)

    asyncio.run(scenario())
    (envelope,) = engine.wait_ended(1)
    assert (envelope.status, len(envelope.tokens)) == (Status.CANCELED, 1)
    with pytest.raises(TimeoutError, match="1 of 2 calls"):
        engine.wait_ended(2, timeout_s=0.01)


def test_errors_come_when_told() -> None:
    engine = ScriptedEngine(budget_tokens=10)
    with pytest.raises(BudgetExceeded):
        collect(engine, Request("prompt", max_tokens=5))
    with pytest.raises(RuntimeError, match="nothing to say"):
        collect(engine, Request("prompt", max_tokens=4))
    engine.say("abc", error=KeyError("lost"), error_after=2)
    with pytest.raises(KeyError, match="lost"):
        collect(engine, Request("prompt", max_tokens=4))
    assert [(envelope.status, envelope.text) for envelope in engine.envelopes] == [(Status.FAULTED, "ab")]


@pytest.mark.parametrize("module", ["zllm_jax.testing", "zllm_jax.server", "zllm_jax.protocol.openai_chat"])
def test_no_jax(module: str) -> None:
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


GREEDY = Sampling(temperature=0.0)
PROMPT = list(range(10, 20))
HERE, THERE = (0, 1, 2), (5, 3, 4)


def chunk(start: int, stop: int, pages: Sequence[int] = HERE, *, ring: int = 0) -> Any:
    from zllm_jax.runtime import Chunk

    tokens, last = PROMPT[start:stop], stop == len(PROMPT)
    return Chunk(tokens=tokens, start=start, pages=pages, ring=ring, slot=0, sampling=GREEDY, seed=0, last=last)


def moved(backend: ScriptedBackend, stage: int, *, ring: int) -> list[Any]:
    """A stage's rows from HERE and ring 0 to THERE and `ring`."""
    copies = []
    for first in (0, 2):
        rows = backend.read_pages(stage, HERE[first : first + 2])
        room = {name: aligned_empty(part.shape, part.dtype) for name, part in rows.items()}
        for name, part in rows.items():
            room[name][...] = part
        copies.append((backend.write_pages(stage, room, THERE[first : first + 2]), room))
    kept = {name: aligned_empty(part.shape, part.dtype) for name, part in backend.read_ring(stage, 0).items()}
    for name, part in backend.read_ring(stage, 0).items():
        kept[name][...] = part
    copies.append((backend.write_ring(stage, kept, ring), kept))
    return copies


@pytest.mark.parametrize("window", [0, 4])
def test_scripted_backend_stages(window: int) -> None:
    """A stage that computes after its rows were written is right, one that is too early names the row."""
    backend = ScriptedBackend(window=window)
    backend.prefill(chunk(0, 9))
    tail = chunk(9, 10, THERE, ring=1)
    moved(backend, 0, ring=1)
    carry = backend.prefill_stage(tail, 0, None)
    with pytest.raises(AssertionError, match="page 5 in stage 1 should hold position 0"):
        backend.prefill_stage(tail, 1, carry)
    moved(backend, 1, ring=1)
    with pytest.raises(AssertionError, match="not what the stage before returned"):
        backend.prefill_stage(tail, 1, None)
    drawn = backend.prefill_stage(tail, 1, carry)
    assert drawn.token == chained_token(PROMPT, GREEDY, 0)
    assert backend.num_computed == 10


def test_scripted_backend_reads_only_what_was_written() -> None:
    backend = ScriptedBackend()
    backend.prefill(chunk(0, 10))
    assert backend.read_pages(1, HERE[2:])["paged.rows.1"][:2, 0].tolist() == PROMPT[8:]
    with pytest.raises(AssertionError, match="row 0 of page 7 in stage 1 holds nothing to be read"):
        backend.read_pages(1, (0, 7))
    with pytest.raises(AssertionError, match="row 2 of page 2 in stage 0 holds nothing to be read"):
        backend.read_pages(0, (2, 0))  # only the last page may be partly full


def test_scripted_backend_notices_a_buffer_that_is_used_again_too_early() -> None:
    backend = ScriptedBackend(hold_copies=True)
    backend.prefill(chunk(0, 10))
    (first, room), (second, _), _ = moved(backend, 0, ring=1)
    assert not first.done()
    second.wait()
    assert second.done()
    room["paged.rows.0"].fill(7)
    with pytest.raises(AssertionError, match=r"paged\.rows\.0 changed before its copy was done"):
        backend.end_copies()
    assert first.done()


def test_scripted_backend_takes_whole_aligned_groups() -> None:
    backend = ScriptedBackend()
    for rows in (aligned_empty((8 * 3 + 1,), np.int64)[1:].reshape(8, 3), aligned_empty((4, 3), np.int64)):
        with pytest.raises(AssertionError, match=r"stage 0 takes paged\.rows\.0 of \(8, 3\) at a 64-byte address"):
            backend.write_pages(0, {"paged.rows.0": rows}, [1])
