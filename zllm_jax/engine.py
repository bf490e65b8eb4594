"""The engine: requests in, envelopes out. It joins text (dialect) with token ids (scheduler) and owns neither.

Text goes out only when it can no longer be part of a stop sequence or of an unfinished character.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from zllm_jax.cache import PrefixCache
from zllm_jax.config import EngineConfig, ModelConfig
from zllm_jax.dialect import ChatTemplate, Detokenizer, Tokenizer
from zllm_jax.errors import InvalidRequest
from zllm_jax.runtime import Drawn
from zllm_jax.scheduler import Event, Job, Outcome, Scheduler, Ticket, clock
from zllm_jax.values import Delta, Envelope, Request, Status, TokenLogprob

Progress = Callable[[str, int, int], None]


class Call:
    """One running request: iterate over its `Delta`s; the last one carries the envelope. `cancel` from any thread."""

    def __init__(self, request_id: str, request: Request, ticket: Ticket, tokenizer: Tokenizer | None) -> None:
        self.request_id = request_id
        self._ticket = ticket
        self._output = _Output(request, tokenizer)

    def cancel(self) -> None:
        self._ticket.cancel()

    def __iter__(self) -> Iterator[Delta]:
        while True:
            for delta in self._deltas(self._ticket.wait()):
                yield delta
                if delta.envelope is not None:
                    return

    async def stream(self) -> AsyncGenerator[Delta, None]:
        """The same deltas without blocking the event loop. Closing the generator cancels the request."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            loop.call_soon_threadsafe(arrived.set)

        self._ticket.on_event(notify)
        done = False
        try:
            while not done:
                await arrived.wait()
                arrived.clear()
                for delta in self._deltas(self._ticket.take()):
                    done = delta.envelope is not None
                    yield delta
        finally:
            self._ticket.on_event(_nothing)
            if not done:
                self.cancel()

    def _deltas(self, events: list[Event]) -> Iterator[Delta]:
        for event in events:
            if isinstance(event, Outcome):
                yield from self._output.close(self.request_id, event)
            elif (delta := self._output.feed(event)) is not None:
                if self._output.stopped:
                    self._ticket.stop_after(len(self._output.tokens))
                yield delta


class _Output:
    """What a request has put out so far: ids, text, and how much of the text may already be shown."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._stop = request.stop
        self._text = Detokenizer(tokenizer, continuing=True) if tokenizer is not None else None
        self.tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._shown, self._held = "", ""
        self.stop_text: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_text is not None

    def feed(self, drawn: list[Drawn]) -> Delta | None:
        """The visible part of new tokens; tokens after a stop sequence are dropped."""
        fresh: list[Drawn] = []
        for one in drawn:
            if self.stopped:
                break
            fresh.append(one)
            if self._text is not None:
                self._held += self._text.feed([one.token])
                self._look_for_stop()
        if not fresh:
            return None
        return self._delta(fresh, self._visible())

    def close(self, request_id: str, outcome: Outcome) -> Iterator[Delta]:
        if self._text is not None and not self.stopped:
            self._held += self._text.close()
        rest, self._held = ("" if self.stopped else self._held), ""
        if rest:
            self._shown += rest
            yield Delta(text=rest)
        yield Delta(envelope=self._envelope(request_id, outcome))

    def _envelope(self, request_id: str, outcome: Outcome) -> Envelope:
        stopped = self.stopped and outcome.status in (Status.COMPLETED, Status.TRUNCATED)
        telemetry = outcome.telemetry
        if stopped:  # the sequence may have ended in another way before the scheduler heard of the stop
            telemetry = replace(telemetry, finish="stop", stop_text=self.stop_text)
        timing = outcome.timing
        return Envelope(
            request_id=request_id,
            status=Status.COMPLETED if stopped else outcome.status,
            tokens=tuple(self.tokens),
            text=self._shown,
            usage=replace(outcome.usage, generated_tokens=len(self.tokens)),
            timing=replace(timing, post_s=timing.post_s + clock() - outcome.ended),
            telemetry=telemetry,
            logprobs=tuple(self._logprobs),
            conversation=outcome.conversation,
            error=outcome.error,
        )

    def _delta(self, drawn: list[Drawn], text: str) -> Delta:
        logprobs = tuple(one.logprob for one in drawn if one.logprob is not None)
        self.tokens += [one.token for one in drawn]
        self._logprobs += logprobs
        return Delta(text=text, tokens=tuple(one.token for one in drawn), logprobs=logprobs)

    def _look_for_stop(self) -> None:
        found = [(at, text) for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            at, self.stop_text = min(found)
            self._held = self._held[:at]

    def _visible(self) -> str:
        """Everything held but the longest suffix that may begin a stop sequence."""
        keep = 0
        if not self.stopped:
            keep = max((_overlap(self._held, text) for text in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self._shown += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Engine:
    """One model on one device, with its cache. Build it with `zllm_jax.wiring.Engine.from_pretrained`."""

    def __init__(
        self,
        *,
        model_name: str,
        model_config: ModelConfig,
        config: EngineConfig,
        scheduler: Scheduler,
        cache: PrefixCache,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        warm: Callable[[Progress | None], None],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.model_name, self.model_config, self.config = model_name, model_config, config
        self.tokenizer = tokenizer
        self._template, self._scheduler, self._cache = template, scheduler, cache
        self._warm, self._on_close = warm, on_close
        self._ids = itertools.count(1)
        self.ready = True

    def generate(self, request: Request) -> Envelope:
        """Run one request to its end. Raises `InvalidRequest` or `Overloaded` before anything is queued."""
        for delta in self.submit(request):
            if delta.envelope is not None:
                return delta.envelope
        raise AssertionError("a call ends with its envelope")

    def submit(self, request: Request) -> Call:
        """Queue one request; iterate over the result, or cancel it."""
        started = clock()
        prompt = self._prompt(request)
        one = request.sampling
        seed = one.seed if one.seed is not None else secrets.randbits(63)
        eos = () if request.ignore_eos else self._eos_ids()
        job = Job(
            request_id=request.request_id or f"req-{next(self._ids)}",
            prompt=prompt,
            max_tokens=request.max_tokens,
            sampling=one,
            seed=seed % 2**64,
            stop_ids=eos,
            cache=request.cache,
            single_step=bool(request.stop),
            started=started,
            deadline=None if request.timeout_s is None else started + request.timeout_s,
        )
        self._check_ids(prompt, one.logit_bias)
        if request.stop and self.tokenizer is None:
            raise InvalidRequest("stop sequences are text, but this model has no tokenizer", param="stop")
        return Call(job.request_id, request, self._scheduler.submit(job), self.tokenizer)

    async def stream(self, request: Request) -> AsyncGenerator[Delta, None]:
        """`submit` for asyncio: the prompt is prepared in a worker thread; closing the generator cancels."""
        submitting = asyncio.ensure_future(asyncio.to_thread(self.submit, request))
        try:
            call = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(_cancel_submitted)  # the thread goes on, and nobody will listen
            raise
        async with aclosing(call.stream()) as deltas:
            async for delta in deltas:
                yield delta

    def count_tokens(self, request: Request) -> int:
        """How many prompt tokens the model would see: exact, by the same template and tokenizer."""
        return len(self._prompt(request))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for (empty without a tokenizer)."""
        return self.tokenizer.token_bytes(token) if self.tokenizer is not None else b""

    def warmup(self, progress: Progress | None = None) -> None:
        """Compile every bucket, so that no request waits for it."""
        self._scheduler.call(lambda: self._warm(progress))

    def evict(self) -> int:
        """Move all idle resident conversations to disk; returns the bytes written once they are committed."""
        return self._scheduler.call(self._cache.evict)

    def forget(self) -> None:
        """Drop both cache tiers: the next request starts cold."""
        self._scheduler.call(self._cache.forget)

    def drop_page_cache(self) -> bool:
        """Ask the operating system to forget its copies of the snapshots; False where it cannot."""
        return self._scheduler.call(self._cache.drop_page_cache)

    def report(self) -> Mapping[str, Any]:
        """Cache and queue in numbers, JSON-able."""
        return {"model": self.model_name, **self._scheduler.report(), **self._cache.report()}

    def close(self) -> None:
        """Cancel what runs and free the device thread."""
        self.ready = False
        self._scheduler.close()
        self._on_close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prompt(self, request: Request) -> np.ndarray:
        """Token ids i32[S] of a request."""
        if request.tokens is not None:
            return np.asarray(request.tokens, np.int32)
        if self.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer: send token ids", param="prompt")
        if request.prompt is not None:
            text, param = request.prompt, "prompt"
        else:
            if self._template is None:
                raise InvalidRequest("this model has no chat template: send prompt= instead", param="messages")
            text, param = self._template.render(request.messages or (), request.tools or None), "messages"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"character {error.start} of the text is half a character or a byte that is not UTF-8: send UTF-8"
            raise InvalidRequest(what, param=param) from None
        ids = self.tokenizer.encode(text)
        if not ids:
            raise InvalidRequest("the prompt has no tokens: at least one is needed to predict the next", param="prompt")
        return np.asarray(ids, np.int32)

    def _eos_ids(self) -> tuple[int, ...]:
        return self.tokenizer.eos_ids if self.tokenizer is not None else self.model_config.eos_ids

    def _check_ids(self, prompt: np.ndarray, biases: tuple[tuple[int, float], ...]) -> None:
        vocab = self.model_config.vocab_size
        if int(prompt.max()) >= vocab:
            raise InvalidRequest(f"token id {int(prompt.max())} is outside the vocabulary of {vocab}", param="tokens")
        for token, _ in biases:
            if token >= vocab:
                raise InvalidRequest(
                    f"logit_bias token {token} is outside the vocabulary of {vocab}", param="logit_bias"
                )


def _cancel_submitted(submitting: asyncio.Future[Call]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()


def _nothing() -> None:
    return None
