"""Who is watched for loops: as the request says, else as the engine's configuration does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.engine.talker import Talker
from zllm_jax.engine.fences import thinking_of
from zllm_jax.errors import InvalidRequest
from zllm_jax.runtime import Chunk, Drawn, Watched
from zllm_jax.values import Request

Make = Callable[..., Talker]
QUESTION = "what?\n"


@pytest.mark.parametrize(
    "asked, configured, on", [(None, False, False), (None, True, True), (True, False, True), (False, True, False)]
)
def test_the_request_decides_and_else_the_engine(
    talker: Make, monkeypatch: pytest.MonkeyPatch, asked: bool | None, configured: bool, on: bool
) -> None:
    one, told = talker(), list[Watched | None]()
    one.engine.config = replace(one.engine.config, loop_guard=configured)
    prefill = one.device.prefill

    def watching(chunk: Chunk) -> Drawn | None:
        told.append(chunk.watch)
        return prefill(chunk)

    monkeypatch.setattr(one.device, "prefill", watching)
    one.say("yes")
    one.engine.generate(Request(QUESTION, loop_guard=asked))
    assert {watch is not None for watch in told} == {on}


def test_without_a_tokenizer_there_are_no_words_to_look_at(talker: Make) -> None:
    one = talker(tokenizer=False)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        one.engine.submit(Request(tokens=(1, 2), loop_guard=True))


class Tags:
    """A tokenizer as far as it is asked: `whole` are one token each, other texts one a character."""

    def __init__(self, *whole: str) -> None:
        self.whole = whole

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return [1000 + self.whole.index(text)] if text in self.whole else list(map(ord, text))


def test_the_tags_of_thinking_are_known_where_they_are_tokens() -> None:
    assert thinking_of(Tags("<think>", "</think>")) == Watched(1000, 1001)  # type: ignore[arg-type]
    assert thinking_of(Tags("<think>")) == thinking_of(None) == Watched()  # type: ignore[arg-type]
