"""A remembered assistant turn, and the names by which a later request finds it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from zllm_jax.dialect.detokenizer import Detokenizer
from zllm_jax.dialect.tokenizer import Tokenizer

Message = Mapping[str, Any]
Calls = tuple[tuple[str, str, str], ...]

_TURN_BYTES = 1536  # of the object itself, its array's header, and its places in lists and tables
_CALL_BYTES = 128  # of a call without its texts


@dataclass(frozen=True, eq=False)
class Turn:
    """An assistant turn as it was generated.

    key: names the messages before it (`keys`). ids: i32[S], the prompt and the sampled ids without EOS; num_prompt: how
    many are the prompt's. content: the text that the client was given. rest: the end of it that no whole id covers,
    because a stop sequence began inside an id. calls: the calls that the client was given. request_id: of the request
    of this process that it answered. owner: names its tenant (`owner_of`).
    """

    key: str
    ids: np.ndarray
    num_prompt: int
    content: str
    rest: str = ""
    calls: Calls = ()
    request_id: str = ""
    owner: str = ""

    @cached_property
    def nbytes(self) -> int:
        """What it takes in memory, with all its ids and texts."""
        texts = [
            self.key,
            self.content,
            self.rest,
            self.request_id,
            self.owner,
            *(t for call in self.calls for t in call),
        ]
        return self.ids.nbytes + sum(map(sys.getsizeof, texts)) + _CALL_BYTES * len(self.calls) + _TURN_BYTES

    def shared(self, tokenizer: Tokenizer, echoed: str) -> tuple[int, str]:
        """What a changed echo of the content still shares: (the first so many sampled ids, the text after them)."""
        ends = token_ends(tokenizer, self.ids[self.num_prompt :].tolist())
        text = ends.text + self.rest
        start = text.find(self.content)
        if start < 0:
            return 0, echoed
        equal = common_length(echoed, self.content)
        num_ids = ends.whole(start + equal)
        covered = ends.at[num_ids - 1] if num_ids else 0
        return num_ids, text[covered : start + equal] + echoed[equal:]


@dataclass(frozen=True)
class TokenEnds:
    """The text of some ids, and where in it each ends: -1 for one that ends inside a character."""

    text: str
    at: tuple[int, ...]

    def whole(self, num_chars: int) -> int:
        """The fewest ids that hold all that whole ids can hold of the first `num_chars` characters."""
        best, reached = 0, 0
        for number, end in enumerate(self.at, 1):
            if reached < end <= num_chars:
                best, reached = number, end
        return best


def token_ends(tokenizer: Tokenizer, ids: Sequence[int]) -> TokenEnds:
    """The ids follow on a prompt; control tokens are no text."""
    detokenizer, pieces, at, length = Detokenizer(tokenizer, continuing=True), list[str](), list[int](), 0
    for id in ids:
        piece = detokenizer.feed([id])
        pieces.append(piece)
        length += len(piece)
        at.append(-1 if detokenizer.pending else length)
    return TokenEnds("".join([*pieces, detokenizer.close()]), tuple(at))


def common_length(one: str, other: str) -> int:
    if one.startswith(other):
        return len(other)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def content_text(message: Message) -> str | None:
    """The text of a message, its parts joined; None where a part is no text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        return None
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]


def calls_of(message: Message) -> Calls:
    """(id, name, arguments) of each call; arguments that differ in spelling only are equal."""
    return tuple(made for call in message.get("tool_calls") or () for made in calls_of_one(call))


def calls_of_one(call: Any) -> Calls:
    """The same of one call; () for what is none."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return ()
    arguments = _canonical(_parsed(function.get("arguments")))
    return ((str(call.get("id", "")), str(function.get("name", "")), arguments),)


def owner_of(tenant: str) -> str:
    """A name for a tenant that doesn't tell it."""
    return hashlib.blake2b(tenant.encode(errors="surrogatepass"), digest_size=16, person=b"owner").hexdigest()


def keys(messages: Sequence[Message], tools: Iterable[Any], tenant: str) -> Iterator[str]:
    """For each message, the name of what stands before it; and last, that of all messages. Each costs its own message.

    Two requests have a name in common when their tenant, their tools and the messages up to there mean the same:
    null and empty fields, the order of fields, a text cut into parts, and how arguments are spelled don't count.
    """
    state = hashlib.blake2b(_canonical([tenant, list(tools)]).encode(), digest_size=16)
    yield state.hexdigest()
    for message in messages:
        state.update(_canonical(_meaning(message)).encode() + b"\n")
        yield state.hexdigest()


def _meaning(message: Message) -> dict[str, Any]:
    text = content_text(message)
    said = {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
    said |= {"content": message.get("content") if text is None else text, "tool_calls": calls_of(message)}
    return {name: value for name, value in said.items() if value is not None and value not in ("", [], (), {})}


def _parsed(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
    return arguments


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
