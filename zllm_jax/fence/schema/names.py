"""The spellings of listed names, as a trie over bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(eq=False)
class NameNode:
    """After some bytes of a name. `name` is the one that is complete here; `below`: all that can still be reached."""

    children: dict[int, NameNode] = field(default_factory=dict)
    name: str | None = None

    @cached_property
    def below(self) -> frozenset[str]:
        own = frozenset() if self.name is None else frozenset([self.name])
        return own.union(*(child.below for child in self.children.values()))


def name_trie(names: Iterable[str]) -> NameNode:
    """Each character of a name has the spellings of `json.dumps`, with and without `ensure_ascii`.

    Both lead to the same node.
    """
    root = NameNode()
    by_prefix: dict[str, NameNode] = {"": root}
    for name in names:
        for end in range(1, len(name) + 1):
            if name[:end] not in by_prefix:
                by_prefix[name[:end]] = node = NameNode()
                for spelling in spellings(name[end - 1]):
                    _attach(by_prefix[name[: end - 1]], spelling, node)
        by_prefix[name].name = name
    return root


def spellings(character: str) -> set[bytes]:
    r"""The ways to write one character of a listed name.

    >>> sorted(spellings("é")), spellings("a")
    ([b'\\u00e9', b'\xc3\xa9'], {b'a'})
    """
    forms = {json.dumps(character)[1:-1].encode()}
    if not 0xD800 <= ord(character) < 0xE000:
        forms.add(json.dumps(character, ensure_ascii=False)[1:-1].encode())
    return forms


def _attach(node: NameNode, spelling: bytes, target: NameNode) -> None:
    for byte in spelling[:-1]:
        node = node.children.setdefault(byte, NameNode())
    node.children[spelling[-1]] = target
