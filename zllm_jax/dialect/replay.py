"""Exact replay: the ids of an assistant turn are kept, and stand for it when a client sends the turn back.

A template renders a past turn otherwise than it was generated (it trims, moves, drops), and a tokenizer cuts the text
otherwise than the model did; either way the prompt would no longer continue the state that is cached. History is what
was generated. The prompt depends on what was remembered, never on what is cached.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zllm_jax.dialect.chat_template import ChatTemplate
from zllm_jax.dialect.tokenizer import Tokenizer
from zllm_jax.dialect.turns import Calls, Message, Turn, calls_of, calls_of_one, content_text, keys, token_ends
from zllm_jax.errors import InvalidRequest

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
MAX_META_CHARS = 1 << 18  # of contents in one snapshot's meta: the newest turns go first
_MAX_MISSING = 8  # sampled ids that a state may lack at its end: the last one drawn was never fed


class Replay:
    """Remembers turns up to `max_bytes`, the least recently used go first. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer, self._template, self._max_bytes = tokenizer, template, max_bytes
        # What no message contains by intent; one character only, for templates that rearrange a content's characters.
        self._sentinel = chr(0xF0000 + secrets.randbelow(0xFFFD)) * 16
        self._lock = threading.Lock()
        self._turns: OrderedDict[int, Turn] = OrderedDict()  # by id(turn), the oldest use first
        self._by_key: dict[str, list[Turn]] = {}
        self._by_request: dict[str, Turn] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def remember(
        self,
        request_id: str,
        messages: Sequence[Message],
        prompt: np.ndarray,
        sampled: Sequence[int],
        content: str,
        *,
        tools: Sequence[Any] = (),
        tenant: str = "",
        stopped: bool = False,
    ) -> None:
        """Keep the answer to `messages`.

        prompt: i32[S] as it was computed. sampled: the ids drawn, without EOS. content: what the client was given.
        stopped: a stop sequence ended it, so that `sampled` says more than `content`.
        """
        rest = ""
        if stopped:
            ends = token_ends(self._tokenizer, sampled)
            keep = ends.whole(len(content))
            sampled, rest = sampled[:keep], content[ends.at[keep - 1] if keep else 0 :]
        ids = np.concatenate([np.asarray(prompt, np.int32), np.asarray(sampled, np.int32)])
        *_, key = keys(messages, tools, tenant)
        self._keep(Turn(key, ids, len(prompt), content, rest, request_id=request_id))

    def name_calls(self, request_id: str, calls: Sequence[str | Message], content: str = "") -> None:
        """The client was given calls, and `content` beside them, in place of a remembered answer's text.

        calls: in OpenAI's shape, so that a changed argument is noticed; or only their ids. A turn that is not
        remembered any more is left alone.
        """
        made = tuple(
            call for one in calls for call in (((one, "", ""),) if isinstance(one, str) else calls_of_one(one))
        )
        with self._lock:
            turn = self._by_request.get(request_id)
            if turn is not None:
                self._forget(turn)
        if turn is not None:
            self._keep(replace(turn, calls=made, content=content))

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Any] = (), tenant: str = "") -> list[int] | None:
        """The ids of a prompt whose last remembered assistant turn is replayed; None where there is none.

        What follows the turn is the template's rendering of it, found by rendering with a sentinel in the turn's place.
        """
        if not self._turns:
            return None
        before = list(keys(messages, tools, tenant))
        for place in reversed(range(len(messages))):
            if messages[place].get("role") == "assistant":
                for turn in self._candidates(before[place], messages, place):
                    ids = self._continued(turn, messages, place, tools)
                    if ids is not None:
                        self._touch(turn)
                        return ids
        return None

    def meta(self, tokens: np.ndarray) -> dict[str, Any]:
        """What a snapshot of `tokens` i32[S] keeps besides them, so that `recall` finds its turns again; JSON-able."""
        with self._lock:
            inside = [turn for turn in self._turns.values() if _is_inside(turn, tokens)]
        entries, room = [], MAX_META_CHARS
        for turn in sorted(inside, key=lambda turn: turn.num_prompt, reverse=True):
            room -= len(turn.content)
            if room < 0:
                break
            entries.append(
                {
                    "key": turn.key,
                    "prompt": turn.num_prompt,
                    "tokens": len(turn.ids),
                    "missing": turn.ids[len(tokens) :].tolist(),
                    "content": turn.content,
                    "rest": turn.rest,
                    "calls": [list(call) for call in turn.calls],
                    "request": turn.request_id,
                }
            )
        return {"turns": entries[::-1]}

    def recall(self, tokens: np.ndarray, meta: Mapping[str, Any]) -> int:
        """Remember the turns of a stored state i32[S]; how many. Malformed ones are left: a file may hold anything."""
        entries = meta.get("turns", ())
        found = 0
        for entry in entries if isinstance(entries, Sequence) else ():
            try:
                turn = _turn(tokens, entry)
            except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
                log.warning("a stored turn cannot be replayed: %r", error)
                continue
            self._keep(turn)
            found += 1
        return found

    # -- finding ---------------------------------------------------------------------------------------------------

    def _candidates(self, key: str, messages: Sequence[Message], place: int) -> list[Turn]:
        """The turns that answered the same messages: the one whose calls come back first, then by equal content."""
        echoed = content_text(messages[place])
        if echoed is None:
            return []
        with self._lock:
            turns = list(self._by_key.get(key, ()))
        if len(turns) < 2:
            return turns
        answered = _call_ids(messages, place)

        def fit(numbered: tuple[int, Turn]) -> tuple[bool, bool, int, int]:
            number, turn = numbered
            called = bool(answered & {call[0] for call in turn.calls})
            return called, turn.content == echoed, turn.shared(self._tokenizer, echoed)[0], number

        return [turn for _, turn in sorted(enumerate(turns), key=fit, reverse=True)]

    def _continued(self, turn: Turn, messages: Sequence[Message], place: int, tools: Sequence[Any]) -> list[int] | None:
        message = messages[place]
        echoed = content_text(message)
        assert echoed is not None
        if echoed == turn.content and _same_calls(turn.calls, messages, place):
            num_ids, rest = len(turn.ids) - turn.num_prompt, turn.rest
            kept = {name: message[name] for name in ("role", "name") if name in message}  # the ids hold all the others
        else:
            num_ids, rest = turn.shared(self._tokenizer, echoed)
            kept = dict(message)
            if num_ids == 0:
                return None
        tail = self._tail(messages, place, {**kept, "content": self._in_shape(message)}, tools)
        if tail is None or not all(name in tail for _, name, _ in calls_of(kept)):
            return None
        ids = self._encode(rest + tail)
        return None if ids is None else [*turn.ids[: turn.num_prompt + num_ids].tolist(), *ids]

    def _in_shape(self, message: Message) -> Any:
        parts = isinstance(message.get("content"), Sequence) and not isinstance(message["content"], str)
        return [{"type": "text", "text": self._sentinel}] if parts else self._sentinel

    def _tail(self, messages: Sequence[Message], place: int, message: Message, tools: Sequence[Any]) -> str | None:
        """What the template renders after a message's content; None where it loses or repeats the content."""
        try:
            text = self._template.render([*messages[:place], message, *messages[place + 1 :]], tools or None)
        except InvalidRequest:
            return None
        parts = text.split(self._sentinel)
        return parts[1] if len(parts) == 2 else None

    def _encode(self, text: str) -> list[int] | None:
        """Ids that continue others; None where only the whole text could be encoded."""
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError:
            return None
        ids = self._tokenizer.encode(text, add_bos=False)
        if self._tokenizer.strips_space and ids[0] not in self._tokenizer.special_ids:
            return None  # encoding put a space in front that is not in the text
        return ids

    # -- keeping ---------------------------------------------------------------------------------------------------

    def _keep(self, turn: Turn) -> None:
        with self._lock:
            same = self._by_key.setdefault(turn.key, [])
            for other in [other for other in same if _equal(other, turn)]:
                self._forget(other)
            self._by_key.setdefault(turn.key, []).append(turn)
            self._turns[id(turn)] = turn
            self._by_request[turn.request_id] = turn
            self.nbytes += turn.nbytes
            while self.nbytes > self._max_bytes:
                self._forget(next(iter(self._turns.values())))

    def _forget(self, turn: Turn) -> None:
        del self._turns[id(turn)]
        self.nbytes -= turn.nbytes
        if self._by_request.get(turn.request_id) is turn:
            del self._by_request[turn.request_id]
        left = self._by_key[turn.key]
        left.remove(turn)
        if not left:
            del self._by_key[turn.key]

    def _touch(self, turn: Turn) -> None:
        with self._lock:
            if id(turn) in self._turns:
                self._turns.move_to_end(id(turn))


def _same_calls(calls: Calls, messages: Sequence[Message], place: int) -> bool:
    """Whether the message makes the calls that the turn made; one that lost them is known by the answers to them."""
    echoed = calls_of(messages[place])
    if calls and not echoed:
        return bool(_call_ids(messages, place) & {call[0] for call in calls})
    return len(echoed) == len(calls) and all(
        one == other or (other[1] == "" and one[0] == other[0]) for one, other in zip(echoed, calls, strict=True)
    )


def _call_ids(messages: Sequence[Message], place: int) -> set[str]:
    """The ids of the calls that a message makes, or that the messages after it answer."""
    answers: Iterator[Message] = iter(messages[place + 1 :])
    answered = []
    for message in answers:
        if message.get("role") != "tool":
            break
        answered.append(str(message.get("tool_call_id", "")))
    return {*answered, *(call[0] for call in calls_of(messages[place]))} - {""}


def _equal(one: Turn, other: Turn) -> bool:
    return (
        (one.content, one.rest, one.calls, one.num_prompt)
        == (other.content, other.rest, other.calls, other.num_prompt)
        and np.array_equal(one.ids, other.ids)
    )  # fmt: skip


def _is_inside(turn: Turn, tokens: np.ndarray) -> bool:
    """Whether a state of `tokens` holds the turn, but perhaps for its last ids."""
    held = min(len(turn.ids), len(tokens))
    if len(turn.ids) - held > _MAX_MISSING or turn.num_prompt > held:
        return False
    return turn.ids[held - 1] == tokens[held - 1] and np.array_equal(turn.ids[:held], tokens[:held])


def _turn(tokens: np.ndarray, entry: Mapping[str, Any]) -> Turn:
    """A turn as `Replay.meta` wrote it. Raises what a malformed one causes."""
    num_prompt, num_tokens, missing = entry["prompt"], entry["tokens"], entry["missing"]
    key, content, rest, request = entry["key"], entry["content"], entry["rest"], entry["request"]
    if not (isinstance(num_prompt, int) and isinstance(num_tokens, int) and isinstance(missing, list)):
        raise TypeError("prompt and tokens must be integers, missing a list")
    if not all(isinstance(text, str) for text in (key, content, rest, request)):
        raise TypeError("key, content, rest and request must be texts")
    if (
        min(missing, default=0) < 0
        or len(missing) > _MAX_MISSING
        or not 0 < num_prompt <= num_tokens == min(num_tokens, len(tokens)) + len(missing)
    ):
        raise ValueError(f"{num_prompt} of {num_tokens} tokens, {len(missing)} missing, in a state of {len(tokens)}")
    ids = tokens[:num_tokens]
    if missing:
        ids = np.concatenate([ids, np.asarray(missing, np.int32)])
    calls = tuple((str(id), str(name), str(arguments)) for id, name, arguments in entry["calls"])
    return Turn(key, ids, num_prompt, content, rest, calls, request)
