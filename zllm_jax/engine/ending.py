"""What is done once at the end of each request: near misses explained, the turn remembered, one line in the log."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np

from zllm_jax.dialect import Replay, Tokenizer, call_message, explain
from zllm_jax.values import Envelope, Request, Status

log = logging.getLogger(__name__)


class Ending:
    """Sees a request's envelope first, and returns it with what there is to add.

    prompt: i32[S] as it was computed. eos_ids: what may end the output without being part of the turn. relaxed: what
    the request's fence leaves out.
    """

    def __init__(
        self,
        request: Request,
        prompt: np.ndarray,
        eos_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
        replay: Replay | None,
        *,
        relaxed: tuple[str, ...] = (),
    ) -> None:
        self._request, self._prompt, self._eos_ids = request, prompt, eos_ids
        self._tokenizer, self._replay, self._relaxed = tokenizer, replay, relaxed

    def __call__(self, envelope: Envelope) -> Envelope:
        if self._relaxed:
            envelope = replace(envelope, telemetry=replace(envelope.telemetry, fence_relaxed=self._relaxed))
        try:
            envelope = self._explained(envelope)
            self._remember(envelope)
        except Exception:  # the answer is there: what comes after it must not take it away
            log.exception("the end of a request could not be evaluated", extra={"request_id": envelope.request_id})
        log_end(envelope)
        return envelope

    def _explained(self, envelope: Envelope) -> Envelope:
        miss = envelope.telemetry.near_miss
        if miss is None or self._tokenizer is None:
            return envelope
        one = self._request
        text = explain(miss, self._prompt, self._tokenizer, one.messages or (), one.tools)
        log.info("near miss: %s", text, extra={"request_id": envelope.request_id})
        telemetry = replace(envelope.telemetry, near_miss=replace(miss, explanation=text))
        return replace(envelope, telemetry=telemetry)

    def _remember(self, envelope: Envelope) -> None:
        one = self._request
        if one.messages is None or self._replay is None:
            return
        if envelope.status not in (Status.COMPLETED, Status.TRUNCATED):
            return
        stopped = envelope.telemetry.finish == "stop"
        if stopped and (envelope.calls or envelope.reasoning):
            return  # where the text was cut cannot be told from the ids: what comes back is encoded
        sampled = envelope.tokens
        if sampled and sampled[-1] in self._eos_ids:
            sampled = sampled[:-1]
        self._replay.remember(
            envelope.request_id,
            one.messages,
            self._prompt,
            sampled,
            envelope.text,
            calls=[call_message(call) for call in envelope.calls],
            tools=one.tools,
            dialect=one.tool_dialect,
            tenant=one.tenant,
            stopped=stopped,
        )


def log_end(envelope: Envelope) -> None:
    """One line without text, whose figures are attributes of the record too; a fault is a warning."""
    level = logging.WARNING if envelope.status is Status.FAULTED else logging.INFO
    if log.isEnabledFor(level):
        fields = end_fields(envelope)
        said = " ".join(f"{name}={_short(value)}" for name, value in fields.items() if value is not None)
        log.log(level, "request ended: %s", said, extra=fields)


def end_fields(envelope: Envelope) -> dict[str, Any]:
    """What is known of a request at its end. itl_s: the mean time between two tokens, None below two of them."""
    usage, timing, telemetry = envelope.usage, envelope.timing, envelope.telemetry
    later = usage.generated_tokens - 1
    return {
        "request_id": envelope.request_id,
        "status": envelope.status.value,
        "finish": telemetry.finish,
        "tier": usage.tier.value,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "generated_tokens": usage.generated_tokens,
        "ttft_s": timing.ttft_s if later >= 0 else None,
        "itl_s": timing.decode_s / later if later > 0 else None,
        "total_s": timing.total_s,
        "queue_s": timing.queue_s,
        "restore_s": timing.restore_s,
        "predicted_restore_s": telemetry.predicted_restore_s,
        "bytes_read": telemetry.bytes_read,
        "conversation": envelope.conversation,
        "error": envelope.error,
    }


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return repr(value) if isinstance(value, str) and (not value or " " in value) else str(value)
