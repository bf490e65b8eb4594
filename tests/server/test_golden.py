"""Answers byte for byte: tests/golden/<protocol>/<case>/{request.json, script.json, response.txt}.

ZLLM_WRITE_GOLDENS=1 rewrites the responses; read the difference before committing it.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import httpx
import pytest

from zllm_jax.server import create_app
from zllm_jax.testing import ScriptedEngine
from zllm_jax.values import Status

PATHS = {
    "anthropic_messages": "/v1/messages",
    "openai_chat": "/v1/chat/completions",
}
CASES = sorted(case for protocol in PATHS for case in (Path(__file__).parents[1] / "golden" / protocol).iterdir())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_golden(case: Path) -> None:
    engine = ScriptedEngine()
    if (script_file := case / "script.json").exists():
        scripts = json.loads(script_file.read_bytes())
        for script in scripts if isinstance(scripts, list) else [scripts]:
            engine.say(**script | {"status": Status(script.get("status", "COMPLETED"))})
    app = create_app(engine, clock=lambda: 1_700_000_000.5, new_id=lambda: "0123")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(PATHS[case.parent.name], content=(case / "request.json").read_bytes())

    response = asyncio.run(ask())
    head = f"{response.status_code} {response.headers['content-type']}\n\n"
    actual = head.encode() + response.content
    golden = case / "response.txt"
    if os.environ.get("ZLLM_WRITE_GOLDENS"):
        golden.write_bytes(actual)
    assert actual == golden.read_bytes()


def test_there_are_goldens() -> None:
    for protocol in PATHS:
        assert sum(case.parent.name == protocol for case in CASES) >= 11
