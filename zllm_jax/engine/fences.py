"""Fences of requests -> tables for the device, each compiled once."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass

from zllm_jax.dialect import Tokenizer
from zllm_jax.errors import InvalidRequest
from zllm_jax.fence import TokenTables, Vocabulary, compile_fence, compile_tokens
from zllm_jax.values import Fence

_KEPT = 64  # grammars


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """The tokens that text is made of; control tokens and ids beyond the tokenizer's match none."""
    silent = tokenizer.special_ids | set(tokenizer.eos_ids)
    tokens = [b"" if token in silent else tokenizer.token_bytes(token) for token in range(vocab_size)]
    return Vocabulary(tokens, tokenizer.eos_ids)


@dataclass(frozen=True, eq=False)
class Ready:
    """A fence that the device can follow. relaxed: what it leaves out."""

    tables: TokenTables
    relaxed: tuple[str, ...]


class FenceCompiler:
    """Compiles fences over one vocabulary, in the caller's thread; the last few are kept."""

    def __init__(self, vocabulary: Vocabulary, max_states: int) -> None:
        self._vocabulary, self._max_states = vocabulary, max_states
        self._kept: OrderedDict[str, Ready] = OrderedDict()
        self._lock = threading.Lock()

    def ready(self, fence: Fence) -> Ready:
        """Raises `UnsupportedGrammar` where the fence cannot be enforced, `InvalidRequest` where it is too large."""
        try:
            key = json.dumps(asdict(fence))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the schema is no JSON: {error}", param="fence") from None
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        compiled = compile_fence(fence)
        if compiled.machine.num_states > self._max_states - 2:
            raise InvalidRequest(
                f"the fence has {compiled.machine.num_states} states, but there is room for {self._max_states - 2}: "
                "raise EngineConfig.fence_states, or simplify the grammar",
                param="fence",
            )
        made = Ready(compile_tokens(compiled.machine, self._vocabulary), compiled.relaxed)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made
