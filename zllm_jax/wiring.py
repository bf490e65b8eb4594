"""The composition root: the one file that sees every room and joins them into an engine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from zllm_jax import engine as engine_
from zllm_jax.cache import POLICIES, PrefixCache, SnapshotStore
from zllm_jax.checkpoint import Checkpoint, open_checkpoint, resolve
from zllm_jax.config import EngineConfig, ModelConfig, zllm_home
from zllm_jax.dialect import ChatTemplate, Tokenizer, load_tokenizer, markup_ids
from zllm_jax.engine import Progress
from zllm_jax.engine.fence_store import FenceStore
from zllm_jax.engine.fences import FenceCompiler, forced_runs_of, vocabulary_of
from zllm_jax.errors import ConfigError, StoreUnavailable
from zllm_jax.fence import FencePool, LoopGuard, Vocabulary, word_tokens
from zllm_jax.memory import trim
from zllm_jax.runtime import (
    Runner,
    StateShape,
    architecture,
    check_mesh,
    check_shapes,
    extend_context,
    fetch_decode,
    fetch_prefill,
    keep_compilations,
    load_params,
    make_mesh,
    page_bytes,
    pages_for,
)
from zllm_jax.scheduler import Scheduler

STATE_VERSION = 2  # 2: arrays by stage
_ITEMSIZE = {"float32": 4, "bfloat16": 2}


class Engine(engine_.Engine):
    """One model, ready to answer. `Engine.from_pretrained(name_or_path, EngineConfig(...))`."""

    @classmethod
    def from_pretrained(
        cls, model: str | Path, config: EngineConfig | None = None, *, progress: Progress | None = None
    ) -> Engine:
        """Open a known name, a Hugging Face or orbax directory, or a GGUF file.

        progress: called with (what, done, total). Raises `ModelError` when the model cannot be used, `ConfigError`
        when it does not fit the configuration; both before memory is taken.
        """
        config = config or EngineConfig()
        checkpoint = open_checkpoint(resolve(model))
        cfg = model_config(checkpoint, config)
        shape = state_shape(cfg, config)
        if config.compilation_cache:
            keep_compilations(zllm_home() / "compilations")
        tokenizer = load_tokenizer(checkpoint.tokenizer) if checkpoint.tokenizer is not None else None
        store = open_store(checkpoint, cfg, config, tokenizer) if config.disk_cache else None
        if config.loop_guard and tokenizer is None:
            raise ConfigError("EngineConfig.loop_guard is on, but looks at words: this model has no tokenizer")
        markup = markup_ids(tokenizer) if tokenizer is not None else frozenset[int]()
        vocabulary = vocabulary_of(tokenizer, cfg.vocab_size, markup) if tokenizer is not None else None
        fenced = vocabulary if config.fence_states else None
        pool = FencePool(fenced, config.fence_states) if fenced is not None else None
        runner = open_runner(checkpoint, cfg, shape, config, progress, pool, vocabulary)
        cache = PrefixCache(
            runner,
            store,
            policy=POLICIES[config.cache_policy](),
            prefix_rounds=config.prefix_rounds,
            staged=config.staged_restore,
        )
        scheduler = Scheduler(
            runner,
            cache,
            max_seq_tokens=max_seq_tokens(cfg, config),
            max_queue=config.max_queue,
            checkpoint_tokens=pages_for(config.checkpoint_tokens, config.page_tokens) * config.page_tokens,
        )
        return cls(
            model_name=_name(model),
            model_config=cfg,
            config=config,
            scheduler=scheduler,
            cache=cache,
            tokenizer=tokenizer,
            template=chat_template(checkpoint, tokenizer),
            warm=runner.warmup,
            fences=FenceCompiler(fenced, config.fence_states, markup, fence_store(config))
            if fenced is not None
            else None,
            forced=None
            if tokenizer is None or vocabulary is None
            else forced_runs_of(tokenizer, vocabulary, config.prefill_buckets[0]),
            progress=progress,
        )


def fence_store(config: EngineConfig) -> FenceStore | None:
    return FenceStore(zllm_home() / "fences") if config.compilation_cache else None


def _name(model: str | Path) -> str:
    """As a client calls it: a known name, a folder's, or a file's without its ending."""
    path = Path(model)
    return path.stem if path.is_file() else path.name if path.is_dir() else str(model)


def open_runner(
    checkpoint: Checkpoint,
    cfg: ModelConfig,
    shape: StateShape,
    config: EngineConfig,
    progress: Progress | None,
    pool: FencePool | None = None,
    vocabulary: Vocabulary | None = None,
) -> Runner:
    """Weights and state on the device. The programs of a first short request are fetched while the weights load.

    vocabulary: lets outputs be watched for loops.

    Raises `ConfigError` when the model cannot be split over `tensor_parallel` devices.
    """
    check_shapes(checkpoint, cfg)
    mesh = open_mesh(cfg, config)
    tables = pool.shapes if pool is not None else None
    guard = LoopGuard() if vocabulary is not None else None
    state_dtype = config.state_dtype or config.dtype
    first = (cfg, shape, config.dtype, state_dtype)
    _beside(
        partial(fetch_prefill, *first, config.prefill_buckets[0], mesh, tables, guard),
        partial(fetch_decode, *first, config.decode_buckets[0], config.decode_steps, mesh, tables, guard),
    )
    params = load_params(checkpoint, cfg, config.dtype, mesh=mesh, progress=progress)
    trim()  # before the state takes its memory
    return Runner(
        params,
        cfg,
        shape,
        state_dtype=state_dtype,
        prefill_buckets=config.prefill_buckets,
        decode_buckets=config.decode_buckets,
        decode_steps=config.decode_steps,
        mesh=mesh,
        fences=pool,
        guard=guard,
        words=None if vocabulary is None else word_tokens(vocabulary.tokens),
    )


def open_mesh(cfg: ModelConfig, config: EngineConfig) -> Any:
    """The devices that share the model; None for one. Raises `ConfigError` when they are missing or cannot share it."""
    try:
        mesh = make_mesh(config.tensor_parallel)
        if mesh is not None:
            check_mesh(mesh, cfg, architecture(cfg).param_specs(cfg))
    except ValueError as error:
        raise ConfigError(f"EngineConfig.tensor_parallel is {config.tensor_parallel}: {error}") from error
    return mesh


def _beside(*fetches: Callable[[], None]) -> None:
    """Fetch programs in a thread: a call that needs one meanwhile waits for it, and meets its errors itself.

    The thread is waited for when the process ends: the compiler does not survive being cut off.
    """

    def run() -> None:
        for fetch in fetches:
            with suppress(Exception):
                fetch()
            trim()

    threading.Thread(target=run, name="fetch-programs").start()


def model_config(checkpoint: Checkpoint, config: EngineConfig) -> ModelConfig:
    """The checkpoint's, with the context that the engine is to have. Raises `ConfigError` when it cannot have it."""
    try:
        return extend_context(checkpoint.config, config.context_extension)
    except ValueError as error:
        raise ConfigError(f"EngineConfig.context_extension cannot be used: {error}") from error


def max_seq_tokens(cfg: ModelConfig, config: EngineConfig) -> int:
    """The most tokens of one sequence: the configuration's wish, within the model's context."""
    return min(config.max_seq_tokens or cfg.max_context_tokens, cfg.max_context_tokens)


def state_shape(cfg: ModelConfig, config: EngineConfig) -> StateShape:
    """How many pages and rings fit the budget. Raises `ConfigError` when one sequence would not."""
    spec = architecture(cfg).state_spec(cfg)
    itemsize = _ITEMSIZE[config.state_dtype or config.dtype]
    longest = pages_for(max_seq_tokens(cfg, config), config.page_tokens)
    one_page, one_ring = page_bytes(spec, config.page_tokens, itemsize), spec.ring_bytes(itemsize)
    # Each running sequence has a ring, and at least as many finished conversations keep theirs.
    rings = 2 * config.max_batch if spec.rings else 1
    need = longest * one_page + rings * one_ring
    budget = need if config.device_cache_bytes is None else config.device_cache_bytes
    pages = (budget - rings * one_ring) // one_page if one_page else longest
    if pages < longest:
        raise ConfigError(
            f"device_cache_bytes is {config.device_cache_bytes}, but one sequence of {max_seq_tokens(cfg, config)} "
            f"tokens needs {need} bytes of state: raise device_cache_bytes or lower max_seq_tokens"
        )
    if one_ring:  # what long sequences cannot use goes to more conversations
        most = longest * 4 * config.max_batch
        rings += max(0, pages - most) * one_page // one_ring
        pages = min(pages, most)
    return StateShape(
        num_pages=pages,
        page_tokens=config.page_tokens,
        num_rings=rings,
        num_slots=config.max_batch,
        max_pages=longest,
    )


def namespace(checkpoint: Checkpoint, cfg: ModelConfig, config: EngineConfig, tokenizer: Tokenizer | None) -> str:
    """The identity of states: what must be equal for one to stand for the other (state-cache invariant 4)."""
    identity = {
        "weights": checkpoint.digest,
        "tokenizer": tokenizer.digest if tokenizer is not None else None,
        "template": checkpoint.chat_template,
        "model": dataclasses.asdict(cfg),
        "state": [STATE_VERSION, config.state_dtype or config.dtype, config.dtype],
        "salt": config.salt,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def open_store(
    checkpoint: Checkpoint, cfg: ModelConfig, config: EngineConfig, tokenizer: Tokenizer | None
) -> SnapshotStore:
    """The second tier of one identity. Raises `ConfigError` when its folder cannot be used at all."""
    root = store_root(config)
    try:
        return SnapshotStore(
            root, namespace=namespace(checkpoint, cfg, config, tokenizer), max_bytes=config.disk_cache_bytes
        )
    except StoreUnavailable as error:
        raise ConfigError(
            f"the snapshot store {root} cannot be used: {error}; set store= or disk_cache=False"
        ) from error


def store_root(config: EngineConfig) -> Path:
    return config.store or zllm_home() / "snapshots"


def chat_template(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    if checkpoint.chat_template is None or tokenizer is None:
        return None
    names = {
        "bos_token": _spelling(tokenizer, tokenizer.bos_id),
        "eos_token": _spelling(tokenizer, tokenizer.eos_ids[0] if tokenizer.eos_ids else None),
    }
    return ChatTemplate(checkpoint.chat_template, names)


def _spelling(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.decode([token], skip_special=False)
