"""State in and out of the device, as logical rows: independent of page size, page numbers and mesh.

A sequence's state is a dict of host arrays: `paged.k`, `paged.v` [L_paged, K, S, H] and `ring.k`, `ring.v`
[L_ring, K, w, H] (row p mod w holds position p). Pages move in groups of a fixed size, so that any length uses the
same few compiled programs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from zllm_jax.buffers import RowSource, aligned_empty
from zllm_jax.runtime.specs import StateSpec
from zllm_jax.runtime.state import LayerState, Pages, Rings, State

Rows = dict[str, np.ndarray]
_TOKEN_AXIS = 2
GROUP_TOKENS = 256  # moved at a time, in whole pages

# Rows of a group on the device, its page ids i32[g] and how many of them count -> an array that is ready with the copy.
Copy = Callable[[Mapping[str, jax.Array], np.ndarray, int], jax.Array]


def row_layout(spec: StateSpec, dtype: jnp.dtype) -> dict[str, tuple[np.dtype, tuple[int | None, ...], int | None]]:
    """Name -> (dtype, shape with None for the token axis, index of the token axis or None)."""
    layout: dict[str, tuple[np.dtype, tuple[int | None, ...], int | None]] = {}
    kind = np.dtype(dtype)
    if spec.paged:
        one = spec.paged[0]
        paged = (kind, (len(spec.paged), one.num_kv_heads, None, one.head_dim), _TOKEN_AXIS)
        layout |= {"paged.k": paged, "paged.v": paged}
    if spec.rings:
        ring = spec.rings[0]
        kept = (kind, (len(spec.rings), ring.num_kv_heads, ring.window, ring.head_dim), None)
        layout |= {"ring.k": kept, "ring.v": kept}
    return layout


def copy_page(state: State, source: jax.Array, target: jax.Array) -> State:
    """Copy one page over all paged layers (copy on write of a partial last page)."""

    def copy(layer: LayerState) -> LayerState:
        if not isinstance(layer, Pages):
            return layer
        return Pages(k=layer.k.at[target].set(layer.k[source]), v=layer.v.at[target].set(layer.v[source]))

    return replace(state, layers=tuple(copy(layer) for layer in state.layers))


def copy_ring(state: State, source: jax.Array, target: jax.Array) -> State:
    """Copy one ring over all sliding-window layers (a checkpoint, or a fork from one)."""

    def copy(layer: LayerState) -> LayerState:
        if not isinstance(layer, Rings):
            return layer
        return Rings(k=layer.k.at[target].set(layer.k[source]), v=layer.v.at[target].set(layer.v[source]))

    return replace(state, layers=tuple(copy(layer) for layer in state.layers))


def gather_pages(state: State, ids: jax.Array) -> dict[str, jax.Array]:
    """ids i32[g] -> rows [L_paged, K, g*C, H]."""

    def rows(pool: jax.Array) -> jax.Array:
        picked = pool[ids].transpose(1, 0, 2, 3)  # [K, g, C, H]
        return picked.reshape(picked.shape[0], -1, picked.shape[3])

    pools = [layer for layer in state.layers if isinstance(layer, Pages)]
    return {
        "paged.k": jnp.stack([rows(pool.k) for pool in pools]),
        "paged.v": jnp.stack([rows(pool.v) for pool in pools]),
    }


def scatter_pages(state: State, ids: jax.Array, count: jax.Array, k: jax.Array, v: jax.Array) -> State:
    """Rows k, v [L_paged, K, g*C, H] into the first `count` pages of ids i32[g].

    One block copy a page and layer: a scatter costs twice the time on a CPU.
    """

    def put(i: jax.Array, layers: tuple[LayerState, ...]) -> tuple[LayerState, ...]:
        found = iter(range(k.shape[0]))
        return tuple(_put_page(one, ids[i], i, next(found), k, v) if isinstance(one, Pages) else one for one in layers)

    return replace(state, layers=jax.lax.fori_loop(0, count, put, state.layers))


def _put_page(pool: Pages, page: jax.Array, place: jax.Array, layer: int, k: jax.Array, v: jax.Array) -> Pages:
    _, K, C, H = pool.k.shape

    def one(target: jax.Array, rows: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_slice(rows, (layer, 0, place * C, 0), (1, K, C, H))
        return jax.lax.dynamic_update_slice(target, block, (page, 0, 0, 0))

    return Pages(k=one(pool.k, k), v=one(pool.v, v))


def gather_ring(state: State, ring: jax.Array) -> dict[str, jax.Array]:
    """One ring over all sliding-window layers: [L_ring, K, w, H]."""
    pools = [layer for layer in state.layers if isinstance(layer, Rings)]
    return {
        "ring.k": jnp.stack([pool.k[ring] for pool in pools]),
        "ring.v": jnp.stack([pool.v[ring] for pool in pools]),
    }


def scatter_ring(state: State, ring: jax.Array, k: jax.Array, v: jax.Array) -> State:
    """Rows k, v [L_ring, K, w, H] into one ring."""
    found = iter(range(k.shape[0]))

    def layer_of(layer: LayerState) -> LayerState:
        if not isinstance(layer, Rings):
            return layer
        i = next(found)
        return Rings(k=layer.k.at[ring].set(k[i]), v=layer.v.at[ring].set(v[i]))

    return replace(state, layers=tuple(layer_of(layer) for layer in state.layers))


class Staging:
    """Two reused host buffers for a group of pages' rows: the next group is filled while one is copied to the device.

    XLA on a CPU reads a buffer where it lies: it may be filled again only when its last copy is done.
    """

    def __init__(self, layout: Mapping[str, tuple[np.dtype, tuple[int | None, ...], int | None]], page_tokens: int):
        self.group_pages = max(1, GROUP_TOKENS // page_tokens)
        self._page_tokens = page_tokens
        self._buffers = [
            {
                name: aligned_empty([self.group_tokens if size is None else size for size in shape], dtype)
                for name, (dtype, shape, axis) in layout.items()
                if axis is not None
            }
            for _ in range(2)
        ]
        self._copied: list[jax.Array | None] = [None, None]
        self._turn = 0

    @property
    def group_tokens(self) -> int:
        return self.group_pages * self._page_tokens

    def page_groups(self, pages: Sequence[int]) -> Iterator[tuple[int, int, np.ndarray]]:
        """(first token, how many pages, i32[group_pages] ids padded with 0) over a sequence's pages."""
        for first in range(0, len(pages), self.group_pages):
            part = pages[first : first + self.group_pages]
            ids = np.zeros(self.group_pages, np.int32)
            ids[: len(part)] = part
            yield first * self._page_tokens, len(part), ids

    def put(self, source: RowSource, pages: Sequence[int], copy: Copy) -> None:
        """Fill group after group from `source` and hand each to `copy`, one filling ahead."""
        waiting: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        try:
            for start, count, ids in self.page_groups(pages):
                turn = self._turn = self._turn ^ 1
                last = self._copied[turn]
                if last is not None:
                    last.block_until_ready()
                filled = source.fill(start, self._buffers[turn])
                waiting.append((filled, partial(self._copy, turn, ids, count, copy)))
                if len(waiting) == len(self._buffers):
                    _finish(waiting)
            while waiting:
                _finish(waiting)
        finally:
            for filled, _ in waiting:  # after a failure: nothing may fill a buffer behind the next sequence's back
                with suppress(Exception):
                    filled()

    def _copy(self, turn: int, ids: np.ndarray, count: int, copy: Copy) -> None:
        rows = {name: jax.device_put(part) for name, part in self._buffers[turn].items()}
        self._copied[turn] = copy(rows, ids, count)


def _finish(waiting: deque[tuple[Callable[[], None], Callable[[], None]]]) -> None:
    filled, copy = waiting[0]
    filled()
    waiting.popleft()
    copy()
