"""`GET /metrics`: what a Prometheus server scrapes."""

from __future__ import annotations

import asyncio

import httpx
from prometheus_client.parser import text_string_to_metric_families

from zllm_jax.server import create_app
from zllm_jax.testing import ScriptedEngine


def test_a_scrape_shows_what_was_served() -> None:
    engine = ScriptedEngine()
    engine.say("yes")

    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"model": "scripted", "messages": [{"role": "user", "content": "?"}]}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            return await client.get("/metrics")

    response = asyncio.run(scenario())
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = [one for family in text_string_to_metric_families(response.text) for one in family.samples]
    ended = {one.labels["status"]: one.value for one in samples if one.name == "zllm_requests_total"}
    assert ended["COMPLETED"] == 1
    assert sum(ended.values()) == 1
