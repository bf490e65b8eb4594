"""What a room may not know, it has no word for: not in a name, not in a text, not in a comment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# The words above the cache, and the words below the scheduler.
WIRE_WORDS = frozenset(["anthropic", "openai", "sse", "starlette", "tool", "tools", "uvicorn", "websocket"])
STATE_WORDS = frozenset(["kv", "page", "pages"])

FORBIDDEN = {
    "pallas_kernels": WIRE_WORDS,
    "zllm_jax/cache": WIRE_WORDS,
    "zllm_jax/runtime": WIRE_WORDS,
    "zllm_jax/protocol": STATE_WORDS,
    "zllm_jax/server": STATE_WORDS,
}

# The pieces of an identifier: `ToolCall`, `tool_call`, `SSEEvent`, `KVPage`.
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words(text: str) -> set[str]:
    return {match.lower() for match in WORD.findall(text)}


def trespasses(text: str, forbidden: frozenset[str]) -> list[str]:
    """The lines of `text` that hold a forbidden word, with their numbers."""
    return [f"{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if words(line) & forbidden]


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_has_no_word_for_what_it_must_not_know(room: str, repo: Path) -> None:
    files = sorted((repo / room).rglob("*.py"))
    assert files, f"{room} holds no Python file"
    found = {
        str(path.relative_to(repo)): lines
        for path in files
        if (lines := trespasses(path.read_text(encoding="utf-8"), FORBIDDEN[room]))
    }
    assert not found


@pytest.mark.parametrize(
    "line, forbidden",
    [
        ("class ToolCall:", WIRE_WORDS),
        ("def parse(tool_name):", WIRE_WORDS),
        ("# as an SSE event", WIRE_WORDS),
        ("class SSEEvent:", WIRE_WORDS),
        ("OpenAI = 1", frozenset({"open"})),
        ("x = 'openai-compatible'", WIRE_WORDS),
        ("KVPage", STATE_WORDS),
        ("kv_len", STATE_WORDS),
        ("num_pages", STATE_WORDS),
    ],
)
def test_a_forbidden_word_is_seen_inside_identifiers(line: str, forbidden: frozenset[str]) -> None:
    assert trespasses(line, forbidden)


@pytest.mark.parametrize("line", ["import functools", "itertools.chain", "homepage", "toolbox", "assess"])
def test_a_longer_word_is_another_word(line: str) -> None:
    assert not trespasses(line, WIRE_WORDS | STATE_WORDS)
