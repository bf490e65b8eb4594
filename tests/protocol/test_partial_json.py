"""A cut JSON object is read as the `anthropic` library reads streamed input."""

from __future__ import annotations

import json
from typing import Any

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zllm_jax.protocol.partial_json import certain_part

_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.floats(-1e9, 1e9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=4), _VALUE, max_size=3), st.booleans())
def test_every_cut(value: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert certain_part(text) == value
    for size in range(1, len(text)):
        assert certain_part(text[:size]) == jiter.from_json(text[:size].encode(), partial_mode=True)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", {}),
        ('{"a": [1, "x', {"a": [1]}),
        ('{"a": {"b": true, "c": "}', {"a": {"b": True}}),
        ('{"a": "x", "b', {"a": "x"}),
        ('{"a": 1.', {}),
    ],
)
def test_what_is_certain(text: str, part: dict[str, Any]) -> None:
    assert certain_part(text) == part
