"""What every protocol makes of a request body."""

from __future__ import annotations

from dataclasses import dataclass

from zllm_jax.values import Request


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request body, understood.

    limited: the client itself set how many tokens may be generated, and is refused where that does not fit; otherwise
    the call gets what fits.
    """

    model: str
    request: Request
    stream: bool = False
    limited: bool = False
