"""A small model that repeats itself is led out of it, and says so; whoever did not ask is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from zllm_jax import Engine, EngineConfig, Request, Sampling
from zllm_jax.values import Envelope

GREEDY = Sampling(temperature=0.0)
PROMPT = "The cat sat on the mat. " * 12


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    config = EngineConfig(
        max_seq_tokens=512, disk_cache=False, decode_buckets=(4,), max_batch=4, prefill_buckets=(32,), loop_guard=True
    )
    with Engine.from_pretrained(smollm2, config) as made:
        yield made


def answers(engine: Engine, *requests: Request) -> list[Envelope]:
    """All at once; they share the batch."""
    calls = [engine.submit(one) for one in requests]
    return [next(delta.envelope for delta in call if delta.envelope is not None) for call in calls]


def asked(prompt: str, loop_guard: bool | None, max_tokens: int = 300) -> Request:
    return Request(prompt, max_tokens=max_tokens, sampling=GREEDY, loop_guard=loop_guard, cache=False)


@pytest.mark.slow
def test_a_model_that_repeats_itself_is_led_out_of_it(engine: Engine) -> None:
    """Beside it, and in the same batch, the same request without the guard."""
    free, watched, default = answers(engine, asked(PROMPT, False), asked(PROMPT, True), asked(PROMPT, None))
    assert (free.telemetry.loops_broken, free.text.count("The cat sat on the mat.")) == (0, 42)
    assert watched.telemetry.loops_broken > 0
    left = next(i for i, (one, two) in enumerate(zip(free.tokens, watched.tokens, strict=True)) if one != two)
    assert 192 <= left < 220
    rest = engine.tokenizer.decode(watched.tokens[left:])
    assert "The cat sat on the mat." not in rest
    assert (default.tokens, default.telemetry.loops_broken) == (watched.tokens, watched.telemetry.loops_broken)
    (alone,) = answers(engine, asked(PROMPT, True))
    assert alone.tokens == watched.tokens


@pytest.mark.slow
def test_what_does_not_loop_is_the_same(engine: Engine) -> None:
    free, watched = answers(engine, *(asked("Once upon a time", guard, max_tokens=40) for guard in (False, True)))
    assert free.tokens == watched.tokens
    assert watched.telemetry.loops_broken == 0
