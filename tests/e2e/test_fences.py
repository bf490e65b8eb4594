"""A small model that was never trained for it answers in JSON that satisfies each schema, eight requests at a time."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.fence import corpus
from zllm_jax import Engine, Request, Sampling, Status
from zllm_jax.errors import InvalidRequest
from zllm_jax.values import Envelope, Fence

FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
PROMPT = "Answer with a short made-up example, as JSON that satisfies this schema:\n"


@pytest.fixture
def engine(fenced: Engine) -> Engine:
    return fenced


def asked(schema: Any, seed: int, *, fenced: bool = True, max_tokens: int = 400) -> Request:
    return Request(
        [{"role": "user", "content": PROMPT + json.dumps(schema)[:1500]}],
        max_tokens=max_tokens,
        sampling=Sampling(temperature=1.0, seed=seed),
        fence=Fence(schema=schema) if fenced else None,
    )


def answers(engine: Engine, requests: list[Request]) -> list[Envelope]:
    """All at once; they share the batch."""
    calls = [engine.submit(one) for one in requests]
    return [next(delta.envelope for delta in call if delta.envelope is not None) for call in calls]


def judged(schemas: list[Any], envelopes: list[Envelope]) -> tuple[int, int]:
    """(valid answers, answers that ended because of the token limit). Anything else fails the test."""
    valid, cut = 0, 0
    for schema, envelope in zip(schemas, envelopes, strict=True):
        assert envelope.status in (Status.COMPLETED, Status.TRUNCATED), envelope
        if envelope.status is Status.TRUNCATED:
            cut += 1
            continue
        value = json.loads(envelope.text)
        checker = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        assert checker.is_valid(value), (schema, envelope.text)
        valid += 1
    return valid, cut


def test_eight_answers_satisfy_their_schemas(engine: Engine) -> None:
    schemas = corpus.schemas(8, seed=1)
    valid, cut = judged(schemas, answers(engine, [asked(one, i, max_tokens=100) for i, one in enumerate(schemas)]))
    assert valid + cut == 8
    assert valid >= 4


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_three_hundred_answers_satisfy_their_schemas(engine: Engine) -> None:
    schemas = [one for one in corpus.schemas(50, seed=3) for _ in range(6)]
    valid, cut = judged(schemas, answers(engine, [asked(one, i) for i, one in enumerate(schemas)]))
    print(f"{valid} valid, {cut} cut by max_tokens, of {len(schemas)}")
    assert valid + cut == 300


def test_without_a_fence_they_seldom_do(engine: Engine) -> None:
    schemas = corpus.schemas(8, seed=1)
    found = answers(engine, [asked(one, i, fenced=False, max_tokens=60) for i, one in enumerate(schemas)])
    assert sum(satisfies(schema, one.text) for schema, one in zip(schemas, found, strict=True)) <= 4


def satisfies(schema: Any, text: str) -> bool:
    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


def test_a_choice_is_forced_to_its_end(engine: Engine) -> None:
    fence = Fence(choices=("the first of them", "the second of them"))
    envelope = engine.generate(Request("Which?", max_tokens=40, sampling=Sampling(temperature=0.0), fence=fence))
    assert envelope.status is Status.COMPLETED
    assert envelope.text in fence.choices


def test_a_call_cut_by_the_limit_is_truncated_and_a_good_beginning(engine: Engine) -> None:
    fence = Fence(regex="(ab){40}")
    envelope = engine.generate(Request("Write.", max_tokens=5, fence=fence))
    assert envelope.status is Status.TRUNCATED
    assert ("ab" * 40).startswith(envelope.text)


@pytest.mark.parametrize(
    "fence, message",
    [
        (Fence(schema={"uniqueItems": True}), "#/uniqueItems: "),
        (Fence(schema=False), "no value satisfies"),
        (Fence(regex="(a"), "regex|pattern|group"),
    ],
)
def test_what_cannot_be_enforced_is_refused_before_it_is_queued(engine: Engine, fence: Fence, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.submit(Request("x", fence=fence))


def test_what_is_left_out_on_request_is_reported(engine: Engine) -> None:
    fence = Fence(schema={"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 3}, relax=True)
    envelope = engine.generate(Request("Numbers:", max_tokens=30, fence=fence))
    assert [one.split(":")[0] for one in envelope.telemetry.fence_relaxed] == ["#/uniqueItems"]
    assert set(json.loads(envelope.text)) <= {1, 2}
