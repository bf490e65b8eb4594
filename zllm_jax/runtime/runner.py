"""The real `Backend`: owns parameters and state, and calls the few compiled programs of the functional core.

It pads to buckets, so that after `warmup` nothing is compiled again, and it is the one door through which the state
goes in and out of a step: the old state is donated, the new one kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zllm_jax.buffers import RowSource
from zllm_jax.config import Dtype, ModelConfig
from zllm_jax.runtime import programs, transfer
from zllm_jax.runtime.memory import trim
from zllm_jax.runtime.models import architecture
from zllm_jax.runtime.port import Capacity, Chunk, Drawn, Row, RowLayout
from zllm_jax.runtime.sampling import Sampled
from zllm_jax.runtime.state import StateShape, init_state, page_bytes
from zllm_jax.values import Sampling, TokenLogprob

Progress = Callable[[str, int, int], None]


class Runner:
    """Parameters and state of one model on one device (or mesh), behind the calls of `Backend`."""

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
    ) -> None:
        self._params, self._cfg, self._shape = params, cfg, shape
        self._spec = architecture(cfg).state_spec(cfg)
        self._dtype = jnp.dtype(state_dtype)
        self._state = init_state(self._spec, shape, cfg.vocab_size, self._dtype, fill)
        self._prefill_buckets, self._decode_buckets = tuple(prefill_buckets), tuple(decode_buckets)
        self._decode_steps = decode_steps
        self._staging = transfer.Staging(self.row_layout, shape.page_tokens)

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
        )

    @property
    def row_layout(self) -> RowLayout:
        return transfer.row_layout(self._spec, self._dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of all device arrays of the state, from the arrays themselves."""
        return self._state.nbytes

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        padded = np.full(self._shape.max_pages * self._shape.page_tokens, -1, np.int32)
        padded[: len(tokens)] = tokens
        self._state = programs.begin_slot(state=self._state, slot=np.int32(slot), tokens=padded)

    def prefill(self, chunk: Chunk) -> Drawn | None:
        count = len(chunk.tokens)
        bucket = next((size for size in self._prefill_buckets if size >= count), None)
        if bucket is None:
            raise ValueError(f"a chunk of {count} tokens exceeds the largest bucket, {self._prefill_buckets[-1]}")
        inputs = programs.prefill_inputs(chunk, bucket, self._shape.max_pages)
        self._state, sampled = programs.prefill(params=self._params, state=self._state, inputs=inputs, cfg=self._cfg)
        if not chunk.last:
            return None
        (drawn,) = _drawn(_fetch(sampled, [chunk.sampling]), [chunk.sampling])
        return drawn

    def decode(self, rows: Sequence[Row], steps_wanted: int) -> list[list[Drawn]]:
        bucket = next((size for size in self._decode_buckets if size >= len(rows)), None)
        if bucket is None:
            raise ValueError(f"{len(rows)} rows exceed the largest decode bucket, {self._decode_buckets[-1]}")
        num_steps = min(steps_wanted, self._decode_steps)
        inputs = programs.decode_inputs(rows, bucket, self._shape.max_pages, num_steps)
        self._state, out = programs.decode(
            params=self._params, state=self._state, inputs=inputs, cfg=self._cfg, max_steps=self._decode_steps
        )
        emitted = np.asarray(out.emitted)
        samplings = [row.sampling for row in rows]
        sampled = _fetch(out.sampled, samplings)
        by_step = [_drawn(_at_step(sampled, i), samplings) for i in range(int(emitted.max(initial=0)))]
        return [[by_step[i][b] for i in range(emitted[b])] for b in range(len(rows))]

    def copy_page(self, source: int, target: int) -> None:
        self._state = programs.copy_page(state=self._state, source=np.int32(source), target=np.int32(target))

    def copy_ring(self, source: int, target: int) -> None:
        self._state = programs.copy_ring(state=self._state, source=np.int32(source), target=np.int32(target))

    def read(self, pages: Sequence[int], ring: int, num_tokens: int) -> dict[str, np.ndarray]:
        rows: dict[str, np.ndarray] = {}
        group = self._staging.group_tokens
        for name, (dtype, shape, axis) in self.row_layout.items():
            if axis is not None:
                rows[name] = np.empty([num_tokens if size is None else size for size in shape], dtype)
        if self._spec.paged:
            for start, _, ids in self._staging.page_groups(pages):
                for name, part in programs.gather_pages(self._state, ids).items():
                    stop = min(start + group, num_tokens)
                    rows[name][:, :, start:stop] = np.asarray(part)[:, :, : stop - start]
        if self._spec.rings:
            rows |= {name: np.asarray(part) for name, part in programs.gather_ring(self._state, np.int32(ring)).items()}
        return rows

    def write(self, source: RowSource, pages: Sequence[int], ring: int) -> int:
        if self._spec.paged:
            self._staging.put(source, pages, self._put_pages)
        if self._spec.rings:
            self._put_ring(source.fixed(), ring)
        jax.block_until_ready(self._state.layers)
        return len(pages) * self.capacity.page_bytes + self.capacity.ring_bytes

    def _put_pages(self, rows: Mapping[str, jax.Array], ids: np.ndarray, count: int) -> jax.Array:
        self._state, done = programs.scatter_pages(
            state=self._state, ids=ids, count=np.int32(count), k=rows["paged.k"], v=rows["paged.v"]
        )
        return done

    def _put_ring(self, rows: Mapping[str, np.ndarray], ring: int) -> None:
        self._state = programs.scatter_ring(state=self._state, ring=np.int32(ring), k=rows["ring.k"], v=rows["ring.v"])

    def warmup(self, progress: Progress | None = None) -> None:
        """Compile (or fetch) every program once. Nothing that a sequence owns is touched."""
        work: list[Callable[[], object]] = [
            *(partial(self._warm_prefill, size) for size in self._prefill_buckets),
            *(partial(self.decode, [programs.IDLE_ROW] * size, 1) for size in self._decode_buckets),
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
        self._state, _ = programs.prefill(params=self._params, state=self._state, inputs=inputs, cfg=self._cfg)

    def _warm_transfers(self) -> None:
        self.begin(0, ())
        if self._spec.paged:
            self.copy_page(0, 0)
            none = np.zeros(self._staging.group_pages, np.int32)
            self._put_pages(programs.gather_pages(self._state, none), none, 0)
        if self._spec.rings:
            self.copy_ring(0, 0)
            ring = programs.gather_ring(self._state, np.int32(0))
            self._put_ring({name: np.asarray(part) for name, part in ring.items()}, 0)


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
