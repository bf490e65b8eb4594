"""A tokenizer without files, tiny model shapes, and log-probabilities of nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from zllm_jax.config import ModelConfig, RopeConfig
from zllm_jax.values import TokenLogprob


class ByteTokenizer:
    """Token ids 0..255 are the bytes; three specials follow, which stand for no text.

    >>> ByteTokenizer().encode("hé")
    [104, 195, 169]
    """

    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocab_size = 259
    eos_ids = (eos_id,)
    special_ids = frozenset({bos_id, eos_id, pad_id})
    strips_space = False

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """The bytes of `text`; BOS only where it is asked for."""
        return [*((self.bos_id,) if add_bos else ()), *text.encode()]

    def decode(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `tokens`; bytes that are no UTF-8 become U+FFFD, specials have none."""
        return b"".join(self.token_bytes(token) for token in tokens).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, b"" for a special. Raises `ValueError` for an id outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token is {token}, must be in [0, {self.vocab_size})")
        return bytes([token]) if token < 256 else b""

    def vocabulary(self) -> list[bytes]:
        """The bytes of every token, in the order of the ids."""
        return [self.token_bytes(token) for token in range(self.vocab_size)]


def tiny_config(arch: Literal["llama", "gemma3"]) -> ModelConfig:
    """The smallest shapes that keep what is particular to an architecture; its vocabulary is `ByteTokenizer`'s.

    "llama": grouped queries. "gemma3": also QK-norm, a window of 16 tokens on two of three layers, two RoPE bases.
    """
    if arch not in ("llama", "gemma3"):
        raise ValueError(f"arch is {arch!r}, must be 'llama' or 'gemma3'")
    shared: dict[str, Any] = {
        "arch": arch,
        "embed_dim": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_dim": 128,
        "vocab_size": ByteTokenizer.vocab_size,
        "max_context_tokens": 512,
        "eos_ids": ByteTokenizer.eos_ids,
        "bos_id": ByteTokenizer.bos_id,
    }
    if arch == "llama":
        return ModelConfig(**shared, num_layers=2)
    return ModelConfig(
        **shared,
        num_layers=3,
        rms_eps=1e-6,
        rope=RopeConfig(theta=1_000_000.0),
        local_rope=RopeConfig(theta=10_000.0),
        qk_norm=True,
        window=16,
        local_layers=(True, True, False),
    )


def made_up_logprob(token: int, count: int) -> TokenLogprob:
    """Made up but reproducible: -0.5 for the chosen token, -1.0, -1.5, ... for the ids after it."""
    top = tuple(((token + i) % 256, -0.5 * (i + 1)) for i in range(count))
    return TokenLogprob(token=token, logprob=-0.5, top=top)
