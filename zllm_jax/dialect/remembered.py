"""The turns that are remembered: how many bytes of them, and which of them go first."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from zllm_jax.dialect.turns import Turn

MAX_ANSWERS = 64  # to the same messages: all of them are compared with what comes back


class Remembered:
    """Turns up to `max_bytes`, everything they hold counted. Any thread may use it.

    The least recently used go first, whoever they belong to; but who holds more than half of the bytes makes room with
    their own, so that nobody can push out all that the others have. A turn larger than all the room is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._turns: OrderedDict[int, Turn] = OrderedDict()  # by id(turn), the oldest use first
        self._of: dict[str, OrderedDict[int, Turn]] = {}  # the same, of each owner
        self._bytes_of: dict[str, int] = {}
        self._by_key: dict[str, list[Turn]] = {}
        self._by_request: dict[tuple[str, str], Turn] = {}  # of this process: callers choose their ids
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def all(self) -> list[Turn]:
        with self._lock:
            return list(self._turns.values())

    def under(self, key: str) -> list[Turn]:
        """The turns that answered the messages of that name, the oldest first."""
        with self._lock:
            return list(self._by_key.get(key, ()))

    def keep(self, turn: Turn) -> None:
        """Remember a turn, in place of one that is equal to it."""
        with self._lock:
            for other in [other for other in self._by_key.get(turn.key, ()) if _equal(other, turn)]:
                self._forget(other)
            if turn.nbytes > self._max_bytes:
                return
            same = self._by_key.get(turn.key, [])
            if len(same) >= MAX_ANSWERS:
                self._forget(same[0])
            while self.nbytes + turn.nbytes > self._max_bytes:
                self._forget(next(iter(self._giving(turn).values())))
            self._by_key.setdefault(turn.key, []).append(turn)
            self._turns[id(turn)] = self._of.setdefault(turn.owner, OrderedDict())[id(turn)] = turn
            self._bytes_of[turn.owner] = self._bytes_of.get(turn.owner, 0) + turn.nbytes
            if turn.request_id:
                self._by_request[turn.owner, turn.request_id] = turn
            self.nbytes += turn.nbytes

    def take(self, owner: str, request_id: str) -> Turn | None:
        """The turn that answered a request of an owner, which is forgotten."""
        with self._lock:
            turn = self._by_request.get((owner, request_id))
            if turn is not None:
                self._forget(turn)
            return turn

    def touch(self, turn: Turn) -> None:
        """Note that a turn was used."""
        with self._lock:
            if id(turn) in self._turns:
                self._turns.move_to_end(id(turn))
                self._of[turn.owner].move_to_end(id(turn))

    def _giving(self, turn: Turn) -> OrderedDict[int, Turn]:
        """Of which turns the oldest makes room for one."""
        own = self._of.get(turn.owner)
        if own is None or 2 * (self._bytes_of[turn.owner] + turn.nbytes) <= self._max_bytes:
            return self._turns
        return own

    def _forget(self, turn: Turn) -> None:
        del self._turns[id(turn)], self._of[turn.owner][id(turn)]
        self._bytes_of[turn.owner] -= turn.nbytes
        if not self._of[turn.owner]:
            del self._of[turn.owner], self._bytes_of[turn.owner]
        self.nbytes -= turn.nbytes
        if self._by_request.get((turn.owner, turn.request_id)) is turn:
            del self._by_request[turn.owner, turn.request_id]
        left = self._by_key[turn.key]
        left.remove(turn)
        if not left:
            del self._by_key[turn.key]


def _equal(one: Turn, other: Turn) -> bool:
    return (
        (one.owner, one.content, one.rest, one.calls, one.num_prompt)
        == (other.owner, other.content, other.rest, other.calls, other.num_prompt)
        and np.array_equal(one.ids, other.ids)
    )  # fmt: skip
