"""What is already certain of a JSON object whose text was cut."""

from __future__ import annotations

import json
import re
from typing import Any

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s"{}\[\],:]+)', re.DOTALL)
_CLOSER = {"{": "}", "[": "]"}


def certain_part(text: str) -> dict[str, Any]:
    """The object without the values that the cut left unfinished: '{"a": [1, "x' is {"a": [1]}.

    A number at the very end counts as finished, as for the `anthropic` library, which reads streamed input so.
    """
    open_, is_key = list[str](), False
    kept, closers = 0, "{}"
    position = 0
    while found := _TOKEN.match(text, position):
        token, position = found[1], found.end()
        if token in _CLOSER:
            open_.append(_CLOSER[token])
            is_key = token == "{"
        elif token in "}]":
            open_.pop()
        elif token in ",:":
            is_key = token == "," and open_[-1] == "}"
            continue
        elif is_key or not _is_value(token):
            continue
        kept, closers = position, "".join(reversed(open_))
    part: dict[str, Any] = json.loads(text[:kept] + closers)
    return part


def _is_value(token: str) -> bool:
    try:
        json.loads(token)
    except ValueError:
        return False
    return True
