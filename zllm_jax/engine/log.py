"""What the log says of a request: one line at its end, without its text."""

from __future__ import annotations

import logging
from typing import Any

from zllm_jax.values import Envelope, Status

log = logging.getLogger(__name__)


def log_end(envelope: Envelope) -> Envelope:
    """One line, whose figures are attributes of the record too; a fault is a warning. Returns the envelope."""
    level = logging.WARNING if envelope.status is Status.FAULTED else logging.INFO
    if log.isEnabledFor(level):
        fields = end_fields(envelope)
        said = " ".join(f"{name}={_short(value)}" for name, value in fields.items() if value is not None)
        log.log(level, "request ended: %s", said, extra=fields)
    return envelope


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
