"""A vocabulary as bytes, and the trie of its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Level:
    """The trie's nodes at one depth, in the order of the sorted tokens.

    Of each node: its last byte; the rows of the sorted tokens that begin with it, start .. stop, of which start .. own
    end here; its children, first .. first + count of the next level; height: bytes to the end of the longest of them.
    """

    byte: Ints
    start: Ints
    own: Ints
    stop: Ints
    first: Ints
    count: Ints
    height: Ints


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """tokens: the bytes of every id, b"" for control tokens and for ids without text, which no text ever matches."""

    tokens: tuple[bytes, ...]
    eos_ids: tuple[int, ...]

    def __init__(self, tokens: Sequence[bytes], eos_ids: Iterable[int]) -> None:
        object.__setattr__(self, "tokens", tuple(tokens))
        object.__setattr__(self, "eos_ids", tuple(sorted(set(eos_ids))))
        if any(self.tokens[token] for token in self.eos_ids):
            raise ValueError("an EOS token has bytes: give it as b'', it stands for no text")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of all that masks depend on."""
        state = hashlib.sha256(repr(self.eos_ids).encode())
        state.update(np.array([len(one) for one in self.tokens], np.int64).tobytes())
        state.update(b"".join(self.tokens))
        return state.hexdigest()

    @cached_property
    def flat(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """All tokens' bytes one after the other and one more, u8, and where each token's begin, i32[V + 1]."""
        starts = np.zeros(len(self.tokens) + 1, np.int32)
        np.cumsum([len(one) for one in self.tokens], out=starts[1:])
        return np.frombuffer(b"".join(self.tokens) + b"\0", np.uint8), starts

    @cached_property
    def order(self) -> Ints:
        """The ids that have bytes, sorted by them."""
        return np.array(sorted((i for i, one in enumerate(self.tokens) if one), key=self.tokens.__getitem__), np.int64)

    @cached_property
    def single_bytes(self) -> frozenset[int]:
        """The bytes that are tokens of their own."""
        return frozenset(one[0] for one in self.tokens if len(one) == 1)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The trie, the root alone at depth 0."""
        data, starts = self.flat
        begin, length = starts[self.order].astype(np.int64), np.diff(starts)[self.order].astype(np.int64)
        node = np.zeros(len(self.order), np.int64)  # of each sorted token, its node of the depth before; -1 once ended
        edges: list[tuple[Ints, Ints, Ints]] = [(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([len(node)]))]
        parents: list[Ints] = []
        for depth in range(int(length.max(initial=0))):
            rows = np.flatnonzero(length > depth)
            byte = data[begin[rows] + depth].astype(np.int64)
            new = np.ones(len(rows), np.bool_)
            new[1:] = (node[rows][1:] != node[rows][:-1]) | (byte[1:] != byte[:-1])
            index = np.cumsum(new) - 1
            parents.append(node[rows[new]])
            last = np.append(np.flatnonzero(new)[1:] - 1, len(rows) - 1)
            edges.append((byte[new], rows[new], rows[last] + 1))
            node = np.full(len(length), -1, np.int64)
            node[rows] = index
        return tuple(_linked(edges, parents, length))


def _linked(edges: list[tuple[Ints, Ints, Ints]], parents: list[Ints], length: Ints) -> list[Level]:
    levels: list[Level] = []
    for depth in reversed(range(len(edges))):
        byte, start, stop = edges[depth]
        count, height = np.zeros(len(byte), np.int64), np.zeros(len(byte), np.int64)
        if levels:
            np.add.at(count, parents[depth], 1)
            np.maximum.at(height, parents[depth], levels[-1].height + 1)
        first = np.cumsum(count) - count
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(length == depth)])
        levels.append(Level(byte, start, start + ends[stop] - ends[start], stop, first, count, height))
    return levels[::-1]


def pack_bits(bits: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """bool[..., V] -> u32[..., W], W = ceil(V/32): bit i of word w is token 32w + i, bits beyond V are 0.

    >>> pack_bits(np.array([True, False, True])).tolist()
    [5]
    """
    *rows, num_tokens = bits.shape
    num_words = -(-num_tokens // 32)
    packed = np.packbits(bits, axis=-1, bitorder="little")
    padded = np.zeros((*rows, num_words * 4), np.uint8)
    padded[..., : packed.shape[-1]] = packed
    return padded.view("<u4").astype(np.uint32, copy=False)


def unpack_bits(words: npt.NDArray[np.uint32], num_tokens: int) -> npt.NDArray[np.bool_]:
    """u32[..., W] -> bool[..., V]: the inverse of `pack_bits`."""
    octets = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=num_tokens, bitorder="little").astype(np.bool_)
