"""Sequences on a device: who runs next, who waits, who ends. It knows token ids and pages, no text and no protocol."""

from zllm_jax.scheduler.plan import Plan, chunk_size, plan
from zllm_jax.scheduler.scheduler import Scheduler
from zllm_jax.scheduler.sequence import Event, Job, Outcome, Sequence, Ticket, clock
from zllm_jax.scheduler.share import FairShare

__all__ = [
    "Event",
    "FairShare",
    "Job",
    "Outcome",
    "Plan",
    "Scheduler",
    "Sequence",
    "Ticket",
    "chunk_size",
    "clock",
    "plan",
]
