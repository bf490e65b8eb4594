"""A small model writes texts of grammars that no table holds, beside requests of every other kind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from zllm_jax import Engine, EngineConfig, Request, Sampling, Status
from zllm_jax.errors import InvalidRequest
from zllm_jax.fence import MAX_DEPTH
from zllm_jax.values import Envelope, Fence

SUMS = 'start: sum\nsum: term ("+" term)*\nterm: /[0-9]/ | "(" sum ")"\n'


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    config = EngineConfig(max_seq_tokens=512, disk_cache=False, decode_buckets=(8,), prefill_buckets=(32,))
    with Engine.from_pretrained(smollm2, config) as made:
        yield made


def asked(fence: Fence | None, seed: int) -> Request:
    return Request("(1+2)+3 = ", max_tokens=40, sampling=Sampling(temperature=1.0, seed=seed), fence=fence, cache=False)


def answers(engine: Engine, requests: list[Request]) -> list[Envelope]:
    """All at once; they share the batch."""
    calls = [engine.submit(one) for one in requests]
    return [next(delta.envelope for delta in call if delta.envelope is not None) for call in calls]


def is_sum(text: str) -> bool:
    """By Python's own parser, after the alphabet: then only digits, +, and brackets in their places are left."""
    if not set(text) <= set("0123456789+()") or "()" in text:
        return False
    try:
        compile(text.replace("+", "|"), "sum", "eval")  # `|` has no sign of its own, as `+1` has
    except SyntaxError:
        return False
    return not any(a.isdigit() and b.isdigit() for a, b in pairwise(text))


def test_requests_of_every_kind_share_a_batch_and_are_as_alone(engine: Engine) -> None:
    fences = [Fence(lark=SUMS), None, Fence(regex="[a-z]+( [a-z]+)*\\."), Fence(lark=SUMS), Fence(choices=("a", "b"))]
    requests = [asked(fence, seed) for seed, fence in enumerate(fences)]
    together = answers(engine, requests)
    assert [one.telemetry.fence for one in together] == ["host", "", "device", "host", "device"]
    for request, envelope in zip(requests, together, strict=True):
        assert envelope.status in (Status.COMPLETED, Status.TRUNCATED), envelope
        if envelope.status is Status.COMPLETED and envelope.telemetry.fence == "host":
            assert is_sum(envelope.text)
        assert engine.generate(request).tokens == envelope.tokens


def test_brackets_close_however_deep(engine: Engine) -> None:
    """Opening ones are made likely, and less so each time: the nesting goes beyond a machine's, and comes back."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    (opening,), (middle,) = tokenizer.encode("("), tokenizer.encode("x")
    bias = ((opening, 3.0 * MAX_DEPTH), (middle, 10.0))
    sampling = Sampling(temperature=0.0, frequency_penalty=2.0, logit_bias=bias)
    fence = Fence(lark='start: "(" start ")" | "x"\n')
    envelope = engine.generate(Request("(", max_tokens=200, sampling=sampling, fence=fence))
    assert envelope.status is Status.COMPLETED
    depth = envelope.text.count("(")
    assert depth > MAX_DEPTH
    assert envelope.text == "(" * depth + "x" + ")" * depth


def test_a_bad_grammar_is_refused_before_it_is_queued(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"line 2, column 4: unknown name"):
        engine.submit(Request("x", fence=Fence(lark='start: "a" b\nb: c\n')))
    with pytest.raises(InvalidRequest, match="exactly one of schema, regex, choices and lark, got regex, lark"):
        Fence(regex="a", lark='start: "a"')
