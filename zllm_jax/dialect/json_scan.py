"""Where a JSON object ends, found as its text comes in."""

from __future__ import annotations


class JsonScan:
    """Follows brackets and strings. done: the object is whole. broken: what cannot stand in JSON, else empty.

    good: how much of the last text came before what is broken.
    """

    def __init__(self) -> None:
        self.started, self.done, self.broken, self.good = False, False, "", 0
        self._open = list[str]()
        self._string, self._escaped = False, False

    def feed(self, text: str) -> int | None:
        """How much of `text` belongs to the object where it ends in it, else None."""
        for at, character in enumerate(text):
            if self._string:
                self._in_string(character)
            elif character == '"':
                self._string = True
            elif character in "{[":
                self._open.append("}" if character == "{" else "]")
            elif character in "}]" and (not self._open or self._open.pop() != character):
                self.broken = f"{character!r} closes nothing"
            self.started = True
            if self.broken:
                self.good = at
                return None
            if not self._open:
                self.done = True
                return at + 1
        return None

    def _in_string(self, character: str) -> None:
        if character < " ":
            self.broken = f"{character!r} in a string must be escaped"
        elif self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._string = False
