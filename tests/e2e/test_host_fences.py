"""A small model writes texts of grammars that no table holds, beside requests of every other kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
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


def asked(fence: Fence | None, seed: int, *, max_tokens: int = 12) -> Request:
    sampling = Sampling(temperature=1.0, seed=seed)
    return Request("(1+2)+3 = ", max_tokens=max_tokens, sampling=sampling, fence=fence, cache=False)


def answers(engine: Engine, requests: list[Request]) -> list[Envelope]:
    """All at once; they share the batch."""
    calls = [engine.submit(one) for one in requests]
    return [next(delta.envelope for delta in call if delta.envelope is not None) for call in calls]


def is_sum(text: str) -> bool:
    """By what every sum shrinks to."""
    while (shorter := re.sub(r"\([0-9]\)|[0-9]\+[0-9]", "0", text)) != text:
        text = shorter
    return re.fullmatch("[0-9]", text) is not None


def completed(text: str) -> str:
    """The shortest sum that begins so, if any does."""
    more = "0" if not text or text[-1] in "+(" else ""
    return text + more + ")" * (text.count("(") - text.count(")"))


def test_requests_of_every_kind_share_a_batch_and_are_as_alone(engine: Engine) -> None:
    fences = [Fence(lark=SUMS), None, Fence(regex="[a-z]+( [a-z]+)*\\."), Fence(lark=SUMS)]
    requests = [asked(fence, seed) for seed, fence in enumerate(fences)]
    together = answers(engine, requests)
    assert [one.telemetry.fence for one in together] == ["host", "", "device", "host"]
    for request, envelope in zip(requests, together, strict=True):
        assert envelope.status in (Status.COMPLETED, Status.TRUNCATED), envelope
        if envelope.telemetry.fence == "host":
            assert is_sum(envelope.text if envelope.status is Status.COMPLETED else completed(envelope.text))
        assert engine.generate(request).tokens == envelope.tokens


@pytest.mark.slow
def test_forty_texts_of_a_grammar(engine: Engine) -> None:
    requests = [asked(Fence(lark=SUMS), seed, max_tokens=60) for seed in range(40)]
    for envelope in answers(engine, requests):
        assert envelope.status in (Status.COMPLETED, Status.TRUNCATED), envelope
        assert is_sum(envelope.text if envelope.status is Status.COMPLETED else completed(envelope.text))


@pytest.mark.slow
def test_what_a_step_costs(engine: Engine) -> None:
    """The same language on the device, on the host, and not at all; the figures are printed, and compared loosely."""
    fences = {"free": None, "device": Fence(regex="[0-9+]{300}"), "host": Fence(lark="start: /[0-9+]{300}/\n")}
    seconds: dict[str, list[float]] = {name: [] for name in fences}
    for seed in range(5):
        for name, fence in fences.items():
            envelope = engine.generate(asked(fence, seed, max_tokens=32))
            if envelope.usage.generated_tokens == 32:
                seconds[name].append(envelope.timing.decode_s / 31)
    step_ms = {name: round(1e3 * min(found), 2) for name, found in seconds.items()}
    print(f"ms a step: {step_ms}")
    assert step_ms["host"] < 1.5 * step_ms["device"]


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
