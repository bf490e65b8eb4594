"""The harness itself: equal masks give nothing, a mask that is wrong in one token is named with its place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.fence.differential import differences, schema_grammar
from zllm_jax.fence.host import HostVocabulary

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
SHARED = HostVocabulary([b"", *(bytes([byte]) for byte in range(32, 127)), b'{"a', b'":', b"1}"], (0,))


def theirs(tokens: list[int]) -> npt.NDArray[np.uint32]:
    return SHARED.matcher(schema_grammar(SCHEMA)).advance_all(tokens).mask()


def test_equal_masks_have_no_difference() -> None:
    for seed in range(5):
        assert not list(differences(SCHEMA, theirs, SHARED, np.random.default_rng(seed)))


def test_a_wrong_mask_is_named() -> None:
    x = SHARED.vocabulary.index(b"x")

    def wrong(tokens: list[int]) -> npt.NDArray[np.uint32]:
        mask = theirs(tokens)
        if not tokens:
            mask[x // 32] |= np.uint32(1 << x % 32)
        return mask

    (found,) = differences(SCHEMA, wrong, SHARED, np.random.default_rng(0))
    assert (found.prefix, found.ours, found.theirs) == (b"", (b"x",), ())


def test_what_llguidance_does_not_support_is_refused() -> None:
    with pytest.raises(ValueError, match="not"):
        schema_grammar({"not": {"type": "string"}, "uniqueItems": True})
