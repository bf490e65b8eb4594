"""Exact replay: the ids of an assistant turn are kept, and stand for it when a client sends the turn back.

A template renders a past turn otherwise than it was generated (it trims, moves, drops), and a tokenizer cuts the text
otherwise than the model did; either way the prompt would no longer continue the state that is cached. History is what
was generated. The prompt depends on what was remembered, never on what is cached.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from zllm_jax.dialect.chat_template import ChatTemplate
from zllm_jax.dialect.remembered import Remembered
from zllm_jax.dialect.tokenizer import Tokenizer
from zllm_jax.dialect.turns import (
    Calls,
    Message,
    Turn,
    calls_of,
    calls_of_one,
    content_text,
    keys,
    owner_of,
    token_ends,
)
from zllm_jax.errors import InvalidRequest

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
MAX_META_BYTES = 1 << 19  # of one snapshot's meta, as JSON: the newest turns go first
_FRAME_BYTES = len(json.dumps({"turns": []}))
_MAX_MISSING = 8  # sampled ids that a state may lack at its end: the last one drawn was never fed


class Renderer(Protocol):
    """Writes a conversation's prompt, as `ChatTemplate.render` does."""

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str: ...


class Replay:
    """Remembers turns up to `max_bytes`, those of all tenants together (`Remembered`). Any thread may use it.

    vocab_size: of the model, which may have more ids than the tokenizer.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, vocab_size: int, max_bytes: int = MAX_BYTES
    ) -> None:
        self._tokenizer, self._template, self._vocab_size = tokenizer, template, vocab_size
        # What no message contains by intent; one character only, for templates that rearrange a content's characters.
        self._sentinel = chr(0xF0000 + secrets.randbelow(0xFFFD)) * 16
        self._turns = Remembered(max_bytes)

    @property
    def nbytes(self) -> int:
        return self._turns.nbytes

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
        calls: Sequence[Message] = (),
        tools: Sequence[Any] = (),
        dialect: str | None = None,
        tenant: str = "",
        stopped: bool = False,
    ) -> None:
        """Keep the answer to `messages`.

        prompt: i32[S] as it was computed. sampled: the ids drawn, without EOS. content: what the client was given.
        calls: what else, in OpenAI's shape. stopped: a stop sequence ended it, so that `sampled` says more than
        `content`, which is then all that it said. dialect: of tools, where the client named one.
        """
        rest = ""
        if stopped:
            ends = token_ends(self._tokenizer, sampled)
            keep = ends.whole(len(content))
            sampled, rest = sampled[:keep], content[ends.at[keep - 1] if keep else 0 :]
        ids = np.concatenate([np.asarray(prompt, np.int32), np.asarray(sampled, np.int32)])
        *_, key = keys(messages, _shown(tools, dialect), tenant)
        made = tuple(call for one in calls for call in calls_of_one(one))
        owner = owner_of(tenant)
        self._turns.keep(Turn(key, ids, len(prompt), content, rest, made, request_id=request_id, owner=owner))

    def name_calls(
        self, request_id: str, calls: Sequence[str | Message], content: str = "", *, tenant: str = ""
    ) -> None:
        """The client was given calls, and `content` beside them, in place of a remembered answer's text.

        calls: in OpenAI's shape, so that a changed argument is noticed; or only their ids. A turn that is not
        remembered any more is left alone.
        """
        made = tuple(
            call for one in calls for call in (((one, "", ""),) if isinstance(one, str) else calls_of_one(one))
        )
        turn = self._turns.take(owner_of(tenant), request_id)
        if turn is not None:
            self._turns.keep(replace(turn, calls=made, content=content))

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        dialect: str | None = None,
        tenant: str = "",
        renderer: Renderer | None = None,
    ) -> list[int] | None:
        """The ids of a prompt whose last remembered assistant turn is replayed; None where there is none.

        renderer: what writes this conversation, where it isn't the template.

        What follows the turn is the template's rendering of it, found by rendering with a sentinel in the turn's place.
        """
        if not self._turns:
            return None
        before = list(keys(messages, _shown(tools, dialect), tenant))
        for place in reversed(range(len(messages))):
            if messages[place].get("role") == "assistant":
                for turn in self._candidates(before[place], messages, place):
                    ids = self._continued(turn, messages, place, tools, renderer or self._template)
                    if ids is not None:
                        self._turns.touch(turn)
                        return ids
        return None

    def meta(self, tokens: np.ndarray) -> dict[str, Any]:
        """What a snapshot of `tokens` i32[S] keeps besides them, so that `recall` finds its turns again; JSON-able."""
        inside = [turn for turn in self._turns.all() if _is_inside(turn, tokens)]
        entries, room = [], MAX_META_BYTES - _FRAME_BYTES
        for turn in sorted(inside, key=lambda turn: turn.num_prompt, reverse=True):
            entry = _entry(turn, tokens)
            nbytes = len(json.dumps(entry)) + len(", ")
            if nbytes <= room:
                room -= nbytes
                entries.append(entry)
        return {"turns": entries[::-1]}

    def recall(self, tokens: np.ndarray, meta: Mapping[str, Any]) -> int:
        """Remember the turns of a stored state i32[S]; how many. Malformed ones are left: a file may hold anything.

        So are those with an id that the model does not have: their prompts are encoded anew.
        """
        entries = meta.get("turns", ())
        found = 0
        for entry in entries if isinstance(entries, Sequence) else ():
            try:
                turn = _turn(tokens, entry, self._vocab_size)
            except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
                log.warning("a stored turn cannot be replayed: %r", error)
                continue
            self._turns.keep(turn)
            found += 1
        return found

    # -- finding ---------------------------------------------------------------------------------------------------

    def _candidates(self, key: str, messages: Sequence[Message], place: int) -> list[Turn]:
        """The turns that answered the same messages: the one whose calls come back first, then by equal content."""
        echoed = content_text(messages[place])
        if echoed is None:
            return []
        turns = self._turns.under(key)
        if len(turns) < 2:
            return turns
        answered = _call_ids(messages, place)

        def fit(numbered: tuple[int, Turn]) -> tuple[bool, bool, int, int]:
            number, turn = numbered
            called = bool(answered & {call[0] for call in turn.calls})
            return called, turn.content == echoed, turn.shared(self._tokenizer, echoed)[0], number

        return [turn for _, turn in sorted(enumerate(turns), key=fit, reverse=True)]

    def _continued(
        self, turn: Turn, messages: Sequence[Message], place: int, tools: Sequence[Any], renderer: Renderer
    ) -> list[int] | None:
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
        changed = [*messages[:place], {**kept, "content": self._in_shape(message)}, *messages[place + 1 :]]
        tail = self._tail(changed, tools, renderer)
        if tail is None or not all(name in tail for _, name, _ in calls_of(kept)):
            return None
        ids = self._encode(rest + tail)
        return None if ids is None else [*turn.ids[: turn.num_prompt + num_ids].tolist(), *ids]

    def _in_shape(self, message: Message) -> Any:
        parts = isinstance(message.get("content"), Sequence) and not isinstance(message["content"], str)
        return [{"type": "text", "text": self._sentinel}] if parts else self._sentinel

    def _tail(self, messages: Sequence[Message], tools: Sequence[Any], renderer: Renderer) -> str | None:
        """What is rendered after the content that is a sentinel; None where it is lost or repeated."""
        try:
            text = renderer.render(messages, tools or None)
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


def _shown(tools: Sequence[Any], dialect: str | None) -> Sequence[Any]:
    return [*tools, dialect] if dialect else tools


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


def _is_inside(turn: Turn, tokens: np.ndarray) -> bool:
    """Whether a state of `tokens` holds the turn, but perhaps for its last ids."""
    held = min(len(turn.ids), len(tokens))
    if len(turn.ids) - held > _MAX_MISSING or turn.num_prompt > held:
        return False
    return turn.ids[held - 1] == tokens[held - 1] and np.array_equal(turn.ids[:held], tokens[:held])


def _entry(turn: Turn, tokens: np.ndarray) -> dict[str, Any]:
    return {
        "key": turn.key,
        "prompt": turn.num_prompt,
        "tokens": len(turn.ids),
        "missing": turn.ids[len(tokens) :].tolist(),
        "content": turn.content,
        "rest": turn.rest,
        "calls": [list(call) for call in turn.calls],
        "owner": turn.owner,
    }


def _turn(tokens: np.ndarray, entry: Mapping[str, Any], vocab_size: int) -> Turn:
    """A turn as `Replay.meta` wrote it. Raises what a malformed one causes."""
    num_prompt, num_tokens, missing = entry["prompt"], entry["tokens"], entry["missing"]
    texts = [entry[name] for name in ("key", "content", "rest", "owner")]
    if not (isinstance(num_prompt, int) and isinstance(num_tokens, int) and isinstance(missing, list)):
        raise TypeError("prompt and tokens must be integers, missing a list")
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("key, content, rest and owner must be texts")
    if len(missing) > _MAX_MISSING or not 0 < num_prompt <= num_tokens == min(num_tokens, len(tokens)) + len(missing):
        raise ValueError(f"{num_prompt} of {num_tokens} tokens, {len(missing)} missing, in a state of {len(tokens)}")
    ids = np.concatenate([tokens[:num_tokens], np.asarray(missing, np.int32)])  # a view would keep all of the state's
    if not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"ids from {ids.min()} to {ids.max()}, must be in [0, {vocab_size})")
    calls = tuple((str(id), str(name), str(arguments)) for id, name, arguments in entry["calls"])
    key, content, rest, owner = texts
    return Turn(key, ids, num_prompt, content, rest, calls, owner=owner)
