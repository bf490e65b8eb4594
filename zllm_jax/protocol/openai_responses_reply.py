"""Responses: what an engine's deltas become. One state machine writes the events, which add up to the response."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zllm_jax.protocol.ending import failure_of
from zllm_jax.protocol.openai_logprobs import logprob_object
from zllm_jax.protocol.openai_responses import ResponsesCall
from zllm_jax.protocol.openai_responses_items import listed
from zllm_jax.protocol.reading import Json
from zllm_jax.values import CallDelta, Delta, Envelope, Status, TokenLogprob, Usage

_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": None,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


class Reply:
    """One response on its way out. created: Unix seconds. token_bytes: the bytes of a token id. new_id: for items.

    `response` is the object as it stands; each event carries the next `sequence_number`.
    """

    def __init__(
        self,
        call: ResponsesCall,
        response_id: str,
        *,
        created: int,
        token_bytes: Callable[[int], bytes],
        new_id: Callable[[], str],
    ) -> None:
        self._call, self._token_bytes, self._new_id = call, token_bytes, new_id
        self._sent = 0
        self._open: _Item | None = None
        self._pending: list[TokenLogprob] = []
        self._reasoning_tokens = 0
        self.response: Json = {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": call.model,
            "output": [],
            "usage": None,
            "store": call.store,
            **{name: call.given.get(name, neutral) for name, neutral in _ECHOED.items()},
        }

    def opening(self) -> list[Json]:
        """The first events of a stream."""
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def events(self, delta: Delta) -> Iterator[Json]:
        """The events of one delta; of the last one, too, those that close what is open and the response."""
        if delta.reasoning:
            self._reasoning_tokens += len(delta.tokens)
            yield from self._reach("reasoning")
            yield from self._grow("response.reasoning_text.delta", delta.reasoning, part=0)
        if self._call.logprobs:
            self._pending += delta.logprobs
        if delta.text or (self._pending and self._is_open("message")):
            yield from self._reach("message")
            logprobs, self._pending = [logprob_object(one, self._token_bytes) for one in self._pending], []
            assert self._open is not None
            self._open.logprobs += logprobs
            yield from self._grow("response.output_text.delta", delta.text, part=0, logprobs=logprobs)
        for piece in delta.calls:
            yield from self._call_events(piece)
        if delta.envelope is not None:
            yield from self._end(delta.envelope)

    def failed(self, error: Json) -> Iterator[Json]:
        """The events that end a response which broke off. error: the protocol's error object."""
        yield from self._close("incomplete")
        said = error["error"]
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": said["message"]}}
        yield self._whole("response.failed")

    def cancelled(self) -> Iterator[Json]:
        """The events that end a response which its client cancelled."""
        yield from self._close("incomplete")
        self.response["status"] = "cancelled"
        yield self._whole("response.incomplete")

    def _end(self, envelope: Envelope) -> Iterator[Json]:
        usage = usage_object(envelope.usage, self._reasoning_tokens)
        if (failed := failure_of(envelope)) is not None:
            self.response["usage"] = usage
            yield from self.failed({"error": {"message": failed[0]}})
            return
        whole = envelope.status is Status.COMPLETED
        if whole and not self.response["output"] and not self._call.request.tools:
            yield from self._reach("message")  # an answer without a word is an answer
        yield from self._close("completed" if whole else "incomplete")
        reason = "max_output_tokens" if envelope.status is Status.TRUNCATED else "content_filter"
        self.response |= {
            "status": "completed" if whole else "incomplete",
            "incomplete_details": None if whole else {"reason": reason},
            "usage": usage,
        }
        yield self._whole(f"response.{self.response['status']}")

    # -- items -----------------------------------------------------------------------------------------------------

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open.kind == kind

    def _reach(self, kind: str) -> Iterator[Json]:
        if self._is_open(kind):
            return
        yield from self._close("completed")
        if kind == "message":
            yield from self._begin(kind, {"id": f"msg_{self._new_id()}", "role": "assistant", "content": []})
        else:
            yield from self._begin(kind, {"id": f"rs_{self._new_id()}", "summary": [], "content": []})
        yield self._event("response.content_part.added", content_index=0, part=self._part(""))

    def _begin(self, kind: str, item: Json) -> Iterator[Json]:
        self._open = _Item(kind, {"type": kind, "status": "in_progress", **item}, len(self.response["output"]))
        self.response["output"].append(self._open.wire)
        yield self._event("response.output_item.added", item=dict(self._open.wire), named=False)

    def _call_events(self, piece: CallDelta) -> Iterator[Json]:
        if piece.id:
            yield from self._close("completed")
            space, name = self._call.offer.spaces.get(piece.name, ("", piece.name))
            who = {"id": f"fc_{self._new_id()}", "call_id": piece.id, "name": name, "arguments": ""}
            yield from self._begin("function_call", who | ({"namespace": space} if space else {}))
        if not self._is_open("function_call"):
            return
        if piece.arguments:
            yield from self._grow("response.function_call_arguments.delta", piece.arguments)
        if piece.done or piece.malformed:
            yield from self._close("completed" if piece.done else "incomplete")

    def _grow(self, kind: str, text: str, *, part: int | None = None, **more: Any) -> Iterator[Json]:
        assert self._open is not None
        self._open.text += text
        where: Json = {} if part is None else {"content_index": part}
        yield self._event(kind, delta=text, **where, **more)

    def _close(self, status: str) -> Iterator[Json]:
        """End the open item. One that was cut has no `done` of its own: a client must not act on it."""
        one = self._open
        if one is None:
            return
        if one.kind == "function_call":
            if status != "completed":
                one.wire["arguments"] = one.text
            else:
                one.wire["arguments"] = one.text or "{}"
                done = {"arguments": one.wire["arguments"], "name": one.wire["name"]}
                yield self._event("response.function_call_arguments.done", **done)
        else:
            part = self._part(one.text)
            logprobs: Json = {} if one.kind == "reasoning" else {"logprobs": one.logprobs}
            name = "reasoning_text" if one.kind == "reasoning" else "output_text"
            yield self._event(f"response.{name}.done", content_index=0, text=one.text, **logprobs)
            yield self._event("response.content_part.done", content_index=0, part=part)
            one.wire["content"] = [part]
        one.wire["status"] = status
        yield self._event("response.output_item.done", item=dict(one.wire), named=False)
        self._open = None

    def _part(self, text: str) -> Json:
        if self._is_open("reasoning"):
            return {"type": "reasoning_text", "text": text}
        part: Json = {"type": "output_text", "text": text, "annotations": []}
        if self._call.logprobs and self._open is not None:
            part["logprobs"] = list(self._open.logprobs)
        return part

    def _event(self, kind: str, *, named: bool = True, **members: Any) -> Json:
        assert self._open is not None
        who = {"item_id": self._open.wire["id"]} if named else {}
        return self._numbered(kind, output_index=self._open.index, **who, **members)

    def _whole(self, kind: str) -> Json:
        return self._numbered(kind, response=json.loads(json.dumps(self.response)))

    def _numbered(self, kind: str, **members: Any) -> Json:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **members}


class _Item:
    """The output item that is being written. wire: as it stands in the response, where its text comes at its end."""

    def __init__(self, kind: str, wire: Json, index: int) -> None:
        self.kind, self.wire, self.index = kind, wire, index
        self.text = ""
        self.logprobs: list[Json] = []


def usage_object(usage: Usage, reasoning_tokens: int) -> Json:
    """Token counts; `input_tokens` includes the cached ones, as this protocol defines it.

    reasoning_tokens: to the tokens that one device call drew together.
    """
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.prefilled_tokens,
        },
        "output_tokens": usage.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
    }


def item_list(items: Sequence[Json], *, has_more: bool) -> Json:
    """Some of the items of a response."""
    return {
        "object": "list",
        "data": [listed(one) for one in items],
        "first_id": items[0]["id"] if items else "",
        "last_id": items[-1]["id"] if items else "",
        "has_more": has_more,
    }
