"""Who owns which page or ring: a free list with reference counts. Ids only; it touches no array."""

from __future__ import annotations

from collections.abc import Iterable


class Pool:
    """`size` ids, each free or held by a number of owners."""

    def __init__(self, size: int) -> None:
        self._free = list(range(size - 1, -1, -1))
        self._owners = [0] * size

    @property
    def size(self) -> int:
        return len(self._owners)

    @property
    def free(self) -> int:
        return len(self._free)

    def owners(self, id: int) -> int:
        return self._owners[id]

    def take(self, count: int) -> list[int]:
        """`count` free ids, each with one owner. Raises ValueError when there are fewer: check `free` first."""
        if count > len(self._free):
            raise ValueError(f"{count} ids are wanted, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for id in taken:
            self._owners[id] = 1
        return taken

    def share(self, ids: Iterable[int]) -> None:
        """One more owner for each id."""
        for id in ids:
            if self._owners[id] == 0:
                raise ValueError(f"id {id} is free and cannot be shared")
            self._owners[id] += 1

    def release(self, ids: Iterable[int]) -> None:
        """One owner less for each id; without owners it is free again."""
        for id in ids:
            if self._owners[id] == 0:
                raise ValueError(f"id {id} is already free")
            self._owners[id] -= 1
            if self._owners[id] == 0:
                self._free.append(id)
