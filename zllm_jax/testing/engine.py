"""An engine that says what it is told."""

from __future__ import annotations

import asyncio
import codecs
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from zllm_jax.errors import BudgetExceeded
from zllm_jax.metrics import Metrics
from zllm_jax.testing.models import ByteTokenizer, made_up_logprob
from zllm_jax.values import (
    Delta,
    Envelope,
    Request,
    Status,
    Telemetry,
    Tier,
    Timing,
    TokenLogprob,
    Usage,
)


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the model says to one request.

    tokens: what it would generate before EOS. error: raised, if any, in place of token number `error_after`.
    status: how the call ends once everything is said (a limit or a stop sequence of the request may end it before).
    """

    tokens: tuple[int, ...]
    cached_tokens: int = 0
    status: Status = Status.COMPLETED
    error: Exception | None = None
    error_after: int = 0


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
        call = _Call(request, self._scripts.popleft(), prompt_tokens)
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


class _Call:
    """One scripted call under way. Its status is CANCELED until it has come to its end."""

    def __init__(self, request: Request, script: Script, prompt_tokens: int) -> None:
        self.request = request
        self.script = script
        self.tokens: list[int] = []
        self.text = ""
        self.status = Status.CANCELED
        self.finish = "canceled"
        self.usage = Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=script.cached_tokens,
            tier=Tier.RESIDENT if script.cached_tokens else Tier.COLD,
        )
        self.decode_s = 0.0

    async def run(self, step_s: float) -> AsyncGenerator[Delta, None]:
        planned, text, status, finish = self._plan()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        started_s = time.perf_counter()
        for token in planned:
            await asyncio.sleep(step_s)
            self.decode_s = time.perf_counter() - started_s
            self._raise_if_due()
            self.tokens.append(token)
            piece = decoder.decode(bytes([token]))[: len(text) - len(self.text)]
            self.text += piece
            yield Delta(text=piece, tokens=(token,), logprobs=self._logprobs([token]))
        self._raise_if_due()
        rest, self.text = text[len(self.text) :], text
        self.status, self.finish = status, finish
        yield Delta(text=rest, envelope=self.envelope())

    def envelope(self) -> Envelope:
        """How the call stands now."""
        return Envelope(
            request_id=self.request.request_id or "",
            status=self.status,
            tokens=tuple(self.tokens),
            text=self.text,
            usage=Usage(
                prompt_tokens=self.usage.prompt_tokens,
                cached_tokens=self.usage.cached_tokens,
                generated_tokens=len(self.tokens),
                tier=self.usage.tier,
            ),
            timing=Timing(decode_s=self.decode_s),
            telemetry=Telemetry(sampling=self.request.sampling, finish=self.finish),
            logprobs=self._logprobs(self.tokens),
            conversation=self.request.conversation,
        )

    def _plan(self) -> tuple[tuple[int, ...], str, Status, str]:
        """What will be generated: tokens, text, status, finish. The script is known, so stops are found beforehand."""
        tokens = self.script.tokens[: self.request.max_tokens]
        text = bytes(tokens).decode(errors="replace")
        ends = [(at + len(stop), at) for stop in self.request.stop if (at := text.find(stop)) >= 0]
        if ends:
            end, at = min(ends)
            return tokens[: len(text[:end].encode())], text[:at], Status.COMPLETED, "stop"
        if len(tokens) < len(self.script.tokens):
            return tokens, text, Status.TRUNCATED, "max_tokens"
        return tokens, text, self.script.status, "eos"

    def _raise_if_due(self) -> None:
        if self.script.error is not None and len(self.tokens) == self.script.error_after:
            self.status, self.finish = Status.FAULTED, "fault"
            raise self.script.error

    def _logprobs(self, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        count = self.request.sampling.logprobs
        return () if count is None else tuple(made_up_logprob(token, count) for token in tokens)
