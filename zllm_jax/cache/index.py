"""Which stored token sequences share a prefix with a prompt: chained block hashes to find, tokens to decide.

A hash only says where to look; every answer has been compared token by token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

BLOCK_TOKENS = 32
_MAX_CANDIDATES = 64
_ROOT = b""


@dataclass
class _Node:
    """Sequences that run through this block, and those whose last whole block it is (insertion order = age)."""

    through: dict[Hashable, None] = field(default_factory=dict)
    ending: dict[Hashable, None] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """`common` tokens of the prompt equal the first `common` tokens of sequence `key`."""

    key: Hashable
    common: int


class PrefixIndex:
    """Token sequences i32[S] by key, found by their prefixes."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {_ROOT: _Node()}
        self._tokens: dict[Hashable, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._tokens

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._tokens))

    def tokens(self, key: Hashable) -> np.ndarray:
        return self._tokens[key]

    def add(self, key: Hashable, tokens: np.ndarray) -> None:
        if key in self._tokens:
            raise ValueError(f"{key!r} is indexed already")
        self._tokens[key] = tokens
        node = self._nodes[_ROOT]
        node.through[key] = None
        for chain in _chains(tokens):
            node = self._nodes.setdefault(chain, _Node())
            node.through[key] = None
        node.ending[key] = None

    def remove(self, key: Hashable) -> None:
        chains = [_ROOT, *_chains(self._tokens.pop(key))]
        for chain in chains:
            node = self._nodes[chain]
            node.through.pop(key)
            node.ending.pop(key, None)
            if chain != _ROOT and not node.through:
                del self._nodes[chain]

    def longest(self, prompt: np.ndarray) -> Match | None:
        """The sequence with the longest common prefix, the newest of equals; None without a common token."""
        node = self._deepest(prompt)[-1]
        newest = list(node.through)[: -_MAX_CANDIDATES - 1 : -1]
        best = max((Match(key, common_prefix(self._tokens[key], prompt)) for key in newest), key=_common, default=None)
        return best if best is not None and best.common > 0 else None

    def longest_whole(self, prompt: np.ndarray) -> Match | None:
        """The longest sequence that is, whole, a prefix of the prompt."""
        for node in reversed(self._deepest(prompt)):
            found = [key for key in node.ending if self._is_prefix(key, prompt)]
            if found:
                key = max(found, key=lambda one: len(self._tokens[one]))
                return Match(key, len(self._tokens[key]))
        return None

    def prefixes_of(self, tokens: np.ndarray) -> list[Hashable]:
        """All sequences that are, whole, prefixes of `tokens` (equal ones included)."""
        return [key for node in self._deepest(tokens) for key in node.ending if self._is_prefix(key, tokens)]

    def _is_prefix(self, key: Hashable, prompt: np.ndarray) -> bool:
        stored = self._tokens[key]
        return len(stored) <= len(prompt) and common_prefix(stored, prompt) == len(stored)

    def _deepest(self, prompt: np.ndarray) -> list[_Node]:
        path = [self._nodes[_ROOT]]
        for chain in _chains(prompt):
            node = self._nodes.get(chain)
            if node is None:
                break
            path.append(node)
        return path


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are equal."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def _common(match: Match) -> int:
    return match.common


def _chains(tokens: np.ndarray) -> Iterator[bytes]:
    chain = _ROOT
    data = np.ascontiguousarray(tokens, np.int32).tobytes()
    step = 4 * BLOCK_TOKENS
    for start in range(0, len(data) - step + 1, step):
        chain = hashlib.blake2b(chain + data[start : start + step], digest_size=8).digest()
        yield chain
