"""Near misses in words: the token, the texts on both sides, the field of the request that differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zllm_jax.dialect import explain
from zllm_jax.testing import ByteTokenizer
from zllm_jax.values import NearMiss

SYSTEM = "version=2.1; nonce={};\nYou are terse."


def rendered(messages: list[dict[str, Any]], tools: str = "") -> str:
    parts = [f"[{one['role']}]{one['content']}" for one in messages]
    return "".join([parts[0], tools, *parts[1:]]) + "[assistant]"


def miss_of(prompt: str, stored: str, reused: int = 0) -> tuple[NearMiss, np.ndarray]:
    here, there = prompt.encode(), stored.encode()
    common = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    cut = slice(common, common + 8)
    miss = NearMiss(
        common=common,
        stored_tokens=len(there),
        reused_tokens=reused,
        before=tuple(here[max(0, common - 8) : common]),
        here=tuple(here[cut]),
        there=tuple(there[cut]),
    )
    return miss, np.frombuffer(here, np.uint8).astype(np.int32)


def said(
    messages: list[dict[str, Any]], stored: list[dict[str, Any]], tools: Any = (), texts: tuple[str, str] = ("", "")
) -> str:
    miss, prompt = miss_of(rendered(messages, texts[0]), rendered(stored, texts[1]))
    return explain(miss, prompt, ByteTokenizer(), messages, tools)  # type: ignore[arg-type]


def chat(system: str, user: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def test_fault_1_a_nonce_in_the_first_system_block() -> None:
    text = said(chat(SYSTEM.format("f3a9"), "hello"), chat(SYSTEM.format("07bc"), "hello"))
    assert text == (
        'token 27 of 69 differs, 0 were reused: after "; nonce=" it is "f3a9;\\nYo" here and "07bc;\\nYo" '
        "in the stored state of 69 tokens; messages[0].content, character 19"
    )


def test_fault_3_a_result_that_came_back_otherwise() -> None:
    history = [*chat("Be brief.", "list"), {"role": "assistant", "content": "ok"}]
    one, other = ([*history, {"role": "tool", "content": result}] for result in ("a.txt\nb.txt", "a.txt b.txt"))
    assert said(one, other).endswith("; messages[3].content, character 5")


@pytest.mark.parametrize(
    ("messages", "stored", "place"),
    [
        (chat("same", "one"), chat("same", "two"), "messages[1].content, character 0"),
        (chat("same", "same"), [chat("same", "")[0], {"role": "tool", "content": "same"}],
         "between messages[0].content and messages[1].content"),
        (chat("same", "same"), [{"role": "tool", "content": "same"}], "before messages[0].content"),
        (chat("same", "same"), [*chat("same", "same"), {"role": "user", "content": "."}], "after messages[1].content"),
        (chat("x", "aaxaa"), chat("x", "aayaa"), "messages[1].content, character 2"),
        (chat("  trimmed\n", "one"), chat("  trimmed\n", "two"), "messages[1].content, character 0"),
        (chat("Grüße 👋", "é1"), chat("Grüße 👋", "é2"), "messages[1].content, character 1"),
    ],
)  # fmt: skip
def test_places(messages: Any, stored: Any, place: str) -> None:
    assert said(messages, stored).endswith(f"; {place}")


def test_parts_and_calls_have_places_of_their_own() -> None:
    function = {"name": "read", "arguments": {"path": "a.txt"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]},
    ]
    text = '[user]firstsecond[assistant]{"name": "read", "arguments": {"path": "a.txt"}}'
    for at, place in (
        (text.index("second") + 2, "messages[0].content[1].text, character 2"),
        (text.index("read") + 1, "messages[1].tool_calls[0].function.name, character 1"),
        (text.index("a.txt"), "messages[1].tool_calls[0].function.arguments, character 10"),
    ):
        miss, prompt = miss_of(text, text[:at] + "\0")
        assert explain(miss, prompt, ByteTokenizer(), messages).endswith(f"; {place}")  # type: ignore[arg-type]


def test_a_tool_whose_description_changed() -> None:
    tools = [{"type": "function", "function": {"name": "now", "description": "It is 12:01.", "parameters": {"a": {}}}}]
    texts = ("(now: It is 12:01.)", "(now: It is 12:00.)")
    assert said(chat("same", "one"), chat("same", "one"), tools, texts).endswith("; tools[0].description, character 10")


def test_one_of_the_two_ends() -> None:
    miss, prompt = miss_of("abc", "abcdef")
    text = explain(miss, prompt, ByteTokenizer())  # type: ignore[arg-type]
    assert 'it is the end here and "def" in the stored state of 6 tokens; character 3 of the prompt' in text
