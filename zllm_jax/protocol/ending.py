"""Which ends of a call are answers, for every protocol."""

from __future__ import annotations

from zllm_jax.values import Envelope, Status

ANSWERS = frozenset({Status.COMPLETED, Status.TRUNCATED, Status.REFUSED})


def failure_of(envelope: Envelope) -> tuple[str, str] | None:
    """What to say of an envelope that has no answer to show, and a code for it; else None."""
    if envelope.status in ANSWERS:
        return None
    why = f": {envelope.error}" if envelope.error else ""
    code = "deadline_exceeded" if envelope.telemetry.deadline_exceeded else envelope.status.value.lower()
    return f"the call ended as {envelope.status.value}{why}", code
