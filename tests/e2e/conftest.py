from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from zllm_jax import Engine


@pytest.fixture(scope="session")
def fenced(smollm2: Path) -> Iterator[Engine]:
    """SmolLM2 with room for eight grammars at a time, shared by all tests of fences."""
    from tests.e2e.generations import CONFIG

    with Engine.from_pretrained(smollm2, CONFIG) as made:
        yield made
