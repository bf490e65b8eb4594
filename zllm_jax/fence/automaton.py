"""Finite automata over bytes, and two made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256

import numpy as np
import numpy.typing as npt

DEAD = 0


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton over bytes. State 0 is `DEAD`: it accepts nothing and leads nowhere else.

    transitions: i32[Q, 256], the state after each byte. accepting: bool[Q]. start: the first state.
    """

    transitions: npt.NDArray[np.int32]
    accepting: npt.NDArray[np.bool_]
    start: int

    def __post_init__(self) -> None:
        num_states = len(self.accepting)
        if self.transitions.shape != (num_states, 256):
            raise ValueError(f"transitions are {self.transitions.shape}, must be ({num_states}, 256) as accepting says")
        inside = bool(np.all((self.transitions >= 0) & (self.transitions < num_states)))
        if not inside or not 0 <= self.start < num_states:
            raise ValueError(f"start and transitions must be states in [0, {num_states})")
        if self.accepting[DEAD] or self.transitions[DEAD].any():
            raise ValueError("state 0 must accept nothing and lead only to itself")

    @property
    def num_states(self) -> int:
        return len(self.accepting)

    @cached_property
    def digest(self) -> bytes:
        """A hash of the arrays: equal for equal automata, and for equal languages where both are minimal."""
        parts = (np.int64(self.start), self.accepting, np.ascontiguousarray(self.transitions))
        return sha256(b"".join(part.tobytes() for part in parts)).digest()

    def run(self, text: bytes, state: int | None = None) -> int:
        """The state after `text`, from `state` or the start; `DEAD` where a byte has no transition."""
        state = self.start if state is None else state
        for byte in text:
            state = int(self.transitions[state, byte])
        return state

    def accepts(self, text: bytes) -> bool:
        """Whether `text` as a whole is in the language."""
        return bool(self.accepting[self.run(text)])


@dataclass(frozen=True)
class ByContent:
    """An automaton as a key: equal where the digests are."""

    automaton: ByteAutomaton = field(compare=False)
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self.automaton.digest)


def build(edges: Iterable[tuple[int, bytes, int]], *, start: int, accepting: Iterable[int]) -> ByteAutomaton:
    """An automaton from edges (from, any of these bytes, to). States are numbered from 1; 0 is `DEAD`."""
    edges, accepting = list(edges), set(accepting)
    num_states = 1 + max(start, *accepting, *(max(source, target) for source, _, target in edges))
    transitions = np.zeros((num_states, 256), np.int32)
    for source, several, target in edges:
        transitions[source, list(several)] = target
    return ByteAutomaton(transitions, np.isin(np.arange(num_states), list(accepting)), start)


def decimal_number() -> ByteAutomaton:
    r"""Numbers as JSON writes them, without exponent: `-?(0|[1-9][0-9]*)(\.[0-9]+)?`.

    >>> [decimal_number().accepts(text) for text in (b"-0.50", b"120", b"012", b"1.", b"-")]
    [True, True, False, False, False]
    """
    digits = b"0123456789"
    begin, minus, zero, whole, point, fraction = range(1, 7)
    return build(
        [
            (begin, b"-", minus),
            *((state, b"0", zero) for state in (begin, minus)),
            *((state, digits[1:], whole) for state in (begin, minus)),
            (whole, digits, whole),
            *((state, b".", point) for state in (zero, whole)),
            *((state, digits, fraction) for state in (point, fraction)),
        ],
        start=begin,
        accepting=[zero, whole, fraction],
    )


def choices(texts: Iterable[str]) -> ByteAutomaton:
    """Exactly one of `texts`: the trie of their bytes. Raises `ValueError` when there is none."""
    trie: list[dict[int, int]] = [{}, {}]  # the children of each state, DEAD first, then the root
    accepting: set[int] = set()
    for text in texts:
        state = 1
        for byte in text.encode(errors="surrogatepass"):
            if byte not in trie[state]:
                trie[state][byte] = len(trie)
                trie.append({})
            state = trie[state][byte]
        accepting.add(state)
    if not accepting:
        raise ValueError("choices needs at least one text: nothing at all could be generated")
    return build(_edges(trie), start=1, accepting=accepting)


def _edges(trie: Iterable[Mapping[int, int]]) -> Iterable[tuple[int, bytes, int]]:
    for source, children in enumerate(trie):
        for byte, target in children.items():
            yield source, bytes([byte]), target
