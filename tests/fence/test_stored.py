"""Tables that come back from bytes are the same, and damaged ones are refused."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from zllm_jax.errors import CacheError
from zllm_jax.fence import Vocabulary, compile_tokens
from zllm_jax.fence.schema import json_schema
from zllm_jax.fence.stored import tables_from_bytes, tables_to_bytes

VOCABULARY = Vocabulary([b"", *(bytes([byte]) for byte in range(256)), b'{"', b'": ', b'"}', b"ab"], [0])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"items": {"$ref": "#"}}},
    "required": ["a"],
}


def test_tables_come_back_as_they_were() -> None:
    made = compile_tokens(json_schema(SCHEMA).machine, VOCABULARY)
    back, note = tables_from_bytes(tables_to_bytes(made, {"relaxed": ["x"]}), VOCABULARY)
    assert note == {"relaxed": ["x"]}
    assert back.digest == made.digest
    assert back.machine.special == made.machine.special
    assert back.machine.returns == made.machine.returns
    for name in (one.name for one in fields(made) if one.name not in ("machine", "vocabulary")):
        ours, theirs = getattr(made, name), getattr(back, name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("at", [0, 40, -1])
def test_damaged_tables_are_refused(at: int) -> None:
    data = bytearray(tables_to_bytes(compile_tokens(json_schema({"const": 1}).machine, VOCABULARY), {}))
    data[at] ^= 1
    with pytest.raises(CacheError, match="damaged"):
        tables_from_bytes(bytes(data), VOCABULARY)
    with pytest.raises(CacheError, match="damaged"):
        tables_from_bytes(bytes(data[: len(data) // 2]), VOCABULARY)


def test_tables_of_another_vocabulary_are_refused() -> None:
    data = tables_to_bytes(compile_tokens(json_schema({"const": 1}).machine, VOCABULARY), {})
    with pytest.raises(CacheError, match="another vocabulary"):
        tables_from_bytes(data, Vocabulary([*VOCABULARY.tokens, b"new"], [0]))
