"""A tokenizer's tokens as a fence sees them."""

from __future__ import annotations

from zllm_jax.dialect.tokenizer import Tokenizer
from zllm_jax.fence import Vocabulary


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """The tokens that text is made of; control tokens and ids beyond the tokenizer's match none."""
    silent = tokenizer.special_ids | set(tokenizer.eos_ids)
    tokens = [b"" if token in silent else tokenizer.token_bytes(token) for token in range(vocab_size)]
    return Vocabulary(tokens, tokenizer.eos_ids)
