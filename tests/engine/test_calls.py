"""One call: how it may end, what it may ask, what is refused before anything is queued."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests.engine.talker import Talker
from zllm_jax.cache import SnapshotStore
from zllm_jax.errors import BudgetExceeded, InvalidRequest, NotReleased, StoreUnavailable
from zllm_jax.scheduler import clock
from zllm_jax.values import Request, Sampling, Status, Tier, release

Make = Callable[..., Talker]
GREEDY = Sampling(temperature=0.0)
QUESTION = "what?\n"


def hold(one: Talker, call: str) -> tuple[threading.Event, threading.Event]:
    """Stop the device at the next `call`: (it has come there, let it go on)."""
    arrived, go_on = threading.Event(), threading.Event()

    def before(name: str) -> None:
        if name == call:
            arrived.set()
            assert go_on.wait(20)

    one.device.before = before
    return arrived, go_on


def assert_canceled(one: Talker) -> None:
    """What ran has ended, and was not kept."""
    deadline = clock() + 20
    while one.engine.report()["running"] or one.engine.report()["waiting"]:
        assert clock() < deadline
        time.sleep(0.001)
    assert one.cache.report()["resident"] == []


# -- the status table of the contract ----------------------------------------------------------------------------------


def test_completed_is_released(talker: Make) -> None:
    one = talker()
    one.say("yes")
    envelope = one.engine.generate(Request(QUESTION, sampling=GREEDY))
    assert (envelope.status, envelope.telemetry.finish) == (Status.COMPLETED, "eos")
    assert release(envelope) == "yes"


def test_truncated_is_not_released(talker: Make) -> None:
    one = talker()
    one.say("y", "e", "s")
    envelope = one.engine.generate(Request(QUESTION, max_tokens=2, sampling=GREEDY))
    assert (envelope.status, envelope.text, envelope.telemetry.finish) == (Status.TRUNCATED, "ye", "max_tokens")
    with pytest.raises(NotReleased, match="ended as TRUNCATED"):
        release(envelope)


def test_a_deadline_is_a_transport_failure(talker: Make) -> None:
    one = talker()
    one.say(*"a long answer that takes its time")
    one.device.before = lambda name: time.sleep(0.01)
    envelope = one.engine.generate(Request(QUESTION, timeout_s=0.03, sampling=GREEDY))
    assert (envelope.status, envelope.telemetry.deadline_exceeded) == (Status.TRANSPORT_FAILURE, True)
    with pytest.raises(NotReleased):
        release(envelope)


def test_cancel(talker: Make) -> None:
    one = talker()
    one.say(*"a long answer")
    arrived, go_on = hold(one, "decode")
    call = one.engine.submit(Request(QUESTION, sampling=GREEDY))
    assert arrived.wait(20)
    call.cancel()
    go_on.set()
    envelope = [delta.envelope for delta in call][-1]
    assert envelope is not None
    assert (envelope.status, envelope.telemetry.finish) == (Status.CANCELED, "canceled")
    assert envelope.telemetry.saved_steps > 200
    with pytest.raises(NotReleased):
        release(envelope)


def test_a_fault_says_what_failed(talker: Make) -> None:
    one = talker()

    def fail(name: str) -> None:
        if name == "decode":
            raise MemoryError("no room for the logits")

    one.device.before = fail
    one.say("yes")
    envelope = one.engine.generate(Request(QUESTION, sampling=GREEDY))
    assert (envelope.status, envelope.telemetry.termination) == (Status.FAULTED, "fault")
    assert envelope.error == "MemoryError: no room for the logits"
    with pytest.raises(NotReleased, match="no room for the logits"):
        release(envelope)


def test_closing_the_stream_cancels(talker: Make) -> None:
    one = talker()
    one.say(*"a long answer")
    _, go_on = hold(one, "decode")

    async def scenario() -> None:
        async with aclosing(one.engine.stream(Request(QUESTION, sampling=GREEDY))) as deltas:
            await anext(deltas)  # the first token comes from the prompt
        go_on.set()

    asyncio.run(scenario())
    assert_canceled(one)


def test_a_caller_who_leaves_while_its_prompt_is_prepared(talker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = talker()
    one.say(*"a long answer")
    preparing, go_on = threading.Event(), threading.Event()
    encode = one.tokenizer.encode

    def slow(text: str) -> list[int]:
        preparing.set()
        assert go_on.wait(20)
        return encode(text)

    one.tokenizer.encode = slow  # type: ignore[method-assign]
    _, go_on_decoding = hold(one, "decode")
    scheduler, tickets = one.engine._scheduler, []
    submit = scheduler.submit
    monkeypatch.setattr(scheduler, "submit", lambda job: tickets.append(submit(job)) or tickets[-1])

    async def scenario() -> None:
        task = asyncio.ensure_future(anext(one.engine.stream(Request(QUESTION, sampling=GREEDY))))
        await asyncio.to_thread(preparing.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await asyncio.get_running_loop().shutdown_default_executor()  # it was submitted all the same
        await asyncio.sleep(0.001)

    asyncio.run(scenario())
    go_on_decoding.set()
    assert_canceled(one)
    assert [ticket.cancelled for ticket in tickets] == [True]


# -- what an envelope says ---------------------------------------------------------------------------------------------


def test_request_ids(talker: Make) -> None:
    one = talker()
    one.say("yes")
    ids = [one.engine.generate(Request(QUESTION, sampling=GREEDY)).request_id for _ in range(3)]
    assert len(set(ids)) == 3
    assert one.engine.generate(Request(QUESTION, sampling=GREEDY, request_id="mine")).request_id == "mine"


def test_a_run_can_be_repeated_from_its_telemetry(talker: Make) -> None:
    one = talker()
    one.say("yes")
    hot = Sampling(temperature=0.7, top_p=0.9)
    first, second = (one.engine.generate(Request(QUESTION, sampling=hot)).telemetry for _ in range(2))
    assert first.sampling == hot
    assert first.seed != second.seed
    assert one.engine.generate(Request(QUESTION, sampling=Sampling(seed=-1))).telemetry.seed == 2**64 - 1


def test_the_parts_add_up_to_what_the_caller_waited(talker: Make) -> None:
    one = talker()
    one.say(*"an answer of some length")
    one.device.before = lambda name: time.sleep(0.003)
    for _ in range(3):
        start = clock()
        envelope = one.engine.generate(Request(QUESTION * 4, sampling=GREEDY))
        total = clock() - start
        assert envelope.timing.total_s == pytest.approx(total, rel=0.02, abs=1e-3)


def test_usage_of_a_conversation(talker: Make) -> None:
    one = talker()
    one.say("yes")
    first = one.engine.generate(Request(QUESTION, sampling=GREEDY))
    assert (first.usage.prompt_tokens, first.usage.cached_tokens, first.usage.generated_tokens) == (6, 0, 2)
    prompt = (*QUESTION.encode(), *first.tokens, *b"why?\n")
    second = one.engine.generate(Request(prompt, sampling=GREEDY))
    assert (second.usage.prompt_tokens, second.usage.cached_tokens) == (13, 7)
    assert (second.usage.tier, second.usage.prefilled_tokens) == (Tier.RESIDENT, 6)
    again = one.engine.generate(Request(prompt, sampling=GREEDY, cache=False))
    assert (again.usage.cached_tokens, again.text) == (0, second.text)


def test_ignore_eos_goes_on(talker: Make) -> None:
    one = talker()
    one.say("yes")
    envelope = one.engine.generate(Request(QUESTION, max_tokens=9, ignore_eos=True, sampling=GREEDY))
    assert (len(envelope.tokens), envelope.status) == (9, Status.TRUNCATED)


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: Request(""), "prompt"),
        (lambda: Request(tokens=()), "tokens"),
        (lambda: Request(messages=()), "messages"),
        (lambda: Request(tokens=(400,)), "tokens"),
        (lambda: Request(tokens=(-1,)), "tokens"),
        (lambda: Request(QUESTION, max_tokens=0), "max_tokens"),
        (lambda: Request(QUESTION, timeout_s=0.0), "timeout_s"),
        (lambda: Request(QUESTION, stop=("",)), "stop"),
        (lambda: Request(messages=({"role": "user", "content": "hi"},)), "messages"),  # it has no chat template
        (lambda: Request(QUESTION, sampling=Sampling(logit_bias=((400, 1.0),))), "logit_bias"),
        (lambda: Request(QUESTION, sampling=Sampling(temperature=math.nan)), "temperature"),
        (lambda: Request(QUESTION, sampling=Sampling(temperature=-0.1)), "temperature"),
        (lambda: Request(QUESTION, sampling=Sampling(top_p=0.0)), "top_p"),
        (lambda: Request(QUESTION, sampling=Sampling(top_p=math.inf)), "top_p"),
        (lambda: Request(QUESTION, sampling=Sampling(min_p=1.5)), "min_p"),
        (lambda: Request(QUESTION, sampling=Sampling(top_k=-1)), "top_k"),
        (lambda: Request(QUESTION, sampling=Sampling(logprobs=21)), "logprobs"),
        (lambda: Request("half \ud83d a pair"), "prompt"),
    ],
)
def test_refused_by_name_before_anything_is_queued(talker: Make, make: Callable[[], Request], param: str) -> None:
    one = talker()
    calls: list[str] = []
    one.device.before = calls.append
    with pytest.raises(InvalidRequest) as caught:
        one.engine.submit(make())
    assert caught.value.param == param
    assert calls == []


@pytest.mark.parametrize(("prompt", "max_tokens", "param"), [(500, 1, "prompt"), (200, 201, "max_tokens")])
def test_beyond_the_budget(talker: Make, prompt: int, max_tokens: int, param: str) -> None:
    one = talker()
    with pytest.raises(BudgetExceeded, match=f"{prompt} tokens.*{max_tokens}.*{prompt + max_tokens}.* 400") as caught:
        one.engine.generate(Request("x" * prompt, max_tokens=max_tokens))
    assert caught.value.param == param


def test_text_needs_a_tokenizer(talker: Make) -> None:
    one = talker(tokenizer=False)
    with pytest.raises(InvalidRequest, match="send token ids"):
        one.engine.submit(Request(QUESTION))
    with pytest.raises(InvalidRequest, match="stop sequences are text"):
        one.engine.submit(Request(tokens=(10,), stop=("x",)))
    one.reply = [5, 6]
    envelope = one.engine.generate(Request(tokens=(10,), max_tokens=2, sampling=GREEDY))
    assert (envelope.tokens, envelope.text) == ((5, 6), "")


def test_a_store_that_fails_never_reaches_the_caller(
    talker: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk while evicting, an unreadable one while restoring: logged misses, and the same answer."""
    store = SnapshotStore(tmp_path, namespace="n")
    one = talker(store=store)
    one.say("yes")

    def unavailable(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("no space left, or no permission")

    first = one.engine.generate(Request(QUESTION, sampling=GREEDY))
    one.engine.evict()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(store, "reader", unavailable)
        patch.setattr(store, "writer", unavailable)
        second = one.engine.generate(Request(QUESTION, sampling=GREEDY))
        assert one.engine.evict() == 0
    assert (second.text, second.status, second.usage.tier) == (first.text, first.status, Tier.COLD)
    assert caplog.text.count("no space left") == 2
