"""Conversations with tools, byte for byte as the models' own templates and encoder render them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zllm_jax.dialect.chatml_json import ChatmlJson
from zllm_jax.dialect.dsml import Dsml
from zllm_jax.dialect.glm_xml import Glm
from zllm_jax.dialect.hermes import Hermes
from zllm_jax.dialect.tools import tools_of

DATA = Path(__file__).parent.parent / "data" / "dialects"
CASES = [
    pytest.param(name, case, id=f"{name}-{number}")
    for name in ("deepseek-v4", "glm-4.6", "glm-4.7", "qwen3", "hermes-2-pro")
    for number, case in enumerate(json.loads((DATA / f"{name}.json").read_text())["cases"])
]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_golden(name: str, case: dict[str, Any]) -> None:
    dialects = {
        "deepseek-v4": Dsml(thinking=case.get("mode") == "thinking"),
        "glm-4.6": Glm(lines=True),
        "glm-4.7": Glm(lines=False),
        "qwen3": ChatmlJson(),
        "hermes-2-pro": Hermes(bos="<BOS>"),
    }
    assert dialects[name].render(case["messages"], tools_of(case["tools"])) == case["rendered"]


def test_without_tools_dsml_drops_the_reasoning_of_earlier_turns() -> None:
    case = json.loads((DATA / "deepseek-v4.json").read_text())["cases"][4]
    text = Dsml().render([m for m in case["messages"] if m["role"] != "tool"])
    assert "Done." not in text
    assert text.count("<think>") == 1
    assert "<think>Done.</think>" in Dsml(keep_reasoning=True).render(case["messages"])
