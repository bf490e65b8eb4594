"""One decode step in three ways: free, fenced on the device, masked by the host; and the parts of the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import llguidance
import numpy as np

from zllm_jax.checkpoint import open_checkpoint, resolve
from zllm_jax.config import EngineConfig, ModelConfig, zllm_home
from zllm_jax.dialect import load_tokenizer
from zllm_jax.errors import ConfigError
from zllm_jax.experiment.config import ExperimentConfig
from zllm_jax.experiment.kind import Progress
from zllm_jax.experiment.measure import read_rate
from zllm_jax.fence import (
    FencePool,
    Place,
    Position,
    TokenTables,
    Vocabulary,
    compile_tokens,
    fence_advance,
    fence_mask,
    pack_bits,
    pack_positions,
    unpack_bits,
)
from zllm_jax.fence.host import HostMatcher, HostVocabulary
from zllm_jax.fence.schema import json_schema
from zllm_jax.runtime import (
    Batch,
    DecodeInputs,
    Fenced,
    Row,
    Runner,
    State,
    StateShape,
    architecture,
    check_shapes,
    init_state,
    keep_compilations,
    load_params,
    pages_for,
    sample,
)
from zllm_jax.runtime.programs import decode_inputs
from zllm_jax.runtime.sampling import unpack_mask
from zllm_jax.runtime.steps import forward, logits
from zllm_jax.values import Sampling

SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "age": {"type": "integer"},
    },
    "required": ["name"],
    "additionalProperties": False,
}
PLACES = {  # the text so far
    "text": b'{"name": "Ada Love',
    "value": b'{"name": "x"',
    "name": b'{"name": "x", "',
}
_SAME_SPACES = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
POSITION = 40  # of the token that is fed
MAX_SEQ_TOKENS = 1024


@partial(jax.jit, static_argnames="cfg", donate_argnames="state")
def masked_step(
    params: Mapping[str, Any], state: State, inputs: DecodeInputs, mask: jax.Array, *, cfg: ModelConfig
) -> tuple[State, jax.Array]:
    """One step whose mask, u32[B, W], comes from the host. The ids that it draws, i32[B]."""
    live = inputs.budget > 0
    batch = Batch(inputs.tokens[:, None], inputs.positions[:, None], live[:, None], inputs.table, inputs.rings)
    hidden, layers = forward(params, state.layers, batch, cfg)
    scores = logits(params, hidden[:, 0])
    drawn = sample(scores, inputs.sampling, state.history, inputs.slots, inputs.positions + 1, mask)
    return State(layers, state.history), drawn.ids


@jax.jit
def _forbid(scores: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(unpack_mask(mask, scores.shape[1]), scores, -jnp.inf)


_device_mask, _device_advance = jax.jit(fence_mask), jax.jit(fence_advance)
_unchanged = jax.jit(lambda x: x | x)


@dataclass(frozen=True)
class Timed:
    """One call: seconds a step, and what each row drew."""

    step_s: float
    tokens: tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Bench:
    """A model's parameters, and the same rows to decode in each way. `open_bench` makes one."""

    params: Mapping[str, Any]
    cfg: ModelConfig
    vocabulary: Vocabulary
    engine: EngineConfig
    tables: TokenTables = field(init=False)

    def __post_init__(self) -> None:
        if missing := set(b"".join(PLACES.values())) - self.vocabulary.single_bytes:
            raise ConfigError(f"fence_overhead needs tokens of one byte each, but {bytes(sorted(missing))!r} are none")
        config, cfg = self.engine, self.cfg
        longest = pages_for(min(config.max_seq_tokens or MAX_SEQ_TOKENS, cfg.max_context_tokens), config.page_tokens)
        rows = max(config.decode_buckets)
        self._shape = StateShape(
            num_pages=rows * longest,
            page_tokens=config.page_tokens,
            num_rings=rows,
            num_slots=rows,
            max_pages=longest,
        )
        state_dtype = config.state_dtype or config.dtype
        pool = FencePool(self.vocabulary, config.fence_states)
        self._runner = Runner(
            self.params,
            cfg,
            self._shape,
            state_dtype=state_dtype,
            decode_buckets=config.decode_buckets,
            decode_steps=config.decode_steps,
            fences=pool,
        )
        spec = architecture(cfg).state_spec(cfg)
        self._state = init_state(spec, self._shape, cfg.vocab_size, jnp.dtype(state_dtype))
        self.tables = compile_tokens(json_schema(SCHEMA).machine, self.vocabulary)
        self._place: Place = self._runner.load_fence(self.tables)
        self._on_device = self._runner.fence_tables
        self._bytes = {text[0]: token for token, text in enumerate(self.vocabulary.tokens) if len(text) == 1}
        grammar = llguidance.LLMatcher.grammar_from_json_schema({**_SAME_SPACES, **SCHEMA})
        begin = HostVocabulary(self.vocabulary.tokens, self.vocabulary.eos_ids).matcher(grammar)
        before = {name: begin.advance_all(self._bytes[byte] for byte in text[:-1]) for name, text in PLACES.items()}
        self._before: dict[str, HostMatcher] = before

    def decode(self, place: str, batch: int, temperature: float, steps: int) -> Timed:
        """`steps` steps in one call, free ("") or fenced on the device; the host's copy of the positions follows."""
        at = self.tables.machine.run(PLACES[place]) if place else None
        rows = self._rows(batch, temperature, steps, None if at is None else Fenced(self._place, at))
        begun = time.perf_counter()
        drawn = [tuple(one.token for one in row) for row in self._runner.decode(rows, steps)]
        if at is not None:
            for tokens in drawn:
                self.follow(at, tokens)
        return Timed((time.perf_counter() - begun) / steps, tuple(drawn))

    def follow(self, at: Position, tokens: Sequence[int]) -> Position:
        return self.tables.machine.run(b"".join(self.vocabulary.tokens[token] for token in tokens), at)

    def masked(self, place: str, batch: int, temperature: float) -> Timed:
        """One step: masks from the host's matchers, the step, the drawn tokens back to the matchers."""
        rows = self._rows(batch, temperature, 1, None)
        matchers = [self._matcher(place) for _ in rows]
        begun = time.perf_counter()
        mask = np.stack([matcher.mask() for matcher in matchers])
        inputs = decode_inputs(rows, batch, self._shape.max_pages, 1)
        self._state, ids = masked_step(self.params, self._state, inputs, mask, cfg=self.cfg)
        tokens = np.asarray(ids).tolist()
        for matcher, token in zip(matchers, tokens, strict=True):
            matcher.advance(token)
        return Timed(time.perf_counter() - begun, tuple((token,) for token in tokens))

    def stages(self, place: str, batch: int) -> dict[str, float]:
        """Seconds of each part by itself: of the host's way, then of the device's.

        launch_s: of a program that does nothing. It is in all those parts that run one: put, apply, device_*.
        """
        matchers = [self._matcher(place) for _ in range(batch)]
        mask, mask_s = _timed(lambda: np.stack([matcher.mask() for matcher in matchers]))
        token = int(np.flatnonzero(unpack_bits(mask[0], len(self.vocabulary)))[0])
        _, advance_s = _timed(lambda: [matcher.advance(token) for matcher in matchers])
        scores = jnp.zeros((batch, self.cfg.vocab_size), jnp.float32)
        drawn = _done(jnp.full(batch, token, jnp.int32))
        _, fetch_s = _timed(lambda: np.asarray(drawn))
        on_device = _done(_unchanged(mask))
        where = (self._place.states, self._place.returns, self.tables.machine.run(PLACES[place]))
        at = jax.device_put(pack_positions([where] * batch))
        return {
            "fetch_s": fetch_s,
            "advance_s": advance_s,
            "mask_s": mask_s,
            "put_s": _warm(lambda: _unchanged(mask)),
            "apply_s": _warm(lambda: _forbid(scores, on_device)),
            "launch_s": _warm(lambda: _unchanged(on_device)),
            "device_mask_s": _warm(lambda: _device_mask(self._on_device, at)),
            "device_advance_s": _warm(lambda: _device_advance(self._on_device, at, drawn)),
        }

    def table(self, num_states: int, num_tokens: int, read_bytes: int) -> dict[str, float]:
        """Bytes of a table of masks, and the rate at which this machine reads memory."""
        masks = pack_bits(np.zeros((num_states, num_tokens), np.bool_))
        return {
            "table_states": num_states,
            "table_tokens": num_tokens,
            "mask_bytes": masks[0].nbytes,
            "masks_bytes": masks.nbytes,
            "read_bytes_s": read_rate(read_bytes),
        }

    def legal(self, place: str, timed: Timed) -> bool:
        """Whether every row's tokens may follow there: the machine's judgement."""
        at = self.tables.machine.run(PLACES[place])
        return not any(self.follow(at, tokens).dead for tokens in timed.tokens)

    def _matcher(self, place: str) -> HostMatcher:
        """One whose mask nobody has asked for yet."""
        return self._before[place].advance(self._bytes[PLACES[place][-1]])

    def _rows(self, batch: int, temperature: float, steps: int, fence: Fenced | None) -> list[Row]:
        longest = self._shape.max_pages
        return [
            Row(
                token=100 + i,
                position=POSITION,
                pages=tuple(range(i * longest, (i + 1) * longest)),
                ring=i,
                slot=i,
                sampling=Sampling(temperature=temperature),
                seed=i,
                budget=steps,
                stop_ids=(),
                fence=fence,
            )
            for i in range(batch)
        ]


def _done(made: Any) -> Any:
    """Once the device has made it."""
    return jax.block_until_ready(made)  # type: ignore[no-untyped-call]


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    made = _done(work())
    return made, time.perf_counter() - begun


def _warm(work: Callable[[], Any]) -> float:
    """Seconds of its second call: the first one may compile."""
    _done(work())
    return _timed(work)[1]


def open_bench(config: ExperimentConfig, progress: Progress) -> Bench:
    """The bench of a model on disk. Raises `ConfigError` for one without a tokenizer."""
    checkpoint = open_checkpoint(resolve(config.model))
    if checkpoint.tokenizer is None:
        raise ConfigError("fence_overhead needs a model with a tokenizer: a fence is about the bytes of its tokens")
    cfg = checkpoint.config
    check_shapes(checkpoint, cfg)
    if config.engine.compilation_cache:
        keep_compilations(zllm_home() / "compilations")
    params = load_params(checkpoint, cfg, config.engine.dtype, progress=progress)
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    silent = tokenizer.special_ids | set(tokenizer.eos_ids)
    tokens = [b"" if token in silent else tokenizer.token_bytes(token) for token in range(cfg.vocab_size)]
    return Bench(params, cfg, Vocabulary(tokens, tokenizer.eos_ids), config.engine)
