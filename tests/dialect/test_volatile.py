"""Header lines that change with every request never reach the prompt; nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest

from zllm_jax.dialect import without_volatile

HEADER = "x-anthropic-billing-header: cc_version=2.1.1; cc_entrypoint=cli; cch=0f3a1;"
USER = {"role": "user", "content": "hi"}


def system(content: Any) -> tuple[dict[str, Any], dict[str, str]]:
    return {"role": "system", "content": content}, USER


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("content", "cleaned"),
    [
        (f"{HEADER}\nYou are terse.", "You are terse."),
        (f"{HEADER}\n{HEADER.upper()}\nYou are terse.", "You are terse."),
        (HEADER, ""),
        ([part(HEADER), part("You are terse.")], [part("You are terse.")]),
        ([part(f"{HEADER}\nYou"), part("are")], [part("You"), part("are")]),
    ],
)
def test_volatile_lines_go(content: Any, cleaned: Any) -> None:
    assert without_volatile(system(content)) == system(cleaned)


@pytest.mark.parametrize(
    "content",
    [
        f"You are terse.\n{HEADER}",  # not in front: part of the text
        "x-anthropic-billing-header is a name",
        "",
        None,
        [],
        [part("")],
        [{"type": "image"}],
    ],
)
def test_everything_else_stays(content: Any) -> None:
    assert without_volatile(system(content)) == system(content)


def test_only_an_instruction_that_comes_first_is_looked_at() -> None:
    messages = (USER, {"role": "system", "content": f"{HEADER}\nx"})
    assert without_volatile(messages) == messages
    spoken = ({"role": "user", "content": f"{HEADER}\nwhat is this?"},)
    assert without_volatile(spoken) == spoken
    assert without_volatile(()) == ()


def test_two_requests_with_other_nonces_are_equal() -> None:
    first, second = (system(f"{HEADER[:-4]}{nonce};\nYou are terse.") for nonce in ("aaa", "bbb"))
    assert first != second
    assert without_volatile(first) == without_volatile(second)
