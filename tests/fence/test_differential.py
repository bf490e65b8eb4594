"""The harness itself: equal masks give nothing, a mask that is wrong in one token is named with its place."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.fence import corpus
from tests.fence.differential import differences, schema_grammar
from tests.fence.explained import REASONS, Place, Sides, UnexplainedError
from tests.fence.schema import randomly
from zllm_jax.checkpoint import open_tokenizer
from zllm_jax.dialect import Tokenizer, load_tokenizer
from zllm_jax.errors import InvalidRequest, UnsupportedGrammar
from zllm_jax.fence import Vocabulary
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
        mask = theirs(tokens).copy()
        if not tokens:
            mask[x // 32] |= np.uint32(1 << x % 32)
        return mask

    (found,) = differences(SCHEMA, wrong, SHARED, np.random.default_rng(0))
    assert (found.prefix, found.ours, found.theirs) == (b"", (b"x",), ())


def test_what_llguidance_does_not_support_is_refused() -> None:
    with pytest.raises(ValueError, match="not"):
        schema_grammar({"not": {"type": "string"}, "uniqueItems": True})


# Ours against theirs, over SmolLM2's vocabulary ----------------------------------------------------------------------

PLACES = 8  # of each schema


class Differential:
    """Random schemas and places in their texts: clients' schemas along their instances, and ones nobody would write."""

    def __init__(self, path: Path) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(open_tokenizer(path))
        tokens, size = self.tokenizer, self.tokenizer.vocab_size
        words = [b"" if i in tokens.special_ids else tokens.token_bytes(i) for i in range(size)]
        self.vocabulary = Vocabulary(words, tokens.eos_ids)
        self.shared = HostVocabulary(words, tokens.eos_ids)
        self.lengths = np.array([len(one) for one in words])
        self.realistic = corpus.schemas()

    def sides(self, seed: int) -> tuple[Sides, list[int], random.Random] | None:
        """A schema, tokens of a valid text where one is known; None where a side refuses the schema."""
        rng = random.Random(seed)
        real = seed % 2 == 0
        schema: Any = rng.choice(self.realistic) if real else randomly.schema(rng)
        try:
            sides = Sides(schema, self.vocabulary, self.shared, formats=real)
        except (UnsupportedGrammar, InvalidRequest, ValueError):
            return None
        guide = list[int]()
        if real:
            value = corpus.instance(schema, rng)
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            guide = self.tokenizer.encode(text, add_bos=False)
        return sides, guide, rng

    def places(self, sides: Sides, guide: list[int], rng: random.Random) -> Iterator[Place]:
        """Some places of a text that both sides allow: along `guide`, and at random once that leads nowhere."""
        length = max(len(guide), 16)
        chosen, place = set(rng.sample(range(length), PLACES)), sides.begin()
        for i in range(length):
            if i in chosen:
                yield place
            after = sides.after(place, guide[i]) if i < len(guide) else None
            if after is None or after.ours.dead or after.theirs.dead:
                ours, theirs = sides.masks(place)
                legal = np.flatnonzero(ours & theirs & (self.lengths > 0))
                if not len(legal):
                    return
                short = legal[self.lengths[legal] <= np.median(self.lengths[legal])]
                after = sides.after(place, rng.choice((short if i % 2 else legal).tolist()))
            place = after

    def compare(self, count: int, first_seed: int) -> Counter[str]:
        """`count` pairs, each difference explained; how often for which reason."""
        found, seed = Counter[str](), first_seed
        while found["pairs"] < count:
            if made := self.sides(seed):
                sides, guide, rng = made
                for place in self.places(sides, guide, rng):
                    try:
                        reasons = sides.reasons(place, rng)
                    except UnexplainedError as error:
                        raise AssertionError(f"seed {seed}, {json.dumps(sides.schema)}: {error}") from error
                    found.update(["pairs", *reasons, *([] if reasons else ["equal"])])
            seed += 1
        return found


@pytest.fixture(scope="module")
def differential(smollm2: Path) -> Differential:
    return Differential(smollm2)


def test_differences_are_explained(differential: Differential) -> None:
    found = differential.compare(50, 0)
    assert found.keys() <= {"pairs", "equal", *REASONS}
    assert found["equal"] >= 15


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_differences_are_explained(differential: Differential) -> None:
    found = differential.compare(2000, 10_000)
    assert found.keys() <= {"pairs", "equal", *REASONS}
    assert found["equal"] >= 600


def test_faults_are_not_explained_away(differential: Differential) -> None:
    """One bit too few, and one too many, in the row of the first state."""
    made = differential.sides(0)
    assert made is not None
    sides, right = made[0], made[0].tables
    start = right.row[right.machine.start]
    for text in (b"{", b"["):
        token, masks = differential.vocabulary.tokens.index(text), right.masks.copy()
        masks[start, token // 32] ^= np.uint32(1) << np.uint32(token % 32)
        sides.tables = replace(right, masks=masks)
        with pytest.raises(UnexplainedError, match=re.escape(text.decode())):
            sides.reasons(sides.begin(), random.Random(0))
