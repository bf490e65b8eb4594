"""Chat Completions, the way back: a finished or running call to completion and chunk objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zllm_jax.protocol.openai_chat import ChatCall
from zllm_jax.values import CallDelta, Delta, Envelope, Status, TokenLogprob, ToolCall, Usage

Json = dict[str, Any]
MIN_LOGPROB = -9999.0  # what the protocol sends for a probability of zero: JSON has no -inf
_FINISH_REASON = {Status.COMPLETED: "stop", Status.TRUNCATED: "length", Status.REFUSED: "content_filter"}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One call on its way back: the fields that every object of the answer repeats.

    created: Unix seconds. token_bytes: the bytes of a token id (empty for one that stands for no text).
    """

    call: ChatCall
    completion_id: str
    created: int
    token_bytes: Callable[[int], bytes]

    def completion(self, *envelopes: Envelope) -> Json:
        """The `chat.completion` object of the choices' envelopes, for none of which there is a `failure`."""
        choices = [self._choice(index, envelope) for index, envelope in enumerate(envelopes)]
        return self._object("chat.completion", choices) | {"usage": usage_object(*(one.usage for one in envelopes))}

    def _choice(self, index: int, envelope: Envelope) -> Json:
        message: Json = {"role": "assistant", "content": envelope.text, "refusal": None}
        if envelope.reasoning:
            message["reasoning_content"] = envelope.reasoning
        if envelope.calls:
            message |= {"content": envelope.text or None, "tool_calls": [_call(one) for one in envelope.calls]}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(envelope.logprobs),
            "finish_reason": _finish_reason(envelope),
        }

    def opening(self, index: int = 0) -> Json:
        """The first chunk of a choice: who speaks."""
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def chunks(self, delta: Delta, index: int = 0) -> Iterator[Json]:
        """The chunks that one delta of a choice becomes: its reasoning, text and calls, and at the end the reason."""
        if delta.reasoning:
            yield self._chunk(index, {"reasoning_content": delta.reasoning})
        if delta.text or (delta.logprobs and self.call.request.sampling.logprobs is not None):
            yield self._chunk(index, {"content": delta.text}, logprobs=self._logprobs(delta.logprobs))
        for piece in delta.calls:
            if piece.id or piece.arguments:
                yield self._chunk(index, {"tool_calls": [_call_piece(piece)]})
        if delta.envelope is not None:
            yield self._chunk(index, {}, finish_reason=_finish_reason(delta.envelope))

    def closing(self, usages: Sequence[Usage]) -> Iterator[Json]:
        """The last chunk of a stream, if asked for: the usage of all choices."""
        if self.call.include_usage:
            yield self._object("chat.completion.chunk", []) | {"usage": usage_object(*usages)}

    def _chunk(
        self, index: int, delta: Json, *, logprobs: Json | None = None, finish_reason: str | None = None
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = self._object("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self.call.include_usage else chunk

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.call.model,
            "choices": choices,
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Json | None:
        if self.call.request.sampling.logprobs is None:
            return None
        content = [
            self._token(entry.token, entry.logprob) | {"top_logprobs": [self._token(*top) for top in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        text = self.token_bytes(token)
        # A token may end inside a character: `token` then shows U+FFFD, and `bytes` says what it is.
        return {
            "token": text.decode("utf-8", errors="replace"),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(text),
        }


def _finish_reason(envelope: Envelope) -> str:
    called = envelope.status is Status.COMPLETED and envelope.calls
    return "tool_calls" if called else _FINISH_REASON[envelope.status]


def _call(call: ToolCall) -> Json:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _call_piece(piece: CallDelta) -> Json:
    """Who is called comes with the first piece only."""
    who = {"id": piece.id, "type": "function"} if piece.id else {}
    name = {"name": piece.name} if piece.id else {}
    return {"index": piece.index, **who, "function": {**name, "arguments": piece.arguments}}


def usage_object(first: Usage, *others: Usage) -> Json:
    """Token counts of one or more answers to a prompt, which is counted once: as the first found it.

    `prompt_tokens` includes the cached ones, as this protocol defines it.
    """
    generated = sum(usage.generated_tokens for usage in (first, *others))
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": first.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
    }


def model_object(name: str, *, created: int) -> Json:
    """One entry of the model list."""
    return {"id": name, "object": "model", "created": created, "owned_by": "zllm"}


def model_list(names: Sequence[str], *, created: int) -> Json:
    return {"object": "list", "data": [model_object(name, created=created) for name in names]}
