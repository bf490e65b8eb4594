"""Messages, the way back: a running call to the events of a stream, and those to the message that they add up to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from zllm_jax.errors import ZllmError
from zllm_jax.protocol.anthropic_messages import MessagesCall
from zllm_jax.protocol.partial_json import certain_part
from zllm_jax.protocol.reading import Json
from zllm_jax.values import CallDelta, Delta, Envelope, Status, Usage

# Clients want a thinking block signed, and send it back so. Nobody checks it here: what was generated is remembered.
SIGNATURE = "unsigned"
PING: Json = {"type": "ping"}
_PIECES = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


class Reply:
    """One call on its way back, a state machine: blocks open and close as what is generated changes its kind.

    A call that the limit cuts was begun as it was generated; its block ends there, and the stop reason says that it is
    no call: only under "tool_use" is every block of a call whole.
    """

    def __init__(self, call: MessagesCall, message_id: str) -> None:
        self.call, self.message_id = call, message_id
        self._index, self._open = -1, ""

    def opening(self) -> Json:
        """The first event of a stream. What the prompt took is known at the end; counts until then are 0."""
        message: Json = {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.call.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(), 0),
        }
        return {"type": "message_start", "message": message}

    def events(self, delta: Delta) -> Iterator[Json]:
        """The events that one delta becomes; those of the last one, whose envelope must be an answer, end the stream.

        Raises `ZllmError` where a call that was begun turned out to be none.
        """
        if not self.call.prewarm:
            if delta.reasoning and self.call.thinking != "hidden":
                yield from self._thought(delta.reasoning)
            if delta.text:
                yield from self._begin("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": delta.text})
            for piece in delta.calls:
                yield from self._called(piece)
        if delta.envelope is not None:
            yield from self._end(delta.envelope)

    def _thought(self, text: str) -> Iterator[Json]:
        yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        if self.call.thinking == "shown":
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _called(self, piece: CallDelta) -> Iterator[Json]:
        kind = f"tool_use {piece.index}"
        if piece.id:
            yield from self._begin(kind, {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
        if piece.malformed and self._open == kind:
            raise ZllmError(f"the model began a call that is none: {piece.malformed}")
        if piece.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
        if piece.done:
            yield from self._close()

    def _begin(self, kind: str, block: Json) -> Iterator[Json]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            self._index += 1
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = ""

    def _end(self, envelope: Envelope) -> Iterator[Json]:
        yield from self._close()
        reason = "max_tokens" if self.call.prewarm else self._stop_reason(envelope)
        sequence = envelope.telemetry.stop_text if reason == "stop_sequence" else None
        usage = envelope.usage
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": _usage(usage, 0 if self.call.prewarm else usage.generated_tokens),
        }
        yield {"type": "message_stop"}

    def _stop_reason(self, envelope: Envelope) -> str:
        if envelope.status is Status.TRUNCATED:
            fits = envelope.usage.generated_tokens >= self.call.request.max_tokens
            return "max_tokens" if fits else "model_context_window_exceeded"
        if envelope.status is Status.REFUSED:
            return "refusal"
        if envelope.calls:
            return "tool_use"
        return "stop_sequence" if envelope.telemetry.finish == "stop" else "end_turn"


def message(events: Iterable[Json]) -> Json:
    """What the events of a stream add up to: the answer that is not streamed."""
    made: Json = {}
    texts = list[list[str]]()
    for event in events:
        if event["type"] == "message_start":
            made = {**event["message"], "content": []}
        elif event["type"] == "content_block_start":
            made["content"].append(dict(event["content_block"]))
            texts.append([])
        elif event["type"] == "content_block_delta":
            block, delta = made["content"][event["index"]], event["delta"]
            if delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                texts[-1].append(delta[_PIECES[delta["type"]]])
        elif event["type"] == "content_block_stop":
            _fill(made["content"][-1], "".join(texts[-1]))
        elif event["type"] == "message_delta":
            made |= {**event["delta"], "usage": event["usage"]}
    return made


def _fill(block: Json, text: str) -> None:
    if block["type"] != "tool_use":
        block[block["type"]] = text
        return
    try:
        block["input"] = json.loads(text or "{}")
    except ValueError:  # cut
        block["input"] = certain_part(text)


def _usage(usage: Usage, generated_tokens: int) -> Json:
    """Token counts, of which the three of the prompt add up to it.

    Whatever is computed is kept, unasked and free, so that there are no writes apart from the input.
    """
    return {
        "input_tokens": usage.prefilled_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": generated_tokens,
    }
