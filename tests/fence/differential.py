"""Our masks against llguidance's for the same schema, along random legal texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from zllm_jax.fence.host import HostVocabulary
from zllm_jax.fence.vocabulary import unpack_bits

COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}

# The mask, u32[W], after a sequence of token ids.
MaskOf = Callable[[list[int]], npt.NDArray[np.uint32]]


@dataclass(frozen=True)
class Difference:
    """prefix: the text so far. ours, theirs: the tokens that only one side allows, as bytes; b"" for EOS."""

    prefix: bytes
    ours: tuple[bytes, ...]
    theirs: tuple[bytes, ...]


def schema_grammar(schema: dict[str, Any]) -> str:
    """llguidance's grammar of `schema`, without white space. Raises `ValueError` for what it does not support."""
    grammar: str = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=COMPACT)
    if error := llguidance.LLMatcher.validate_grammar(grammar):
        raise ValueError(error)
    return grammar


def differences(
    schema: dict[str, Any], mask_of: MaskOf, shared: HostVocabulary, rng: np.random.Generator, *, max_tokens: int = 60
) -> Iterator[Difference]:
    """One random text that both sides allow, and where the masks differ on its way.

    Long texts end sooner: every other token is drawn from the shorter half of what is legal.
    """
    at, tokens, text = shared.matcher(schema_grammar(schema)), list[int](), b""
    vocabulary = shared.vocabulary
    for i in range(max_tokens):
        theirs = unpack_bits(at.mask(), len(vocabulary))
        ours = unpack_bits(mask_of(tokens), len(vocabulary))
        if (ours != theirs).any():
            yield Difference(
                text,
                tuple(vocabulary[token] for token in np.flatnonzero(ours & ~theirs)),
                tuple(vocabulary[token] for token in np.flatnonzero(theirs & ~ours)),
            )
        legal = sorted(np.flatnonzero(ours & theirs).tolist(), key=lambda token: len(vocabulary[token]))
        if not legal:
            return
        token = int(rng.choice(legal[: max(1, len(legal) // 2)] if i % 2 else legal))
        if token in shared.eos_ids:
            return
        at, tokens, text = at.advance(token), [*tokens, token], text + vocabulary[token]
