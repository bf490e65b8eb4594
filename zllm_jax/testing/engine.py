"""An engine that says what it is told."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from zllm_jax.errors import BudgetExceeded
from zllm_jax.metrics import Metrics
from zllm_jax.testing.models import ByteTokenizer
from zllm_jax.testing.script import Script
from zllm_jax.values import (
    Delta,
    Envelope,
    Request,
)


class ScriptedEngine:
    """An engine without a model: each call takes the next script, one token a step.

    step_s: seconds a token takes. budget_tokens: what one sequence may hold.
    `requests` and `envelopes` record, in order, what came and how it ended; a call whose iterator is closed
    early ends as CANCELED there.
    """

    def __init__(
        self, *, model_name: str = "scripted", step_s: float = 0.0, budget_tokens: int = 4096, ready: bool = True
    ) -> None:
        self.model_name = model_name
        self.step_s = step_s
        self.budget_tokens = budget_tokens
        self.ready = ready
        self.tokenizer = ByteTokenizer()
        self.requests: list[Request] = []
        self.envelopes: list[Envelope] = []
        self._scripts: deque[Script] = deque()
        self._metrics = Metrics()
        self._ended = threading.Condition()

    def say(self, text: str | bytes = "", **script: Any) -> None:
        """Queue the answer to the next request; keywords are `Script`'s."""
        raw = text.encode() if isinstance(text, str) else text
        self._scripts.append(Script(tokens=tuple(raw), **script))

    def count_tokens(self, request: Request) -> int:
        return len(self._prompt(request))

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)

    def report(self) -> Mapping[str, Any]:
        return {"model": self.model_name, "requests": len(self.requests), "ended": len(self.envelopes)}

    def metrics(self) -> bytes:
        return self._metrics.render()

    def wait_ended(self, count: int, timeout_s: float = 10.0) -> list[Envelope]:
        """The envelopes, once `count` calls have ended; for a test in another thread. Raises `TimeoutError`."""
        with self._ended:
            if not self._ended.wait_for(lambda: len(self.envelopes) >= count, timeout_s):
                raise TimeoutError(f"{len(self.envelopes)} of {count} calls ended within {timeout_s} s")
            return list(self.envelopes)

    async def stream(self, request: Request) -> AsyncGenerator[Delta, None]:
        prompt_tokens = self.count_tokens(request)
        if prompt_tokens + request.max_tokens > self.budget_tokens:
            raise BudgetExceeded(prompt_tokens, request.max_tokens, self.budget_tokens)
        if not self._scripts:
            raise RuntimeError("ScriptedEngine has nothing to say: call say() once for each request")
        self.requests.append(request)
        from zllm_jax.testing.call import ScriptedCall  # reads as the engine does, and with it comes jax

        call = ScriptedCall(request, self._scripts.popleft(), prompt_tokens)
        try:
            async with aclosing(call.run(self.step_s)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._end(call.envelope())

    def _prompt(self, request: Request) -> Sequence[int]:
        if request.tokens is not None:
            return request.tokens
        if request.prompt is not None:
            return self.tokenizer.encode(request.prompt)
        messages = request.messages or ()
        return self.tokenizer.encode("".join(f"{message['role']}: {message['content']}\n" for message in messages))

    def _end(self, envelope: Envelope) -> None:
        self._metrics.ended(envelope.status, envelope.usage, envelope.timing)
        with self._ended:
            self.envelopes.append(envelope)
            self._ended.notify_all()
