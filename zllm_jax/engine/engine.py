"""The engine: requests in, envelopes out."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from zllm_jax.cache import PrefixCache
from zllm_jax.config import EngineConfig, ModelConfig
from zllm_jax.dialect import (
    ChatTemplate,
    Replay,
    Spoken,
    Tokenizer,
    ToolDialects,
    ToolParser,
    tools_of,
    without_volatile,
)
from zllm_jax.engine.call import Call
from zllm_jax.engine.ending import Ending
from zllm_jax.engine.fences import FenceCompiler, Ready, thinking_of
from zllm_jax.engine.output import Output, Reading, text_stands
from zllm_jax.errors import InvalidRequest, ZllmError
from zllm_jax.fence import ForcedRuns
from zllm_jax.metrics import Metrics
from zllm_jax.runtime import Watched
from zllm_jax.scheduler import Job, Scheduler, clock
from zllm_jax.values import Delta, Envelope, Message, Request

Progress = Callable[[str, int, int], None]

_PROMPT_END = 16  # tokens, among which a prompt's last control tokens are


class Engine:
    """One model on one device, with its cache. Build it with `zllm_jax.wiring.Engine.from_pretrained`.

    metrics: what scheduler and cache report to as well; `metrics()` renders it. Turns that the cache stored with its
    snapshots are recalled here, and the cache is told what to store with the next ones. progress: shows what `close`
    does.
    """

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
        fences: FenceCompiler | None = None,
        forced: ForcedRuns | None = None,
        metrics: Metrics | None = None,
        on_close: Callable[[], None] = lambda: None,
        progress: Progress | None = None,
    ) -> None:
        self.model_name, self.model_config, self.config = model_name, model_config, config
        self.tokenizer = tokenizer
        self._template, self._scheduler, self._cache = template, scheduler, cache
        self._warm, self._on_close, self._progress = warm, on_close, progress
        self._metrics = metrics or cache.metrics
        self._fences, self._forced = fences, forced
        self._thinking = thinking_of(tokenizer)
        self._append_runs = config.forced_runs
        self._replay, self._dialects = None, None
        if tokenizer is not None and template is not None:
            self._dialects = ToolDialects(tokenizer, template)
            self._replay = Replay(tokenizer, template, vocab_size=model_config.vocab_size)
            for tokens, meta in cache.stored():
                self._replay.recall(tokens, meta)
            cache.meta_of = self._replay.meta
        self._ids = itertools.count(1)
        self._open = True

    @property
    def ready(self) -> bool:
        """Whether requests are served: not closed, and the device has not lost its state."""
        return self._open and self._scheduler.healthy

    def generate(self, request: Request) -> Envelope:
        """Run one request to its end. Raises `InvalidRequest` or `Overloaded` before anything is queued."""
        for delta in self.submit(request):
            if delta.envelope is not None:
                return delta.envelope
        raise AssertionError("a call ends with its envelope")

    def submit(self, request: Request) -> Call:
        """Queue one request; iterate over the result, or cancel it."""
        try:
            return self._submit(request)
        except ZllmError as error:
            self._metrics.refused(type(error).__name__)
            raise

    def _submit(self, request: Request) -> Call:
        started = clock()
        request = _neutral(request)
        prompt = self._prompt(request)
        one = request.sampling
        seed = one.seed if one.seed is not None else secrets.randbits(63)
        eos = () if request.ignore_eos else self._eos_ids()
        reading, fence = self._read_and_fenced(request, prompt, seed)
        job = Job(
            request_id=request.request_id or f"req-{next(self._ids)}",
            prompt=prompt,
            max_tokens=request.max_tokens,
            sampling=one,
            seed=seed % 2**64,
            stop_ids=eos,
            cache=request.cache,
            tenant=request.tenant,
            priority=request.priority,
            conversation=request.conversation,
            share_prompt=request.share_prompt,
            fence=None if fence is None else fence.followed,
            watch=self._watch(request, prompt),
            forced=self._forced if self._append_runs else None,
            single_step=bool(request.stop),
            started=started,
            deadline=None if request.timeout_s is None else started + request.timeout_s,
        )
        self._check_ids(prompt, one.logit_bias)
        if request.stop and self.tokenizer is None:
            raise InvalidRequest("stop sequences are text, but this model has no tokenizer", param="stop")
        relaxed = () if fence is None else fence.relaxed
        ending = Ending(request, prompt, eos, self.tokenizer, self._replay, relaxed=relaxed)
        output = Output(request.stop, self.tokenizer, reading)
        return Call(job.request_id, self._scheduler.submit(job), output, ending)

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
        return len(self._prompt(_neutral(request)))

    def name_calls(
        self, request_id: str, calls: Sequence[str | Message], content: str = "", *, tenant: str = ""
    ) -> None:
        """A finished request's client was given calls, and `content` beside them, in place of the envelope's text.

        calls: in OpenAI's shape, or only their ids. When they come back, however spelled, the sampled ids are replayed.
        """
        if self._replay is not None:
            self._replay.name_calls(request_id, calls, content, tenant=tenant)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for (empty without a tokenizer)."""
        return self.tokenizer.token_bytes(token) if self.tokenizer is not None else b""

    def warmup(self, progress: Progress | None = None) -> None:
        """Compile every bucket, so that no request waits for it."""
        self._scheduler.call(lambda: self._warm(progress))

    def evict(self) -> int:
        """Move all idle resident conversations to disk; returns the bytes written once they are committed."""
        return self._scheduler.call(self._cache.evict)

    def forget(self, *, keep_disk: bool = False) -> None:
        """Drop both cache tiers: the next request starts cold. keep_disk: only what is in device memory, unsaved."""
        self._scheduler.call(lambda: self._cache.forget(keep_disk=keep_disk))

    def stage_restores(self, on: bool) -> None:
        """Whether a restored group of layers computes before the others are there (`EngineConfig.staged_restore`)."""
        self._scheduler.call(lambda: setattr(self._cache, "staged", on))

    def append_runs(self, on: bool) -> None:
        """Whether later requests' forced runs are appended at once (`EngineConfig.forced_runs`)."""
        self._append_runs = on

    def drop_page_cache(self) -> bool:
        """Ask the operating system to forget its copies of the snapshots; False where it cannot."""
        return self._scheduler.call(self._cache.drop_page_cache)

    def report(self) -> Mapping[str, Any]:
        """Cache and queue in numbers, JSON-able."""
        return {"model": self.model_name, **self._scheduler.report(), **self._cache.report()}

    def metrics(self) -> bytes:
        """What happened so far, in Prometheus' text format."""
        return self._metrics.render()

    def close(self, progress: Progress | None = None) -> None:
        """Cancel what runs, save resident conversations (`EngineConfig.save_on_close`), free the device thread."""
        self._open = False
        self._scheduler.close(save=self.config.save_on_close, progress=progress or self._progress)
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
            if self._template is None or self._replay is None:
                raise InvalidRequest("this model has no chat template: send prompt= instead", param="messages")
            messages, renderer = request.messages or (), self._renderer(request)
            replayed = self._replay.prompt(
                messages, tools=request.tools, dialect=request.tool_dialect, tenant=request.tenant, renderer=renderer
            )
            if replayed is not None:
                return np.asarray(replayed, np.int32)
            text, param = (renderer or self._template).render(messages, request.tools or None), "messages"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"character {error.start} of the text is half a character or a byte that is not UTF-8: send UTF-8"
            raise InvalidRequest(what, param=param) from None
        ids = self.tokenizer.encode(text)
        if not ids:
            raise InvalidRequest("the prompt has no tokens: at least one is needed to predict the next", param="prompt")
        return np.asarray(ids, np.int32)

    def _renderer(self, request: Request) -> Spoken | None:
        """What writes a conversation with tools; None for one without, and for a template that speaks another dialect.

        Raises `InvalidRequest` where there are tools, but no dialect.
        """
        if self._dialects is None or not (request.tools or request.tool_dialect or _has_calls(request)):
            return None
        if request.tools or request.tool_dialect or self._dialects.fits:
            return self._dialects.spoken(request.tool_dialect)
        return None

    def _read_and_fenced(self, request: Request, prompt: np.ndarray, seed: int) -> tuple[Reading | None, Ready | None]:
        """How the output is read (None where all of it is text), and what it must obey."""
        spoken = self._turn(request)
        thinking: bool | None = False
        if spoken is not None and self.tokenizer is not None:
            thinking = spoken.thinking(self.tokenizer.decode(prompt[-_PROMPT_END:].tolist(), skip_special=False))
        if spoken is None or not (request.tools or thinking is not False):
            return None, self._fence(request)
        if request.fence is not None and request.fence.lark is not None:
            if thinking:
                raise InvalidRequest(
                    "the prompt opens the reasoning, which a Lark-like grammar leaves no room for: use a schema, a "
                    "regex or choices",
                    param="fence",
                )
            return None, self._fence(request)
        # Without an id of the client's, ids of calls follow from what the answer follows from.
        scope = request.request_id or f"{hashlib.sha256(prompt.tobytes()).hexdigest()}-{seed}"
        tools, text = tools_of(request.tools), text_stands(request)
        parser = ToolParser(spoken.layout, tools, scope=scope, thinking=thinking, text=text)
        return Reading(spoken.name, parser, spoken.shown), self._turn_fence(request, spoken, thinking)

    def _turn(self, request: Request) -> Spoken | None:
        """In what the output of a request must be read: there are tools, or the model may reason."""
        if request.tools:
            if self.tokenizer is None or self._dialects is None:
                raise InvalidRequest(
                    "tools need a chat template and a tokenizer, which this model lacks", param="tools"
                )
            return self._dialects.spoken(request.tool_dialect)
        if request.messages is None or self._dialects is None or not (request.tool_dialect or self._dialects.fits):
            return None
        spoken = self._dialects.spoken(request.tool_dialect)
        return spoken if spoken.thinks else None

    def _turn_fence(self, request: Request, spoken: Spoken, thinking: bool | None) -> Ready | None:
        if not request.tools and request.fence is None:
            return None
        if self._fences is not None:
            return self._fences.ready_turn(spoken, request, thinking)
        if request.fence is not None:
            return self._fence(request)
        if request.tool_choice != "auto" or not request.parallel_tool_calls:
            raise InvalidRequest(
                "this engine follows no fences (EngineConfig.fence_states is 0): it reads calls, but can neither force "
                "nor forbid them: tool_choice must be auto, with parallel_tool_calls",
                param="tool_choice",
            )
        return None

    def _fence(self, request: Request) -> Ready | None:
        if request.fence is None:
            return None
        if self._fences is None:
            raise InvalidRequest(
                "this engine follows no fences: it has no tokenizer, or EngineConfig.fence_states is 0", param="fence"
            )
        return self._fences.ready(request.fence)

    def _watch(self, request: Request, prompt: np.ndarray) -> Watched | None:
        on = self.config.loop_guard if request.loop_guard is None else request.loop_guard
        if not on:
            return None
        if self.tokenizer is None:
            raise InvalidRequest("the loop guard looks at words, but this model has no tokenizer", param="loop_guard")
        return self._thinking.after(prompt.tolist())

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


def _neutral(request: Request) -> Request:
    """Without what changes from request to request and says nothing."""
    if request.messages is None:
        return request
    messages = without_volatile(request.messages)
    return request if messages == request.messages else replace(request, messages=messages)


def _has_calls(request: Request) -> bool:
    return any(message.get("tool_calls") or message.get("role") == "tool" for message in request.messages or ())


def _cancel_submitted(submitting: asyncio.Future[Call]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
