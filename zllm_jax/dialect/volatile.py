"""Lines that some clients put in front of their first instruction and change with every request.

Such a line says nothing to a model, but as it differs from request to request, no prompt would begin like the one
before it, and nothing could be reused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from zllm_jax.values import VOLATILE_HEADERS

_LINES = re.compile(rf"\A(?:(?:{'|'.join(map(re.escape, VOLATILE_HEADERS))}):[^\n]*(?:\n|\Z))+", re.IGNORECASE)
_INSTRUCTING = ("system", "developer")

Message = Mapping[str, Any]


def without_volatile(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages without the volatile header lines at the start of the first one, if that is an instruction.

    A text part that held nothing else is left out. Everything else stays as it is.
    """
    messages = tuple(messages)
    if not messages or messages[0].get("role") not in _INSTRUCTING:
        return messages
    content = messages[0].get("content")
    if isinstance(content, str):
        cleaned: Any = _LINES.sub("", content)
    elif isinstance(content, Sequence) and content and _is_text(content[0]):
        text = _LINES.sub("", content[0]["text"])
        first = [{**content[0], "text": text}] if text or text == content[0]["text"] else []
        cleaned = [*first, *content[1:]]
    else:
        return messages
    if cleaned == content:
        return messages
    return ({**messages[0], "content": cleaned}, *messages[1:])


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
