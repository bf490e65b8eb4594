"""Which stored token sequences share a prefix with a prompt: a compressed trie over token ids, one root a tenant.

Every token is stored once a tenant, however many sequences run through it; a sequence is rebuilt from its edges.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

_TOKEN_BYTES = 4


@dataclass(frozen=True)
class Match:
    """`common` tokens of the prompt equal the first `common` tokens of sequence `key`."""

    key: Hashable
    common: int


@dataclass(slots=True, eq=False)
class _Entry:
    """A stored sequence; it ends where `node` ends."""

    key: Hashable
    tenant: str
    stamp: int
    num_tokens: int
    node: _Node


@dataclass(slots=True, eq=False)
class _Node:
    """A run of tokens that all sequences below share. Edges are bytes: comparing them is one memcmp.

    children: by the first token of their edge. ending: the sequences that end here, oldest first. newest: of all that
    end here or below; a root has none, for they share no token.
    """

    edge: bytes
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)
    ending: dict[Hashable, _Entry] = field(default_factory=dict)
    newest: _Entry | None = None


class PrefixIndex:
    """Token sequences i32[S] by key, found by their prefixes. A key is used once, whatever its tenant."""

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._entries: dict[Hashable, _Entry] = {}
        self._stamps = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._entries))

    @property
    def nbytes(self) -> int:
        """Bytes that the index holds, its copy of the tokens included and the keys not. Walks all nodes."""
        total = sys.getsizeof(self._roots) + sys.getsizeof(self._entries)
        total += sum(sys.getsizeof(entry) + sys.getsizeof(entry.stamp) for entry in self._entries.values())
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            parts = (node, node.edge, node.children, node.ending)
            total += sum(map(sys.getsizeof, parts)) + sum(map(sys.getsizeof, node.children))
            waiting += node.children.values()
        return total

    def tokens(self, key: Hashable) -> np.ndarray:
        """i32[S], a read-only copy. Raises KeyError."""
        edges = []
        node: _Node | None = self._entries[key].node
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return np.frombuffer(b"".join(reversed(edges)), np.int32)

    def num_tokens(self, key: Hashable) -> int:
        """The length of `tokens(key)`, without the copy. Raises KeyError."""
        return self._entries[key].num_tokens

    def add(self, key: Hashable, tokens: np.ndarray, tenant: str = "") -> None:
        """Store i32[S] under a new key. Raises ValueError when the key is there already."""
        if key in self._entries:
            raise ValueError(f"{key!r} is indexed already: remove it first, or give another key")
        data = _as_bytes(tokens)
        root = self._roots.setdefault(tenant, _Node(b"", None))
        node, end, child, inside = _descend(root, data)
        if child is not None:
            node = _split(child, inside)
        if end + inside < len(data):
            leaf = _Node(data[end + inside :], node)
            node.children[_first(leaf)] = leaf
            node = leaf
        entry = _Entry(key, tenant, next(self._stamps), len(data) // _TOKEN_BYTES, node)
        node.ending[key] = entry
        self._entries[key] = entry
        _note_newest(node, entry)

    def remove(self, key: Hashable) -> None:
        """Forget a sequence; what only it needed is freed. Raises KeyError."""
        entry = self._entries.pop(key)
        node = entry.node
        del node.ending[key]
        _forget_newest(node, entry)
        if not node.ending and not node.children and node.parent is not None:
            parent = node.parent
            del parent.children[_first(node)]
            node = parent
        if node.parent is not None and not node.ending and len(node.children) == 1:
            _merge(node)
        elif node.parent is None and not node.ending and not node.children:
            del self._roots[entry.tenant]

    def longest(self, prompt: np.ndarray, tenant: str = "") -> Match | None:
        """The sequence with the longest common prefix, the newest of equals; None without a common token."""
        root = self._roots.get(tenant)
        if root is None:
            return None
        node, end, child, inside = _descend(root, _as_bytes(prompt))
        newest = (child or node).newest
        return Match(newest.key, (end + inside) // _TOKEN_BYTES) if newest is not None else None

    def longest_whole(self, prompt: np.ndarray, tenant: str = "") -> Match | None:
        """The longest sequence that is, whole, a prefix of the prompt; the newest of equals."""
        for node in self._passed(prompt, tenant):
            if node.ending:
                entry = next(reversed(node.ending.values()))
                return Match(entry.key, entry.num_tokens)
        return None

    def prefixes_of(self, tokens: np.ndarray, tenant: str = "") -> list[Hashable]:
        """All sequences that are, whole, prefixes of `tokens`, equal ones included; longest first."""
        return [key for node in self._passed(tokens, tenant) for key in node.ending]

    def _passed(self, tokens: np.ndarray, tenant: str) -> Iterator[_Node]:
        """The nodes that end on a prefix of `tokens`, deepest first."""
        node = self._roots.get(tenant)
        if node is not None:
            node = _descend(node, _as_bytes(tokens))[0]
        while node is not None:
            yield node
            node = node.parent


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are equal."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def _as_bytes(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, np.int32).tobytes()


def _first(node: _Node) -> bytes:
    return node.edge[:_TOKEN_BYTES]


def _descend(root: _Node, data: bytes) -> tuple[_Node, int, _Node | None, int]:
    """Follow `data`: the last node passed whole, the bytes up to its end, the child left midway, the bytes into it."""
    node, end = root, 0
    while True:
        child = node.children.get(data[end : end + _TOKEN_BYTES])
        if child is None:
            return node, end, None, 0
        if not data.startswith(child.edge, end):
            rest = np.frombuffer(data, np.int32, offset=end)
            return node, end, child, _TOKEN_BYTES * common_prefix(np.frombuffer(child.edge, np.int32), rest)
        node, end = child, end + len(child.edge)


def _split(lower: _Node, num_bytes: int) -> _Node:
    """Cut the edge of `lower` after `num_bytes`; returns the new node above it, which has no newest yet."""
    parent = lower.parent
    assert parent is not None, "a root has no edge"
    upper = _Node(lower.edge[:num_bytes], parent)
    parent.children[_first(upper)] = upper
    lower.edge, lower.parent = lower.edge[num_bytes:], upper
    upper.children[_first(lower)] = lower
    return upper


def _merge(node: _Node) -> None:
    """Put a node in front of its only child."""
    parent = node.parent
    assert parent is not None, "a root stays"
    (child,) = node.children.values()
    child.edge, child.parent = node.edge + child.edge, parent
    parent.children[_first(child)] = child


def _note_newest(node: _Node, entry: _Entry) -> None:
    while node.parent is not None:
        node.newest = entry
        node = node.parent


def _forget_newest(node: _Node, entry: _Entry) -> None:
    """Find the newest again wherever it was `entry`."""
    while node.parent is not None and node.newest is entry:
        left = [child.newest for child in node.children.values() if child.newest is not None]
        left += list(node.ending.values())[-1:]
        node.newest = max(left, key=_stamp, default=None)
        node = node.parent


def _stamp(entry: _Entry) -> int:
    return entry.stamp
