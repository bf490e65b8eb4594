"""What an operator sees of a request: one line at its end, its figures in the metrics, and no text of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import aclosing

import pytest

from tests.engine.talker import Talker
from zllm_jax.errors import BudgetExceeded, InvalidRequest
from zllm_jax.values import Request, Sampling

Make = Callable[..., Talker]
GREEDY = Sampling(temperature=0.0)


def ends(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage().startswith("request ended")]


def test_one_line_at_the_end_of_each(talker: Make, caplog: pytest.LogCaptureFixture) -> None:
    one = talker()
    one.say(*"a secret")
    with caplog.at_level(logging.INFO, "zllm_jax"):
        envelope = one.engine.generate(Request("the key?\n", sampling=GREEDY, request_id="req-77"))
        one.engine.generate(Request("the key?\n", sampling=GREEDY, max_tokens=1))
    first, second = ends(caplog)
    assert first.request_id == "req-77"  # type: ignore[attr-defined]
    figures = vars(first)
    assert (figures["status"], figures["finish"], figures["tier"]) == ("COMPLETED", "eos", "cold")
    assert (figures["prompt_tokens"], figures["cached_tokens"], figures["generated_tokens"]) == (9, 0, 9)
    assert figures["ttft_s"] == envelope.timing.ttft_s
    assert figures["itl_s"] == pytest.approx(envelope.timing.decode_s / 8)
    assert "request_id=req-77 status=COMPLETED finish=eos tier=cold" in first.getMessage()
    assert (vars(second)["tier"], vars(second)["itl_s"]) == ("resident", None)
    assert not any("secret" in record.getMessage() or "key" in record.getMessage() for record in caplog.records)


def test_a_fault_is_a_warning(talker: Make, caplog: pytest.LogCaptureFixture) -> None:
    one = talker()

    def fail(name: str) -> None:
        raise MemoryError("no room for the logits")

    one.device.before = fail
    with caplog.at_level(logging.WARNING, "zllm_jax.engine"):
        one.engine.generate(Request("what?\n", sampling=GREEDY))
    (line,) = ends(caplog)
    assert (line.levelname, vars(line)["error"]) == ("WARNING", "MemoryError: no room for the logits")
    assert vars(line)["ttft_s"] is None


def test_one_whose_listener_went_away(talker: Make) -> None:
    """A stream that is closed early ends as CANCELED, and that is said once."""
    one = talker()
    one.say(*"a long answer")
    lines: list[logging.LogRecord] = []
    said = threading.Event()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record)
            said.set()

    log = logging.getLogger("zllm_jax.engine.ending")
    handler, before = Keep(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:

        async def leave() -> None:
            async with aclosing(one.engine.stream(Request("what?\n", sampling=GREEDY))) as deltas:
                async for _ in deltas:
                    return

        asyncio.run(leave())
        assert said.wait(20)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    (line,) = lines
    assert vars(line)["finish"] in ("canceled", "eos")  # the answer may be complete before the cancel arrives


def test_what_is_refused_is_counted_by_its_error(talker: Make) -> None:
    one = talker()
    with pytest.raises(BudgetExceeded):
        one.engine.submit(Request("x" * 500, max_tokens=1))
    with pytest.raises(InvalidRequest):
        one.engine.submit(Request(tokens=(400,)))
    shown = one.engine.metrics().decode()
    assert 'zllm_refused_requests_total{error="BudgetExceeded"} 1.0' in shown
    assert 'zllm_refused_requests_total{error="InvalidRequest"} 1.0' in shown
