"""A machine x a vocabulary: which tokens are legal in each state, and which depend on the stack."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.flow import leading_on
from zllm_jax.fence.machine import Machine
from zllm_jax.fence.vocabulary import Vocabulary, pack_bits
from zllm_jax.fence.walk import DEPENDENT, LEGAL, Found, Walk

Ints = npt.NDArray[np.int64]
FEW = 512  # tokens that count are walked one by one


@dataclass(frozen=True, eq=False)
class TokenTables:
    """masks: u32[U, W], the legal tokens of each kind of state; bit i of word w is token 32w + i.

    row: i32[Q], the kind of each state. depends: for each kind, the tokens that only the stack can decide: the ids
    dependent[depends[u]:depends[u + 1]], i32. EOS is in neither: it is legal where a text may end.

    counts: u8[C, V], what tokens add to the frame's count, 0 where they are none of these; those of row count_row[u]
    (i32[U]; -1: none) are legal too while the count stays within count_most[u].
    """

    machine: Machine
    vocabulary: Vocabulary
    masks: npt.NDArray[np.uint32]
    row: npt.NDArray[np.int32]
    depends: npt.NDArray[np.int32]
    dependent: npt.NDArray[np.int32]
    counts: npt.NDArray[np.uint8]
    count_row: npt.NDArray[np.int32]
    count_most: npt.NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        return self.masks.nbytes + self.machine.edges.nbytes + self.dependent.nbytes + self.counts.nbytes

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256((self.machine.digest + self.vocabulary.digest).encode()).hexdigest()


def compile_tokens(machine: Machine, vocabulary: Vocabulary) -> TokenTables:
    """The tables of a machine.

    A token is legal where each of its bytes leads on and the text can still be completed with this vocabulary. Raises
    `UnsupportedGrammar` where even the first token cannot come, or where that cannot be decided: a machine with frames
    needs each of its bytes as a token of its own.
    """
    machine, missing = _spellable(machine, vocabulary)
    if missing:
        row, found = _completable(machine, vocabulary)
        inside: list[tuple[Ints, npt.NDArray[np.uint32]]] = []
        counted = _Counted(int(row.max()) + 1, len(vocabulary))
    else:
        walk = Walk(machine, vocabulary)
        row, found, inside = walk.row, walk.found(), list(walk.inside())
        counted = _Counted(len(walk.kinds), len(vocabulary))
        found = found.with_doubted(*counted.take(walk.counted()))
    num_kinds = int(row.max()) + 1
    masks = _masks(num_kinds, len(vocabulary), found.only(LEGAL))
    for kinds, words in inside:
        masks[kinds] |= words
    open_ones = found.only(DEPENDENT).sorted()
    depends = np.zeros(num_kinds + 1, np.int32)
    np.cumsum(np.bincount(open_ones.kind, minlength=num_kinds), out=depends[1:])
    first = row[machine.start]
    empty_too = bool(machine.accepting[machine.start])
    if not empty_too and not masks[first].any() and depends[first] == depends[first + 1] and counted.row[first] < 0:
        raise UnsupportedGrammar("the fence cannot be satisfied with this vocabulary: no token may come first")
    return TokenTables(
        machine,
        vocabulary,
        masks,
        row.astype(np.int32),
        depends,
        open_ones.token.astype(np.int32),
        counted.rows,
        counted.row,
        counted.most,
    )


class _Counted:
    """Collects the rows of `TokenTables.counts`, each once."""

    def __init__(self, num_kinds: int, num_tokens: int) -> None:
        self.row, self.most = np.full(num_kinds, -1, np.int32), np.zeros(num_kinds, np.int32)
        self._num_tokens = num_tokens
        self._rows: dict[bytes, int] = {}

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(b"".join(self._rows), np.uint8).reshape(len(self._rows), self._num_tokens)

    def take(self, several: Iterable[tuple[Ints, Ints, npt.NDArray[np.uint8]]]) -> tuple[Ints, Ints]:
        """The kinds and tokens of those that are too few for a row."""
        few = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        for kinds, most, counts in several:
            for kind, bound, row in zip(kinds.tolist(), most.tolist(), counts, strict=True):
                tokens = np.flatnonzero(row)
                if len(tokens) > FEW:
                    self.row[kind] = self._rows.setdefault(row.tobytes(), len(self._rows))
                    self.most[kind] = bound
                else:
                    few.append((np.full(len(tokens), kind), tokens))
        kind, token = (np.concatenate(parts) for parts in zip(*few, strict=True))
        return kind, token


def _masks(num_kinds: int, num_tokens: int, legal: Found) -> npt.NDArray[np.uint32]:
    """u32[U, W]. Rows of few tokens are made word by word, the others bit by bit."""
    num_words = -(-num_tokens // 32)
    masks = np.zeros((num_kinds, num_words), np.uint32)
    dense = np.flatnonzero(np.bincount(legal.kind, minlength=num_kinds) > num_words)
    place = np.full(num_kinds, -1, np.int64)
    place[dense] = np.arange(len(dense))
    full = place[legal.kind] >= 0
    bits = np.zeros((len(dense), num_tokens), np.bool_)
    bits[place[legal.kind[full]], legal.token[full]] = True
    masks[dense] = pack_bits(bits)
    kind, token = legal.kind[~full], legal.token[~full]
    np.bitwise_or.at(masks, (kind, token // 32), np.uint32(1) << (token % 32).astype(np.uint32))
    return masks


def _spellable(machine: Machine, vocabulary: Vocabulary) -> tuple[Machine, bool]:
    """The machine without bytes that are no tokens of their own, where it can do without them.

    So every way that is left can be gone to its end. Few vocabularies have all 256; the missing ones begin characters
    that nobody uses. True: other tokens contain them; whether a text can be completed then depends on those.
    """
    missing = set(np.flatnonzero((machine.edges != DEAD).any(axis=0)).tolist()) - vocabulary.single_bytes
    if not missing:
        return machine, False
    if not machine.special and not missing.isdisjoint(b"".join(vocabulary.tokens)):
        return machine, True
    edges = machine.edges.copy()
    edges[:, sorted(missing)] = DEAD
    without = replace(machine, edges=edges)
    alive = leading_on(without)
    if alive[DEAD + 1 :].all() or np.array_equal(alive, leading_on(machine)):
        return without, False
    if machine.special:
        raise UnsupportedGrammar(f"the vocabulary has no token for the single bytes {bytes(sorted(missing))!r}")
    return machine, True


def _completable(machine: Machine, vocabulary: Vocabulary) -> tuple[Ints, Found]:
    """By state, the tokens after which some tokens lead to an end: for a machine without frames, state by state."""
    data, starts = vocabulary.flat
    begin, length = starts[vocabulary.order], np.diff(starts)[vocabulary.order]
    targets = np.repeat(np.arange(machine.num_states)[:, None], len(length), axis=1)
    for depth in range(int(length.max(initial=0))):
        longer = np.flatnonzero(length > depth)
        targets[:, longer] = machine.edges[targets[:, longer], data[begin[longer] + depth]]
    completable = machine.accepting.copy()
    while True:
        grown = completable | completable[targets].any(axis=1)
        if (grown == completable).all():
            break
        completable = grown
    kind, place = np.nonzero(completable[targets])
    found = Found(kind, vocabulary.order[place], np.full(len(kind), LEGAL, np.uint8))
    return np.arange(machine.num_states), found
