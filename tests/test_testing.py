"""The testing room is public, so it is tested itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import aclosing

import pytest

from zllm_jax.errors import BudgetExceeded
from zllm_jax.testing import ByteTokenizer, ScriptedEngine, tiny_config
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
