"""One call of a `ScriptedEngine`: its script, read and cut as an engine reads and cuts what a model generates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

from zllm_jax.dialect import DIALECTS, Tokenizer, ToolParser, tools_of
from zllm_jax.engine.output import Output, Reading, text_stands
from zllm_jax.runtime import Drawn
from zllm_jax.scheduler import Outcome, clock
from zllm_jax.testing.models import ByteTokenizer, made_up_logprob
from zllm_jax.testing.script import Script
from zllm_jax.values import Delta, Envelope, Request, Status, Telemetry, Tier, Timing, TokenLogprob, Usage


class ScriptedCall:
    """One scripted call under way. Its status is CANCELED until it has come to its end."""

    def __init__(self, request: Request, script: Script, prompt_tokens: int) -> None:
        self.request, self.script = request, script
        self.status, self.finish = Status.CANCELED, "canceled"
        self.usage = Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=script.cached_tokens,
            tier=Tier.RESIDENT if script.cached_tokens else Tier.COLD,
        )
        self.decode_s = 0.0
        self.output = Output(request.stop, cast(Tokenizer, ByteTokenizer()), self._reading())
        self._ended: Envelope | None = None

    def _reading(self) -> Reading | None:
        if not (self.request.tools or self.script.thinking):
            return None
        layout = DIALECTS["chatml"]().layout
        scope = self.request.request_id or ""
        tools, text = tools_of(self.request.tools), text_stands(self.request)
        parser = ToolParser(layout, tools, scope=scope, thinking=self.script.thinking, text=text)
        return Reading("chatml", parser)

    async def run(self, step_s: float) -> AsyncGenerator[Delta, None]:
        started_s = clock()
        status, finish = self.script.status, "eos"
        for number, token in enumerate(self.script.tokens):
            if number == self.request.max_tokens:
                status, finish = Status.TRUNCATED, "max_tokens"
                break
            await asyncio.sleep(step_s)
            self.decode_s = clock() - started_s
            self._raise_if_due()
            for delta in self.output.feed([Drawn(token, self._logprob(token))]):
                yield delta
            if self.output.stopped:
                break
        self._raise_if_due()
        rest = self.output.close()
        self.status, self.finish = status, finish
        for delta in rest:
            yield delta
        self._ended = self.envelope()
        yield Delta(envelope=self._ended)

    def envelope(self) -> Envelope:
        """How the call ended, or stands now."""
        if self._ended is not None:
            return self._ended
        outcome = Outcome(
            status=self.status,
            usage=self.usage,
            timing=Timing(decode_s=self.decode_s),
            telemetry=Telemetry(sampling=self.request.sampling, finish=self.finish),
            conversation=self.request.conversation,
            ended=clock(),
        )
        return self.output.envelope(self.request.request_id or "", outcome)

    def _raise_if_due(self) -> None:
        if self.script.error is not None and len(self.output.tokens) == self.script.error_after:
            self.status, self.finish = Status.FAULTED, "fault"
            raise self.script.error

    def _logprob(self, token: int) -> TokenLogprob | None:
        count = self.request.sampling.logprobs
        return None if count is None else made_up_logprob(token, count)
