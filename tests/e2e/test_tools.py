"""A small model that was never trained for tools calls them rightly, in every dialect, whatever the choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.generations import (
    CHOICES,
    CONFIG,
    TRAINED_ON,
    Case,
    answers,
    cases,
    complaint,
    raw_text,
    tool_case,
    unfenced,
)
from zllm_jax import Engine, Request, Sampling, Status
from zllm_jax.dialect import call_message
from zllm_jax.values import Envelope

SMALL = ("switch", "prefixes", "all_required", "clock", "tuple", "weather", "home", "unions")


def check(engine: Engine, some: list[Case]) -> list[Envelope]:
    found = list(answers(engine, [one.request for one in some]))
    wrong = [
        (case.kind, said, raw_text(engine, envelope))
        for case, envelope in zip(some, found, strict=True)
        if (said := complaint(case, envelope, raw_text(engine, envelope)))
    ]
    assert not wrong
    return found


def test_eight_turns_hold_only_right_calls(fenced: Engine) -> None:
    """Tools that the prompt does not even show: what comes is the fence's doing alone."""
    some = [tool_case(name, TRAINED_ON[i % 3], CHOICES[i % 4], seed=i, max_tokens=120) for i, name in enumerate(SMALL)]
    some = [replace(one, request=replace(one.request, messages=None, prompt="Now call:")) for one in some]
    found = check(fenced, some)
    assert sum(len(one.calls) for one in found) >= 3
    assert sum(one.status is Status.COMPLETED for one in found) >= 2


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_three_hundred_generations(fenced: Engine) -> None:
    found = check(fenced, cases(300, max_tokens=256))
    print(f"{sum(one.status is Status.COMPLETED for one in found)} of 300 came to an end, all of them valid")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_fences_they_seldom_do(smollm2: Path) -> None:
    some = [one for one in cases(120, max_tokens=100) if one.kind in ("schema", "required", "named")]
    with Engine.from_pretrained(smollm2, replace(CONFIG, fence_states=0)) as engine:
        found = list(answers(engine, [unfenced(one.request) for one in some]))
        right = sum(
            envelope.status is Status.COMPLETED and not complaint(case, envelope, raw_text(engine, envelope))
            for case, envelope in zip(some, found, strict=True)
        )
    print(f"{right} of {len(some)} are valid without fences")
    assert right <= len(some) / 4


def test_a_turn_goes_on_from_the_call_it_made(fenced: Engine) -> None:
    """The result of a call is read behind the very ids that made the call."""
    first = tool_case("clock", "chatml", "required", seed=4, max_tokens=60).request
    first = replace(first, parallel_tool_calls=False)
    envelope = fenced.generate(first)
    (call,) = envelope.calls
    turn = {"role": "assistant", "content": envelope.text, "tool_calls": [call_message(call)]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "12:00"}
    later = replace(first, messages=(*(first.messages or ()), turn, result), tool_choice="none", max_tokens=5)
    again = fenced.generate(later)
    assert again.usage.cached_tokens >= envelope.usage.prompt_tokens + len(envelope.tokens) - 1
    assert again.calls == ()


def test_the_checkpoints_own_dialect_is_taken(fenced: Engine) -> None:
    request = Request(
        [{"role": "user", "content": "What time is it?"}],
        tools=tool_case("clock", "", "auto", seed=0, max_tokens=1).request.tools,
        tool_choice="required",
        max_tokens=40,
        sampling=Sampling(temperature=0.0),
    )
    envelope = fenced.generate(request)
    assert envelope.telemetry.tool_dialect == "chatml"
    assert {call.name for call in envelope.calls} == {"now"}
