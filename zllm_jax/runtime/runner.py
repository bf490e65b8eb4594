"""The real `Backend`: owns parameters and state, and calls the few compiled programs of the functional core.

It pads to buckets, so that after `warmup` nothing is compiled again, and it is the one door through which the state
goes in and out of a step: the old state is donated, the new one kept. A call takes no more of it than it needs, so that
nothing waits for the layers of another stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zllm_jax.buffers import RowLayout, aligned_empty
from zllm_jax.config import Dtype, ModelConfig
from zllm_jax.errors import DeviceLost, UnsupportedGrammar
from zllm_jax.fence import FencePool, FenceTables, HostMatcher, LoopGuard, Place, TokenTables
from zllm_jax.memory import trim
from zllm_jax.runtime import programs, transfer
from zllm_jax.runtime.fences import DeviceFences
from zllm_jax.runtime.models import architecture
from zllm_jax.runtime.port import Capacity, Chunk, Copying, Drawn, Row
from zllm_jax.runtime.sampling import Sampled
from zllm_jax.runtime.sharding import check_mesh, sharding, whole
from zllm_jax.runtime.stages import Stage, cut
from zllm_jax.runtime.state import ROW_AXES, StateShape, init_state, page_bytes
from zllm_jax.runtime.steps import DecodeInputs, Passing, PrefillInputs
from zllm_jax.values import Sampling, TokenLogprob

Progress = Callable[[str, int, int], None]
_NO_FENCES = "this engine follows no fences: EngineConfig.fence_states is 0"


@dataclass(frozen=True)
class Carry:
    """A chunk between two of its stages."""

    inputs: PrefillInputs
    passing: Passing


class Runner:
    """Parameters and state of one model on one device or mesh, behind the calls of `Backend`.

    mesh: None, or one with an axis "model", over which the state is split by heads as `load_params` splits the
    parameters. Raises ValueError when the model cannot be split so. fences: the table of grammars; None for a model
    whose rows are always free. guard: how rows are watched for loops, and `words`, bool[V], which tokens are words to
    it; None where none ever is.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        cfg: ModelConfig,
        shape: StateShape,
        *,
        state_dtype: Dtype = "float32",
        prefill_buckets: Sequence[int] = (32, 256),
        decode_buckets: Sequence[int] = (1, 8),
        decode_steps: int = 4,
        fill: float = 0.0,
        mesh: Mesh | None = None,
        fences: FencePool | None = None,
        guard: LoopGuard | None = None,
        words: np.ndarray | None = None,
    ) -> None:
        model = architecture(cfg)
        if mesh is not None:
            check_mesh(mesh, cfg, model.param_specs(cfg))
        self._params, self._cfg, self._shape = params, cfg, shape
        self._mesh = mesh
        self._spec = model.state_spec(cfg)
        self._stages = cut(self._spec)
        self._dtype = jnp.dtype(state_dtype)
        if (guard is None) != (words is None) or (words is not None and words.shape != (cfg.vocab_size,)):
            raise ValueError(f"a loop guard needs which of the {cfg.vocab_size} tokens are words, and nobody else does")
        self._state = init_state(self._spec, shape, cfg.vocab_size, self._dtype, fill, mesh=mesh, guard=guard)
        self._words = None if words is None else jax.device_put(words, whole(mesh))
        self._prefill_buckets, self._decode_buckets = tuple(prefill_buckets), tuple(decode_buckets)
        self._decode_steps = decode_steps
        self._group_pages = transfer.group_pages(shape.page_tokens)
        self._failure: BaseException | None = None
        self._fences = None if fences is None else DeviceFences(fences, mesh)

    @property
    def capacity(self) -> Capacity:
        size = self._dtype.itemsize
        return Capacity(
            num_pages=self._shape.num_pages,
            page_tokens=self._shape.page_tokens,
            num_rings=self._shape.num_rings if self._spec.rings else 0,
            num_slots=self._shape.num_slots,
            max_pages=self._shape.max_pages,
            page_bytes=page_bytes(self._spec, self._shape.page_tokens, size),
            ring_bytes=self._spec.ring_bytes(size),
            truncatable=self._spec.truncatable,
            chunk_sizes=self._prefill_buckets,
            decode_steps=self._decode_steps,
            num_stages=len(self._stages),
            group_tokens=self._group_pages * self._shape.page_tokens,
        )

    @property
    def row_layout(self) -> RowLayout:
        return transfer.row_layout(self._stages, self._dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of all device arrays of the state, from the arrays themselves."""
        return self._state.nbytes

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        padded = np.full(self._shape.max_pages * self._shape.page_tokens, -1, np.int32)
        padded[: len(tokens)] = tokens
        with self._state_at_stake():
            history = programs.begin_slot(self._state.history, np.int32(slot), padded, mesh=self._mesh)
            self._state = replace(self._state, history=history)

    def prefill(self, chunk: Chunk) -> Drawn | None:
        carry: Any = None
        for stage in self._stages:
            carry = self.prefill_stage(chunk, stage.index, carry)
        return carry

    def prefill_stage(self, chunk: Chunk, stage: int, carry: Any) -> Any:
        with self._state_at_stake():
            if stage == 0:
                carry = self._begin_chunk(chunk)
            passing = self._run_stage(self._stages[stage], carry.passing)
            if stage < len(self._stages) - 1:
                return replace(carry, passing=passing)
            return self._draw_first(chunk, carry.inputs, passing) if chunk.last else None

    def _begin_chunk(self, chunk: Chunk) -> Carry:
        count = len(chunk.tokens)
        bucket = next((size for size in self._prefill_buckets if size >= count), None)
        if bucket is None:
            raise ValueError(f"a chunk of {count} tokens exceeds the largest bucket, {self._prefill_buckets[-1]}")
        inputs = programs.prefill_inputs(chunk, bucket, self._shape.max_pages)
        return Carry(inputs, programs.begin_chunk(self._around, inputs, cfg=self._cfg, mesh=self._mesh))

    def _run_stage(self, stage: Stage, passing: Passing) -> Passing:
        weights, layers = stage.of(self._params["layers"]), stage.of(self._state.layers)
        layers, passing = programs.run_stage(
            weights, layers, passing, cfg=self._cfg, kinds=stage.kinds, mesh=self._mesh
        )
        self._keep(stage, layers)
        return passing

    def _draw_first(self, chunk: Chunk, inputs: PrefillInputs, passing: Passing) -> Drawn:
        allowed = self._host_masks([chunk], 1)
        history, sampled = programs.draw_first(
            self._around,
            self._state.history,
            passing.x,
            inputs,
            self.fence_tables,
            self._words,
            allowed,
            cfg=self._cfg,
            mesh=self._mesh,
        )
        self._state = replace(self._state, history=history)
        (drawn,) = _drawn(_fetch(sampled, [chunk.sampling]), [chunk.sampling])
        return drawn

    def decode(self, rows: Sequence[Row], steps_wanted: int) -> list[list[Drawn]]:
        bucket = next((size for size in self._decode_buckets if size >= len(rows)), None)
        if bucket is None:
            raise ValueError(f"{len(rows)} rows exceed the largest decode bucket, {self._decode_buckets[-1]}")
        num_steps = min(steps_wanted, self._decode_steps)
        inputs = programs.decode_inputs(rows, bucket, self._shape.max_pages, num_steps)
        if any(isinstance(row.fence, HostMatcher) for row in rows):
            return self._decode_in_parts(rows, bucket, inputs)
        with self._state_at_stake():
            self._state, out = programs.decode(
                self._params,
                self._state,
                inputs,
                self.fence_tables,
                self._words,
                cfg=self._cfg,
                max_steps=self._decode_steps,
                mesh=self._mesh,
            )
            emitted = np.asarray(out.emitted)
        samplings = [row.sampling for row in rows]
        sampled = _fetch(out.sampled, samplings)
        by_step = [_drawn(_at_step(sampled, i), samplings) for i in range(int(emitted.max(initial=0)))]
        return [[by_step[i][b] for i in range(emitted[b])] for b in range(len(rows))]

    def _decode_in_parts(self, rows: Sequence[Row], bucket: int, inputs: DecodeInputs) -> list[list[Drawn]]:
        """One step, whose masks the host computes while the device computes the layers."""
        fixed: dict[str, Any] = {"cfg": self._cfg, "mesh": self._mesh}
        with self._state_at_stake():
            passing = programs.begin_rows(self._around, inputs, **fixed)
            for stage in self._stages:
                passing = self._run_stage(stage, passing)
            allowed = self._host_masks(rows, bucket)
            history, sampled = programs.draw_rows(
                self._around, self._state.history, passing.x, inputs, self.fence_tables, allowed, self._words, **fixed
            )
            self._state = replace(self._state, history=history)
            samplings = [row.sampling for row in rows]
            drawn = _drawn(_fetch(sampled, samplings), samplings)
        return [[one] if row.budget else [] for one, row in zip(drawn, rows, strict=True)]

    def _host_masks(self, several: Sequence[Row | Chunk], bucket: int) -> np.ndarray | None:
        """u32[bucket, W]; None where no row can have a fence."""
        if self.fence_tables is not None:
            return programs.host_masks(several, bucket, -(-self._cfg.vocab_size // 32))
        if any(one.fence is not None for one in several):
            raise UnsupportedGrammar(_NO_FENCES)
        return None

    def load_fence(self, tables: TokenTables) -> Place:
        if self._fences is None:
            raise UnsupportedGrammar(_NO_FENCES)
        with self._state_at_stake():
            return self._fences.load(tables)

    def release_fence(self, tables: TokenTables) -> None:
        if self._fences is not None:
            self._fences.release(tables)

    @property
    def fence_tables(self) -> FenceTables | None:
        return None if self._fences is None else self._fences.tables

    def loops_broken(self, slot: int) -> int:
        """0 where no row is ever watched, or once the device is lost."""
        guard = self._state.history.guard
        return 0 if guard is None or self._failure is not None else int(np.asarray(guard.broken)[slot])

    def copy_page(self, source: int, target: int) -> None:
        self._copy(programs.copy_page, source, target)

    def copy_ring(self, source: int, target: int) -> None:
        self._copy(programs.copy_ring, source, target)

    def read_pages(self, stage: int, pages: Sequence[int]) -> dict[str, Any]:
        one, ids = self._stages[stage], self._group(pages)
        self._check()
        if not one.spec.paged:
            return {}
        k, v = programs.gather_pages(one.of(self._state.layers), ids, mesh=self._mesh)
        return {f"paged.k.{stage}": k, f"paged.v.{stage}": v}

    def read_ring(self, stage: int, ring: int) -> dict[str, Any]:
        one = self._stages[stage]
        self._check()
        if not one.spec.rings:
            return {}
        k, v = programs.gather_ring(one.of(self._state.layers), np.int32(ring), mesh=self._mesh)
        return {f"ring.k.{stage}": k, f"ring.v.{stage}": v}

    def write_pages(self, stage: int, rows: Mapping[str, np.ndarray], pages: Sequence[int]) -> Copying:
        one, ids = self._stages[stage], self._group(pages)
        if not one.spec.paged:
            return transfer.Copy(None)
        return self._write(one, rows, "paged", partial(programs.scatter_pages, ids=ids, count=np.int32(len(pages))))

    def write_ring(self, stage: int, rows: Mapping[str, np.ndarray], ring: int) -> Copying:
        one = self._stages[stage]
        if not one.spec.rings:
            return transfer.Copy(None)
        return self._write(one, rows, "ring", partial(programs.scatter_ring, ring=np.int32(ring)))

    def _write(self, stage: Stage, rows: Mapping[str, np.ndarray], kind: str, scatter: Callable[..., Any]) -> Copying:
        with self._state_at_stake():
            k, v = (self._put(rows[f"{kind}.{part}.{stage.index}"]) for part in ("k", "v"))
            layers, arrived = scatter(stage.of(self._state.layers), k=k, v=v, mesh=self._mesh)
            self._keep(stage, layers)
        return transfer.Copy(arrived)

    def _put(self, rows: np.ndarray) -> jax.Array:
        return jax.device_put(rows, None if self._mesh is None else sharding(self._mesh, ROW_AXES, rows.shape))

    def _copy(self, program: Callable[..., transfer.Layers], source: int, target: int) -> None:
        with self._state_at_stake():
            layers = program(self._state.layers, np.int32(source), np.int32(target), mesh=self._mesh)
            self._state = replace(self._state, layers=layers)

    def _group(self, pages: Sequence[int]) -> np.ndarray:
        """i32[g] ids, padded with 0."""
        if len(pages) > self._group_pages:
            raise ValueError(f"{len(pages)} pages, but a transfer moves at most {self._group_pages}")
        ids = np.zeros(self._group_pages, np.int32)
        ids[: len(pages)] = pages
        return ids

    def _room(self, stage: Stage) -> dict[str, np.ndarray]:
        """Host memory for a group of a stage's token rows."""
        group = self._group_pages * self._shape.page_tokens
        return {
            name: aligned_empty([group if size is None else size for size in one.shape], one.dtype)
            for name, one in transfer.row_layout([stage], self._dtype).items()
            if one.token_axis is not None
        }

    @property
    def _around(self) -> Mapping[str, Any]:
        return programs.around(self._params)

    def _keep(self, stage: Stage, layers: transfer.Layers) -> None:
        self._state = replace(self._state, layers=stage.put(self._state.layers, layers))

    def _check(self) -> None:
        if self._failure is not None:
            raise DeviceLost(
                f"the state of all sequences was lost when a device call failed ({self._failure}): open the engine anew"
            ) from self._failure

    @contextmanager
    def _state_at_stake(self) -> Iterator[None]:
        """Around what donates the state: a failure after that leaves deleted arrays, or such as hold an error."""
        self._check()
        try:
            yield
        except BaseException as error:
            if not self._intact():
                self._failure = error
            raise

    def _intact(self) -> bool:
        if any(leaf.is_deleted() for leaf in jax.tree.leaves((self._state, self.fence_tables))):
            return False
        try:
            jax.block_until_ready((self._state, self.fence_tables))
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def warmup(self, progress: Progress | None = None) -> None:
        """Compile (or fetch) every program once. Nothing that a sequence owns is touched."""
        in_parts = self._decode_buckets if self._fences is not None else ()
        work: list[Callable[[], object]] = [
            *(partial(self._warm_prefill, size) for size in self._prefill_buckets),
            *(partial(self.decode, [programs.IDLE_ROW] * size, 1) for size in self._decode_buckets),
            *(partial(self._warm_parts, size) for size in in_parts),
            self._warm_transfers,
        ]
        for i, task in enumerate(work):
            if progress is not None:
                progress("compile", i, len(work))
            task()
            trim()
        jax.block_until_ready(self._state.layers)
        if progress is not None:
            progress("compile", len(work), len(work))

    def _warm_prefill(self, size: int) -> None:
        inputs = programs.prefill_inputs(programs.IDLE_CHUNK, size, self._shape.max_pages)
        passing = programs.begin_chunk(self._around, inputs, cfg=self._cfg, mesh=self._mesh)
        for stage in self._stages:
            passing = self._run_stage(stage, passing)
        self._draw_first(programs.IDLE_CHUNK, inputs, passing)

    def _warm_parts(self, size: int) -> None:
        inputs = programs.decode_inputs((), size, self._shape.max_pages, 1)
        self._decode_in_parts((), size, inputs)

    def _warm_transfers(self) -> None:
        self.begin(self._shape.num_slots, ())  # nobody's
        if self._spec.paged:
            self.copy_page(0, 0)
        if self._spec.rings:
            self.copy_ring(0, 0)
        for stage in self._stages:
            self.read_pages(stage.index, ())
            self.write_pages(stage.index, self._room(stage), ()).wait()
            ring = {name: np.asarray(part) for name, part in self.read_ring(stage.index, 0).items()}
            self.write_ring(stage.index, ring, 0).wait()


def _fetch(sampled: Sampled, samplings: Sequence[Sampling]) -> Sampled:
    """Bring ids to the host, and the log-probabilities only when some row asked."""
    if any(one.logprobs is not None for one in samplings):
        return jax.tree.map(np.asarray, sampled)
    ids = np.asarray(sampled.ids)
    return Sampled(ids, ids, ids, ids)


def _at_step(sampled: Sampled, step: int) -> Sampled:
    return jax.tree.map(lambda array: array[step], sampled)


def _drawn(sampled: Sampled, samplings: Sequence[Sampling]) -> list[Drawn]:
    """One step's tokens, a row a sampling."""
    out = []
    for b, one in enumerate(samplings):
        token = int(sampled.ids[b])
        if one.logprobs is None:
            out.append(Drawn(token))
            continue
        pairs = zip(sampled.top_ids[b].tolist(), sampled.top_logprobs[b].tolist(), strict=True)
        top = tuple(pairs)[: one.logprobs]
        out.append(Drawn(token, TokenLogprob(token=token, logprob=float(sampled.logprob[b]), top=top)))
    return out
