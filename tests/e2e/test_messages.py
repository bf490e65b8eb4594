"""The official `anthropic` library against a real model: forced calls, and a conversation that goes on behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server.conftest import running
from zllm_jax import Engine
from zllm_jax.server import create_app

ASKED: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is 3 + 4?"}]}]
SYSTEM: list[Any] = [
    {"type": "text", "text": "x-anthropic-billing-header: version=1; nonce=f3a9"},
    {"type": "text", "text": "You sum numbers.", "cache_control": {"type": "ephemeral"}},
]
SUM = {"type": "object", "properties": {"of": {"enum": ["3+4", "4+3"]}}, "required": ["of"]}
TOOLS: list[Any] = [{"name": "sum", "description": "A sum.", "input_schema": SUM}]
FORCED: Any = {"type": "tool", "name": "sum", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def client(fenced: Engine) -> Iterator[anthropic.Anthropic]:
    with (
        running(create_app(fenced)) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True) as made,
    ):
        yield made


def prompt_tokens(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)


def test_a_conversation_goes_on_behind_its_forced_call(client: anthropic.Anthropic, fenced: Engine) -> None:
    given: dict[str, Any] = {"model": fenced.model_name, "max_tokens": 120, "tools": TOOLS, "extra_body": {"seed": 3}}
    with client.messages.stream(messages=ASKED, system=SYSTEM, tool_choice=FORCED, **given) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    (call,) = (block for block in first.content if block.type == "tool_use")
    assert call.input["of"] in SUM["properties"]["of"]["enum"]  # type: ignore[index]
    counted = client.messages.count_tokens(model=fenced.model_name, messages=ASKED, system=SYSTEM, tools=TOOLS)
    assert counted.input_tokens == prompt_tokens(first.usage)

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}
    again = [
        {"role": "user", "content": "What is 3 + 4?"},
        first.to_param(),
        {"role": "user", "content": [result]},
    ]
    # A new nonce, and a text where there were blocks: the same prompt all the same.
    system = [{"type": "text", "text": "x-anthropic-billing-header: version=1; nonce=07bc"}, SYSTEM[1]]
    second = client.messages.create(messages=again, system=system, **given | {"max_tokens": 8})
    known = prompt_tokens(first.usage) + first.usage.output_tokens
    cached = second.usage.cache_read_input_tokens or 0
    assert known - 2 <= cached <= known  # not the last token, and not EOS: no state has been computed behind them
