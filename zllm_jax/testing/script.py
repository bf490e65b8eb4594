"""What a scripted model says."""

from __future__ import annotations

from dataclasses import dataclass

from zllm_jax.values import Status


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the model says to one request.

    tokens: what it would generate before EOS. error: raised, if any, in place of token number `error_after`.
    status: how the call ends once everything is said (a limit or a stop sequence of the request may end it before).
    thinking: the turn begins inside reasoning, which `</think>` ends. Calls are read as the dialect "chatml" has them,
    where the request has tools.
    """

    tokens: tuple[int, ...]
    cached_tokens: int = 0
    status: Status = Status.COMPLETED
    error: Exception | None = None
    error_after: int = 0
    thinking: bool = False
