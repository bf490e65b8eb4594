"""Text out: whole characters, nothing of a stop sequence, and the same in a stream as at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.talker import Talker
from zllm_jax.values import Delta, Envelope, Request, Sampling, Status

Make = Callable[..., Talker]
GREEDY = Sampling(temperature=0.0)


def ask(one: Talker, **options: object) -> tuple[list[Delta], Envelope]:
    """The stream of an answer, which must agree with its envelope at every step and with `generate`."""
    request = Request("a question\n", **{"max_tokens": 60, "sampling": GREEDY, "cache": False, **options})  # type: ignore[arg-type]
    deltas = list(one.engine.submit(request))
    envelope = deltas[-1].envelope
    assert envelope is not None
    assert all(delta.envelope is None for delta in deltas[:-1])
    assert "".join(delta.text for delta in deltas) == envelope.text
    assert tuple(token for delta in deltas for token in delta.tokens) == envelope.tokens
    assert tuple(entry for delta in deltas for entry in delta.logprobs) == envelope.logprobs
    again = one.engine.generate(request)
    assert (again.status, again.text, again.tokens) == (envelope.status, envelope.text, envelope.tokens)
    assert asyncio.run(streamed(one, request)) == [envelope.text, envelope.tokens, envelope.status]
    return deltas, envelope


async def streamed(one: Talker, request: Request) -> list[object]:
    text, tokens = "", ()
    async for delta in one.engine.stream(request):
        text, tokens = text + delta.text, tokens + delta.tokens
    assert delta.envelope is not None
    return [text, tokens, delta.envelope.status]


@pytest.mark.parametrize("decode_steps", [1, 2, 3, 4, 7])
def test_stops_over_token_borders_whatever_the_steps(talker: Make, decode_steps: int) -> None:
    one = talker(decode_steps=decode_steps)
    one.say("Hel", "lo <", "st", "o", "p>", " more", " and more")
    deltas, envelope = ask(one, stop=("<stop>",))
    assert (envelope.text, envelope.status) == ("Hello ", Status.COMPLETED)
    assert (envelope.telemetry.finish, envelope.telemetry.stop_text) == ("stop", "<stop>")
    assert len(envelope.tokens) == envelope.usage.generated_tokens == 5
    assert not any("<" in delta.text for delta in deltas)


def test_what_only_looked_like_a_stop_comes_out(talker: Make) -> None:
    one = talker()
    one.say("a<", "st", "ay>", "<sto")
    deltas, envelope = ask(one, stop=("<stop>",))
    assert (envelope.text, envelope.status, envelope.telemetry.finish) == ("a<stay><sto", Status.COMPLETED, "eos")
    assert deltas[-2].text == "<sto"  # held back until nothing more could come


def test_the_first_of_several_stops_wins(talker: Make) -> None:
    one = talker()
    one.say("one two three")
    _, envelope = ask(one, stop=("three", "two"))
    assert (envelope.text, envelope.telemetry.stop_text) == ("one ", "two")


def test_a_stop_in_the_very_last_token_completes(talker: Make) -> None:
    """The limit is reached in the same step: the text says that it is complete."""
    one = talker()
    one.say("a", "b", "END")
    _, envelope = ask(one, stop=("END",), max_tokens=3)
    assert (envelope.text, envelope.status, envelope.telemetry.finish) == ("ab", Status.COMPLETED, "stop")


def test_a_character_over_several_tokens(talker: Make) -> None:
    one = talker(decode_steps=1)
    wave = "👋".encode()
    one.say("hi ", wave[:1], wave[1:3], wave[3:], "!")
    deltas, envelope = ask(one, sampling=Sampling(temperature=0.0, logprobs=1))
    assert envelope.text == "hi 👋!"
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert len(envelope.logprobs) == len(envelope.tokens) == 6  # one entry a token, EOS included
    _, cut = ask(one, max_tokens=3)
    assert (cut.text, cut.status) == ("hi \ufffd", Status.TRUNCATED)


pieces = st.lists(st.text("ab<é👋", min_size=1, max_size=3), min_size=1, max_size=8)


@pytest.fixture(scope="module", params=[1, 4])
def one_talker(request: pytest.FixtureRequest) -> Iterator[Talker]:
    one = Talker(decode_steps=request.param)
    yield one
    one.engine.close()


@settings(max_examples=60, deadline=None)
@given(pieces, st.lists(st.text("ab<é", min_size=1, max_size=3), max_size=2), st.lists(st.integers(1, 4), min_size=30))
def test_any_text_any_stops_any_tokens(one_talker: Talker, said: list[str], stops: list[str], cuts: list[int]) -> None:
    data, tokens = "".join(said).encode(), []
    for size in cuts:
        if data:
            tokens.append(data[:size])
            data = data[size:]
    tokens += [data] if data else []
    one_talker.say(*tokens)
    _, envelope = ask(one_talker, stop=tuple(stops))
    text = ""
    for number in range(len(tokens)):
        text = b"".join(tokens[: number + 1]).decode(errors="ignore")
        ends = [text.find(stop) for stop in stops if stop in text]
        if ends:
            text = text[: min(ends)]
            break
    assert envelope.text == text
    assert envelope.status is Status.COMPLETED
