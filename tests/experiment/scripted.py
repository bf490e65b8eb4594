"""An engine without a model whose times are written down: what the runner makes of them can be worked out by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Self

from zllm_jax.config import EngineConfig, ModelConfig
from zllm_jax.experiment import Progress
from zllm_jax.testing import ByteTokenizer, tiny_config
from zllm_jax.values import Delta, Envelope, Request, Status, Telemetry, Tier, Timing, TokenLogprob, Usage

COLD_S_PER_TOKEN = 1e-5
RESTORE_S = 1e-3
RESIDENT_S = 1e-4
STEP_S = 5e-3
BYTES_PER_TOKEN = 1000


class ScriptedTimes:
    """Remembers one conversation, says where it is, and takes a written-down time for each tier."""

    tokenizer = ByteTokenizer()

    def __init__(self, config: EngineConfig | None = None, *, skew: float = 0.0, flip: Tier | None = None) -> None:
        self.config = config or EngineConfig()
        self.skew = skew  # added to the log-probabilities of hits
        self.flip = flip  # the tier whose second output token is another
        self.held: tuple[int, ...] = ()
        self.tier = Tier.COLD
        self.closed = False
        self.drops = True
        self.appends = True

    @property
    def model_config(self) -> ModelConfig:
        return tiny_config("llama")

    def warmup(self, *, progress: Progress | None = None) -> None:
        if progress:
            progress("compile", 1, 1)

    def generate(self, request: Request) -> Envelope:
        start = time.perf_counter()
        prompt = request.tokens or ()
        hit = bool(self.held) and request.cache and prompt[: len(self.held)] == self.held
        tier = self.tier if hit else Tier.COLD
        cached = len(self.held) if hit else 0
        restore_s = RESTORE_S if tier is Tier.DISK else 0.0
        prefill_s = RESIDENT_S if hit else COLD_S_PER_TOKEN * len(prompt)
        tokens = tuple((sum(prompt) + i) % 251 for i in range(request.max_tokens))
        if hit and tier is self.flip:
            tokens = (tokens[0], 252, *tokens[2:])
        num_top = request.sampling.logprobs or 0
        top = tuple((i, -float(i + 1) + (self.skew if hit else 0.0)) for i in range(num_top))
        if request.cache:
            self.held, self.tier = (*prompt, *tokens[:-1]), Tier.RESIDENT
        time.sleep(max(0.0, restore_s + prefill_s - (time.perf_counter() - start)))
        spent = time.perf_counter() - start
        return Envelope(
            request_id="r",
            status=Status.TRUNCATED,
            tokens=tokens,
            usage=Usage(prompt_tokens=len(prompt), cached_tokens=cached, generated_tokens=len(tokens), tier=tier),
            timing=Timing(restore_s=restore_s, prefill_s=prefill_s, decode_s=spent - restore_s - prefill_s),
            telemetry=Telemetry(bytes_read=cached * BYTES_PER_TOKEN if tier is Tier.DISK else 0),
            logprobs=tuple(TokenLogprob(token=t, logprob=-1.0, top=top) for t in tokens) if num_top else (),
        )

    def submit(self, request: Request) -> Iterator[Delta]:
        envelope = self.generate(request)

        def deltas() -> Iterator[Delta]:
            for token in envelope.tokens:
                time.sleep(STEP_S)
                yield Delta(tokens=(token,))
            yield Delta(envelope=envelope)

        return deltas()

    def evict(self) -> int:
        self.tier = Tier.DISK
        return len(self.held) * BYTES_PER_TOKEN

    def forget(self) -> None:
        self.held, self.tier = (), Tier.COLD

    def append_runs(self, on: bool) -> None:
        self.appends = on

    def drop_page_cache(self) -> bool:
        return self.drops

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.closed = True
