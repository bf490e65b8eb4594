"""Random schemas against an independent validator, in both directions: values judged alike, texts allowed are valid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from tests.fence.schema import randomly
from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import Machine
from zllm_jax.fence.schema import json_schema

FORMATS = jsonschema.FormatChecker(["date", "ipv4"])


def compiled(schema: Any) -> Machine | None:
    """None where the schema is refused."""
    try:
        return json_schema(schema).machine
    except UnsupportedGrammar:
        return None


def check(seed: int) -> bool:
    """One schema; whether it was compiled."""
    rng = random.Random(seed)
    schema = randomly.schema(rng)
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    machine = compiled(schema)
    if machine is None:
        return False
    for _ in range(40):
        value = randomly.value(rng)
        assert machine.accepts(json.dumps(value).encode()) == validator.is_valid(value), (seed, schema, value)
    for _ in range(3):
        written = randomly.text(machine, rng)
        assert written is None or validator.is_valid(json.loads(written)), (seed, schema, written)
    return True


@pytest.mark.parametrize("block", range(4))
def test_random_schemas_are_judged_as_jsonschema_judges_them(block: int) -> None:
    supported = sum(check(1000 * block + i) for i in range(60))
    assert supported >= 30


@pytest.mark.slow
def test_many_random_schemas() -> None:
    assert sum(check(100_000 + i) for i in range(3000)) >= 1500
