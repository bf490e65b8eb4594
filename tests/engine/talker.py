"""An engine whose model says, after a newline, what it was told to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zllm_jax.cache import PrefixCache, SnapshotStore
from zllm_jax.cache.rates import Prediction
from zllm_jax.config import EngineConfig
from zllm_jax.engine import Engine
from zllm_jax.engine.fences import FenceCompiler
from zllm_jax.scheduler import Scheduler
from zllm_jax.testing import ByteTokenizer, ScriptedBackend, tiny_config
from zllm_jax.values import Sampling


class PieceTokenizer(ByteTokenizer):
    """Bytes, and longer tokens as a test needs them: their ids follow the bytes and specials."""

    vocab_size = 400

    def __init__(self, pieces: Sequence[bytes] = ()) -> None:
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        first = ByteTokenizer.vocab_size
        return self.pieces[token - first] if token >= first else super().token_bytes(token)


class Talker:
    """`engine` answers the prompt "...\\n" with the tokens of `say`, then EOS."""

    def __init__(
        self,
        *,
        store: SnapshotStore | None = None,
        tokenizer: bool = True,
        template: Any = None,
        fences: FenceCompiler | None = None,
        max_seq_tokens: int = 400,
        **options: Any,
    ) -> None:
        self.tokenizer = PieceTokenizer()
        self.reply: list[int] = []
        shape = {"num_pages": 256, "page_tokens": 8, "max_pages": 64, **options}
        self.device = ScriptedBackend(next_token=self._next, **shape)
        self.cache = PrefixCache(self.device, store)
        self.engine = Engine(
            model_name="talker",
            model_config=replace(tiny_config("llama"), vocab_size=PieceTokenizer.vocab_size),
            config=EngineConfig(),
            scheduler=Scheduler(self.device, self.cache, max_seq_tokens=max_seq_tokens, max_queue=8),
            cache=self.cache,
            tokenizer=self.tokenizer if tokenizer else None,  # type: ignore[arg-type]  # as much of one as is used
            template=template,
            warm=lambda progress: None,
            fences=fences,
        )

    def say(self, *pieces: str | bytes) -> None:
        """One token a piece."""
        self.tokenizer.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.reply = [ByteTokenizer.vocab_size + i for i in range(len(pieces))]

    def _next(self, history: Sequence[int], sampling: Sampling, seed: int) -> int:
        said = len(history) - 1 - max(i for i, token in enumerate(history) if token == ord("\n"))
        return self.reply[said] if said < len(self.reply) else ByteTokenizer.eos_id


def always_restore(cache: PrefixCache) -> None:
    """As if nothing had been measured: what is on disk is read rather than computed."""
    cache.rates.predict = lambda *_: Prediction(None, None)  # type: ignore[method-assign]
