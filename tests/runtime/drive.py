"""A runner driven by hand: where a sequence stands, its prompt in pieces, its tokens, its logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from zllm_jax.buffers import RowSpec, aligned_empty
from zllm_jax.config import ModelConfig
from zllm_jax.runtime import (
    Chunk,
    Drawn,
    Row,
    Runner,
    StateShape,
    init_state,
    prefill_logits,
    programs,
)
from zllm_jax.values import Sampling

GREEDY = Sampling(temperature=0.0)
GREEDY_LOGPROBS = Sampling(temperature=0.0, logprobs=20)


_score = jax.jit(prefill_logits, static_argnames="cfg", donate_argnames="state")


@dataclass(frozen=True)
class Place:
    """What a sequence owns in a runner's state."""

    pages: tuple[int, ...]
    ring: int = 0
    slot: int = 0


class Scorer(Runner):
    """A runner that also says the logits of every position, and shows its state."""

    @property
    def bits(self) -> list[np.ndarray]:
        """Copies of every array of the state, as integers, so that NaN equals NaN."""
        leaves = [np.array(leaf) for leaf in jax.tree.leaves(self._state)]
        return [leaf.view(np.uint8) for leaf in leaves]

    @property
    def layers(self) -> tuple[Any, ...]:
        return self._state.layers

    @property
    def history(self) -> Any:
        return self._state.history

    def forget(self) -> None:
        """A fresh state, NaN wherever nobody has written."""
        self._state = init_state(
            self._spec, self._shape, self._cfg.vocab_size, self._dtype, float("nan"), mesh=self._mesh
        )

    def recover(self) -> None:
        """Forget that the device was lost."""
        self._failure = None

    @contextmanager
    def mutated(self, *, params: Any = None, cfg: ModelConfig | None = None) -> Iterator[None]:
        """Inside the block the steps compute with other parameters or another configuration, on the same state."""
        right = self._params, self._cfg
        self._params, self._cfg = params or self._params, cfg or self._cfg
        yield
        self._params, self._cfg = right

    def score(self, tokens: Sequence[int], place: Place, *, size: int, start: int = 0) -> np.ndarray:
        """f32[T, V]: the logits after each of `tokens`, computed in pieces of at most `size` in a bucket of `size`."""
        found = []
        for at in range(0, len(tokens), size):
            piece = tokens[at : at + size]
            inputs = programs.prefill_inputs(chunk(piece, start + at, place), size, self._shape.max_pages)
            self._state, logits = _score(params=self._params, state=self._state, inputs=inputs, cfg=self._cfg)
            found.append(np.asarray(logits)[: len(piece)])
        return np.concatenate(found)


def scorer(params: Any, cfg: ModelConfig, shape: StateShape, **options: Any) -> Scorer:
    """A runner whose pages and rings hold NaN until somebody writes them."""
    return Scorer(params, cfg, shape, fill=float("nan"), **options)


def scattered(shape: StateShape, seed: int, count: int | None = None) -> tuple[int, ...]:
    """`count` (all that a sequence may have) different pages in no order."""
    return tuple(np.random.default_rng(seed).permutation(shape.num_pages)[: count or shape.max_pages].tolist())


def pieces(tokens: Sequence[int], size: int) -> Iterator[tuple[int, Sequence[int]]]:
    for start in range(0, len(tokens), size):
        yield start, tokens[start : start + size]


def chunk(tokens: Sequence[int], start: int, place: Place, **changes: Any) -> Chunk:
    """A greedy piece of a prompt that is not its last."""
    plain = Chunk(
        tokens=tokens,
        start=start,
        pages=place.pages,
        ring=place.ring,
        slot=place.slot,
        sampling=GREEDY,
        seed=0,
        last=False,
    )
    return replace(plain, **changes)


def prefilled(
    runner: Runner,
    tokens: Sequence[int],
    place: Place,
    *,
    size: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    start: int = 0,
) -> Drawn:
    """The first token after a prompt that is computed in pieces of `size`; `start` tokens of it stand already."""
    drawn = None
    for at, piece in pieces(tokens[start:], size):
        last = start + at + len(piece) == len(tokens)
        drawn = runner.prefill(chunk(piece, start + at, place, sampling=sampling, seed=seed, last=last))
        assert (drawn is not None) == last
    assert drawn is not None
    return drawn


def row(token: int, position: int, place: Place, **changes: Any) -> Row:
    """A greedy row with a budget of one token."""
    plain = Row(
        token=token,
        position=position,
        pages=place.pages,
        ring=place.ring,
        slot=place.slot,
        sampling=GREEDY,
        seed=0,
        budget=1,
        stop_ids=(),
    )
    return replace(plain, **changes)


def continued(
    runner: Runner, first: Drawn, position: int, place: Place, count: int, *, steps: int = 4, **changes: Any
) -> list[Drawn]:
    """`count` tokens, `first` among them; it is fed at `position`. changes: those of the `Row`."""
    drawn = [first]
    while len(drawn) < count:
        at = position + len(drawn) - 1
        (more,) = runner.decode(
            [row(drawn[-1].token, at, place, budget=count - len(drawn), **changes)], min(steps, count - len(drawn))
        )
        drawn += more
    return drawn


def fed(runner: Runner, tokens: Sequence[int], place: Place, *, start: int = 0, **changes: Any) -> Drawn:
    """What is drawn after the last of `tokens`, each fed through a decode step of its own."""
    drawn: list[Drawn] = []
    for position, token in enumerate(tokens, start):
        ((one,),) = runner.decode([row(token, position, place, **changes)], 1)
        drawn.append(one)
    return drawn[-1]


def ids(drawn: Sequence[Drawn]) -> list[int]:
    return [one.token for one in drawn]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f64, over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def saved(runner: Runner, place: Place, num_tokens: int) -> dict[str, np.ndarray]:
    """A sequence's rows on the host, stage by stage and group by group, in arrays as its layout says."""
    rows = {
        name: np.empty([num_tokens if size is None else size for size in spec.shape], spec.dtype)
        for name, spec in runner.row_layout.items()
    }
    for stage in range(runner.capacity.num_stages):
        for start, pages in groups(runner, place, num_tokens):
            for name, part in runner.read_pages(stage, pages).items():
                here = along(rows[name], runner.row_layout[name], start, runner.capacity.group_tokens)
                here[...] = along(np.asarray(part), runner.row_layout[name], 0, num_tokens - start)
        for name, part in runner.read_ring(stage, place.ring).items():
            rows[name][...] = np.asarray(part)
    return rows


def restore(runner: Runner, rows: Mapping[str, np.ndarray], place: Place, num_tokens: int) -> None:
    """What `saved` returned, into the pages and the ring of a place, through room that is used again and again."""
    for stage in range(runner.capacity.num_stages):
        restore_stage(runner, stage, rows, place, num_tokens)


def restore_stage(runner: Runner, stage: int, rows: Mapping[str, np.ndarray], place: Place, num_tokens: int) -> None:
    mine = {name: spec for name, spec in runner.row_layout.items() if spec.stage == stage}
    room = {name: _room(runner, spec) for name, spec in mine.items() if spec.token_axis is not None}
    for start, pages in groups(runner, place, num_tokens):
        for name, part in room.items():
            here = along(rows[name], mine[name], start, runner.capacity.group_tokens)
            along(part, mine[name], 0, num_tokens - start)[...] = here
        runner.write_pages(stage, room, pages).wait()
        for part in room.values():
            part.fill(-1)
    fixed = {name: _aligned(rows[name]) for name, spec in mine.items() if spec.token_axis is None}
    copying = runner.write_ring(stage, fixed, place.ring)
    copying.wait()
    assert copying.done()


def groups(runner: Runner, place: Place, num_tokens: int) -> Iterator[tuple[int, Sequence[int]]]:
    """(first token, pages) of each transfer of a sequence's state."""
    offered = runner.capacity
    used = place.pages[: -(-num_tokens // offered.page_tokens)]
    for start, pages in pieces(used, offered.group_tokens // offered.page_tokens):
        yield start * offered.page_tokens, pages


def along(array: np.ndarray, spec: RowSpec, start: int, count: int) -> np.ndarray:
    """At most `count` tokens from `start` on."""
    assert spec.token_axis is not None
    return array[(slice(None),) * spec.token_axis + (slice(start, start + count),)]


def _room(runner: Runner, spec: RowSpec) -> np.ndarray:
    return aligned_empty([runner.capacity.group_tokens if size is None else size for size in spec.shape], spec.dtype)


def _aligned(array: np.ndarray) -> np.ndarray:
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy
