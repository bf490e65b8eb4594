"""Exact replay through the whole engine: what a client sends back is a hit, in this process and in the next."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.talker import PieceTokenizer, Talker
from zllm_jax.cache import SnapshotStore
from zllm_jax.dialect import ChatTemplate
from zllm_jax.values import Envelope, Request, Sampling, Status, Tier

Make = Callable[..., Talker]
GREEDY = Sampling(temperature=0.0)
TRIMS = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}</>{% endfor %}<assistant>{{ '\n' }}"
)
USER = {"role": "user", "content": "ready?"}
THEN = {"role": "user", "content": "and then?"}


def said(envelope: Envelope) -> dict[str, Any]:
    return {"role": "assistant", "content": envelope.text}


def ask(one: Talker, *messages: dict[str, Any], **options: Any) -> Envelope:
    return one.engine.generate(Request(list(messages), **{"max_tokens": 40, "sampling": GREEDY} | options))


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


def kept(envelope: Envelope) -> int:
    """Tokens of the state that a finished request leaves: the last drawn one was not fed."""
    return envelope.usage.prompt_tokens + len(envelope.tokens) - 1


def test_an_echo_is_a_hit_though_the_template_trims_it(talker: Make) -> None:
    one = talker(template=TRIMS)
    one.say(" ", "yes", "  ")
    first = ask(one, USER)
    second = ask(one, USER, said(first), THEN)
    assert second.usage.cached_tokens == kept(first)
    third = ask(one, USER, said(first), THEN, said(second), THEN)
    assert third.usage.cached_tokens == kept(second)


def test_a_cut_answer_goes_on_where_it_was_cut(talker: Make) -> None:
    one = talker(template=TRIMS)
    one.say("y", "e", "s", " ")
    first = ask(one, USER, max_tokens=2)
    assert first.status is Status.TRUNCATED
    assert ask(one, USER, said(first), THEN).usage.cached_tokens == kept(first)


def test_an_answer_ended_by_a_stop_sequence(talker: Make) -> None:
    one = talker(template=TRIMS)
    one.say("yes", " ", "STOP", "more")
    first = ask(one, USER, stop=("STOP",))
    assert (first.text, first.telemetry.finish) == ("yes ", "stop")
    state = first.usage.prompt_tokens + 2
    assert ask(one, USER, said(first), THEN).usage.cached_tokens == state


@pytest.mark.parametrize("cached", [True, False])
def test_the_prompt_does_not_depend_on_the_cache(talker: Make, cached: bool) -> None:
    one = talker(template=TRIMS)
    one.say(" ", "yes")
    first = ask(one, USER, cache=cached)
    if not cached:
        one.engine.forget()
    request = Request([USER, said(first), THEN], sampling=GREEDY)
    assert one.engine.count_tokens(request) == first.usage.prompt_tokens + 2 + len(
        "</><user>\nand then?</><assistant>\n"
    )


def test_what_was_cancelled_is_not_history(talker: Make) -> None:
    one = talker(template=TRIMS)
    one.say(*[" yes"] * 100)
    seen = threading.Event()
    one.device.before = lambda name: assert_set(seen) if name == "decode" else None  # the first token is out by then
    call = one.engine.submit(Request([USER], sampling=GREEDY))
    envelope = None
    for delta in call:
        call.cancel()
        seen.set()
        envelope = delta.envelope
    assert envelope is not None
    assert (envelope.status, envelope.tokens != ()) == (Status.CANCELED, True)
    messages = [USER, said(envelope), THEN]
    assert one.engine.count_tokens(Request(messages)) == len(TRIMS.render(messages))


def test_prompts_of_text_and_tokens_are_never_rewritten(talker: Make) -> None:
    one = talker(template=TRIMS)
    one.say(" ", "yes")
    ask(one, USER)
    text = TRIMS.render([USER, {"role": "assistant", "content": " yes"}, THEN])
    for request in (Request(text), Request(tokens=tuple(text.encode()))):
        assert one.engine.count_tokens(request) == len(text)


def test_tenants_do_not_see_each_others_turns(talker: Make) -> None:
    one = talker(template=TRIMS)
    one.say(" ", "yes")
    first = ask(one, USER, tenant="a")
    messages = [USER, said(first), THEN]
    assert one.engine.count_tokens(Request(messages, tenant="b")) == len(TRIMS.render(messages))
    assert ask(one, *messages, tenant="a").usage.cached_tokens == kept(first)


def test_calls_by_their_id(talker: Make) -> None:
    one = talker(template=TRIMS)
    one.say(" <call>", "f")
    first = ask(one, USER, request_id="mine")
    one.engine.name_calls("mine", ["call-1"])
    function = {"name": "f", "arguments": "{}"}
    echo = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
    }
    assert ask(
        one, USER, echo, {"role": "tool", "tool_call_id": "call-1", "content": "42"}
    ).usage.cached_tokens == kept(first)


@pytest.mark.parametrize("window", [0, 6])
def test_turns_come_back_with_their_snapshots(talker: Make, tmp_path: Path, window: int) -> None:
    """A new process, the same folder: the echo continues the sampled ids, and is restored from disk."""
    one = talker(template=TRIMS, store=SnapshotStore(tmp_path, namespace="n"), window=window)
    one.say(" ", "yes", "  ")
    first = ask(one, USER)
    messages = [USER, said(first), THEN]
    second = ask(one, *messages)
    messages += [said(second), THEN]
    wanted = one.engine.count_tokens(Request(messages))
    one.engine.evict()
    one.engine.close()

    later = talker(template=TRIMS, store=SnapshotStore(tmp_path, namespace="n"), window=window)
    later.say(" ", "yes", "  ")
    assert later.engine.count_tokens(Request(messages)) == wanted
    third = ask(later, *messages)
    assert (third.usage.tier, third.usage.cached_tokens) == (Tier.DISK, kept(second))


def test_an_edited_snapshot_costs_its_turn_and_refuses_nobody(talker: Make, tmp_path: Path) -> None:
    """An id that the model does not have, in a file that somebody changed: as if the turn was never stored."""
    one = talker(store=SnapshotStore(tmp_path, namespace="n"), template=TRIMS)
    one.say(" ", "yes", "  ")
    first = ask(one, USER, max_tokens=2)
    messages = [USER, said(first), THEN]
    meta_of = one.cache.meta_of

    def edited(tokens: Any) -> dict[str, Any]:
        (turn,) = meta_of(tokens)["turns"]
        assert len(turn["missing"]) == 1
        return {"turns": [{**turn, "missing": [PieceTokenizer.vocab_size]}]}

    one.cache.meta_of = edited
    one.engine.evict()
    later = talker(store=SnapshotStore(tmp_path, namespace="n"), template=TRIMS)
    later.say(" ", "yes", "  ")
    again = ask(later, *messages)
    assert again.status is Status.COMPLETED
    assert again.usage.cached_tokens == first.usage.prompt_tokens


def test_a_near_miss_says_what_differs(talker: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Known fault 1, with a line that is not known as volatile: in the envelope, in the log with its request."""
    one = talker(template=TRIMS)
    one.say("yes")
    long = "You are terse. " * 18
    for nonce in ("aaaa", "bbbb"):
        system = {"role": "system", "content": f"{long}nonce={nonce}"}
        with caplog.at_level(logging.INFO, "zllm_jax"):
            envelope = ask(one, system, {"role": "user", "content": "?"}, request_id=nonce)
    miss = envelope.telemetry.near_miss
    assert miss is not None
    assert miss.explanation.endswith(f"; messages[0].content, character {len(long) + len('nonce=')}")
    assert 'after ". nonce=" it is "bbbb</><" here and "aaaa</><" in the stored state' in miss.explanation
    (line,) = [record for record in caplog.records if record.getMessage().startswith("near miss")]
    assert (vars(line)["request_id"], line.getMessage()) == ("bbbb", f"near miss: {miss.explanation}")


def test_what_fails_at_the_end_leaves_the_answer(
    talker: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = talker(template=TRIMS)
    one.say("yes")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory for memories")

    monkeypatch.setattr("zllm_jax.dialect.Replay.remember", fail)
    with caplog.at_level(logging.ERROR, "zllm_jax"):
        assert ask(one, USER).text == "yes"
    assert "no memory for memories" in caplog.text
