"""Forced runs: where a machine allows only one text, the tokens of it, so that they need not be drawn one by one.

Which tokens a run has depends on the output so far alone, not on when somebody looks. Of all tokenisations it is the
encoder's own, as far as what comes behind cannot change it: a token at the end that may still grow is left to be drawn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from zllm_jax.fence.automaton import DEAD
from zllm_jax.fence.machine import ASK, Edge, Machine, Position
from zllm_jax.fence.tables import TokenTables
from zllm_jax.fence.vocabulary import Vocabulary

MIN_TOKENS = 4  # of a run: what a shorter one saves, its own call costs
MAX_BYTES = 2048  # of a run; what is forced behind them is the next one
CONTEXT_BYTES = 256  # of the output that the encoder sees before a run

Encode = Callable[[str], Iterable[Sequence[int]]]


def forced_text(machine: Machine, at: Position, limit: int = MAX_BYTES) -> bytes:
    """The bytes from a position on while exactly one may follow and the text may not end, at most `limit`."""
    text = bytearray()
    while len(text) < limit and not machine.ended(at):
        byte = int(machine.lone_bytes[at.state])
        if byte == ASK:
            byte = _lone(machine, at)
        if byte < 0:
            break
        text.append(byte)
        at = machine.step(at, byte)
    return bytes(text)


def _lone(machine: Machine, at: Position) -> int:
    """The only byte that the stack leaves; -1 where there are several."""
    found = -1
    for byte in np.flatnonzero(machine.edges[at.state]).tolist():
        if not machine.step(at, byte).dead:
            if found >= 0:
                return -1
            found = byte
    return found


@lru_cache(maxsize=128)
def may_force(machine: Machine, num_bytes: int = MIN_TOKENS) -> npt.NDArray[np.bool_]:
    """bool[Q]: where a run may begin. False where no stack makes `forced_text` so long, and within a text that is
    counted: that it is full is not seen ahead, so that its end is drawn as the others.
    """
    source, target = _ways(machine)
    length = np.zeros(machine.num_states, np.int64)
    for _ in range(num_bytes):
        longer = np.zeros_like(length)
        np.maximum.at(longer, source, length[target] + 1)
        length = longer
    return length >= num_bytes


def _ways(machine: Machine) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """From each state that some stack may leave a single way, and to where each of its ways may lead."""
    counting = np.array([edge.only_counts for edge in machine.special] + [False])
    ways = (machine.edges > 0) | ((machine.edges < 0) & counting[np.maximum(~machine.edges, 0)])
    source, byte = np.nonzero((machine.edges != DEAD) & (ways.sum(axis=1, keepdims=True) <= 1))
    target = machine.edges[source, byte].astype(np.int64)
    ends = [_ends(machine, edge) for edge in machine.special]
    several = [(int(state), end) for state, edge in zip(source, target, strict=True) if edge < 0 for end in ends[~edge]]
    more = np.array(several, np.int64).reshape(-1, 2)
    plain = target > 0
    return np.concatenate([source[plain], more[:, 0]]), np.concatenate([target[plain], more[:, 1]])


def _ends(machine: Machine, edge: Edge | None) -> set[int]:
    """Where an edge, or one of those tried after it, may lead."""
    found: set[int] = set()
    while edge is not None:
        if edge.pop is None:
            found.add(edge.target)
        else:
            found.update(row[edge.pop] for row in machine.returns if len(row) > edge.pop)
        edge = edge.otherwise
    return found - {DEAD}


class ForcedRuns:
    """Forced texts as tokens.

    vocabulary: all tokens that are text to some fence. encode: text -> the ids that the tokenizer makes of it; where it
    has several ways, the best first: the first is taken whose ids are that text to the fence. min_tokens: of a run.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Encode, *, min_tokens: int = MIN_TOKENS) -> None:
        if min_tokens < MIN_TOKENS:
            raise ValueError(f"min_tokens is {min_tokens}; decoding stops for runs of {MIN_TOKENS} or more")
        self._encode, self._min_tokens = encode, min_tokens
        self._tokens = frozenset(vocabulary.tokens)
        self._sorted = sorted(self._tokens)
        self._longest = max(map(len, self._tokens))

    def after(self, tables: TokenTables, at: Position, output: Sequence[int]) -> list[int]:
        """The tokens that must follow `output`, which has led to `at`; none where fewer than `min_tokens` would."""
        if not may_force(tables.machine)[at.state]:
            return []
        text = forced_text(tables.machine, at)
        if len(text) < self._min_tokens:
            return []
        known = tables.vocabulary.tokens
        found = self._cut(known, _context(known, output), text, lambda: _next_bytes(tables.machine, at, text))
        legal = _legal(tables, at, found)
        return legal if len(legal) >= self._min_tokens else []

    def _cut(
        self, known: Sequence[bytes], before: bytes, text: bytes, follow: Callable[[], Sequence[int]]
    ) -> list[int]:
        """The encoder's tokens of `text` behind `before`, without those at its end that may grow.

        Where the encoder would have merged the two, its tokens of `text` alone: it is too late for its own.
        """
        whole = _whole_characters(before + text)
        tokens = self._encoded(known, whole)
        borders = [0, *accumulate(len(known[token]) for token in tokens)]
        if len(before) not in borders[: len(tokens)]:
            return self._cut(known, b"", text, follow) if before else []
        settled = self._settled(whole, borders, follow() if len(whole) == len(before + text) else range(256))
        return list(tokens[borders.index(len(before)) : settled])

    def _encoded(self, known: Sequence[bytes], text: bytes) -> Sequence[int]:
        """Nothing where the tokenizer cannot spell the text, or spells another."""
        try:
            several = self._encode(text.decode())
        except UnicodeDecodeError:
            return []
        for tokens in several:
            if max(tokens, default=0) < len(known) and b"".join(known[token] for token in tokens) == text:
                return tokens
        return []

    def _settled(self, text: bytes, borders: Sequence[int], follow: Sequence[int]) -> int:
        """How many of the tokens between these borders stay as they are when one of the bytes `follow` comes next.

        A border over which no token of the vocabulary could lie parts the text for every encoder: nothing behind it
        has a say in what stands before it.
        """
        end = len(text)
        limit = next(
            (start for start in range(max(0, end - self._longest), end) if self._grows(text[start:], follow)), end
        )
        for count in range(len(borders) - 1, 0, -1):
            if borders[count] <= limit and not self._spanned(text, borders[count]):
                return count
        return 0

    def _grows(self, text: bytes, follow: Sequence[int]) -> bool:
        """Whether some token begins with all of `text` and one of these bytes."""
        return self._goes_on(text) and any(
            text + bytes([byte]) in self._tokens or self._goes_on(text + bytes([byte])) for byte in follow
        )

    def _spanned(self, text: bytes, border: int) -> bool:
        """Whether a token could lie over this border of a text."""
        for start in range(max(0, border - self._longest), border):
            for stop in range(border + 1, len(text) + 1):
                if text[start:stop] in self._tokens:
                    return True
                if not self._goes_on(text[start:stop]):
                    break
        return False

    def _goes_on(self, text: bytes) -> bool:
        """Whether some token begins with `text` and is longer."""
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


def _context(known: Sequence[bytes], output: Sequence[int]) -> bytes:
    """The end of the output, from a token that begins a character."""
    text = b""
    for token in reversed(output):
        if len(text) >= CONTEXT_BYTES and not 0x80 <= text[0] < 0xC0:
            break
        text = known[token] + text
    return text


def _next_bytes(machine: Machine, at: Position, text: bytes) -> list[int]:
    """What may come behind `text`."""
    at = machine.run(text, at)
    return [byte for byte in np.flatnonzero(machine.edges[at.state]).tolist() if not machine.step(at, byte).dead]


def _legal(tables: TokenTables, at: Position, tokens: Iterable[int]) -> list[int]:
    """The tokens up to the first that may not come."""
    found: list[int] = []
    for token in tokens:
        kind = int(tables.row[at.state])
        sure = int(tables.masks[kind, token // 32]) >> (token % 32) & 1
        if not sure and token not in tables.dependent[tables.depends[kind] : tables.depends[kind + 1]]:
            break
        at = tables.machine.run(tables.vocabulary.tokens[token], at)
        if at.dead:
            break
        found.append(token)
    return found


def _whole_characters(text: bytes) -> bytes:
    """Without a character that is cut off at the end.

    >>> _whole_characters("né".encode()[:-1])
    b'n'
    """
    start = next((i for i in range(1, min(4, len(text)) + 1) if text[-i] >= 0xC0), 0)
    if not start:
        return text
    lead = text[-start]
    length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    return text if start >= length else text[:-start]
