"""What the server asks of an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from zllm_jax.values import Delta, Request


class Engine(Protocol):
    """The engine as the server sees it. All methods are called on the event loop and must not block it."""

    @property
    def model_name(self) -> str: ...

    @property
    def ready(self) -> bool:
        """Whether calls are served now: weights loaded, not draining."""
        ...

    def stream(self, request: Request) -> AsyncGenerator[Delta, None]:
        """The answer piece by piece; the last delta carries the envelope.

        Raises before the first delta what refuses the request (`InvalidRequest`, `Overloaded`, ...).
        Closing the iterator, or cancelling the task that waits for it, cancels the call.
        """
        ...

    def count_tokens(self, request: Request) -> int:
        """The prompt's tokens, exactly as the model would see them."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token id; b"" for one that stands for no text."""
        ...

    def report(self) -> Mapping[str, Any]:
        """Numbers of cache and queue, ready for JSON."""
        ...

    def metrics(self) -> bytes:
        """What happened so far, in Prometheus' text format. May be called in any thread."""
        ...
