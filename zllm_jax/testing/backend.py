"""A device that computes no model, and checks every state that it is handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from zllm_jax.buffers import ALIGNMENT, RowLayout, RowSpec
from zllm_jax.testing.models import made_up_logprob
from zllm_jax.values import Sampling

if TYPE_CHECKING:
    from zllm_jax.fence import HostMatcher, Place, TokenTables
    from zllm_jax.runtime import Capacity, Chunk, Copying, Drawn, Row

NextToken = Callable[[Sequence[int], Sampling, int], int]
_CHAIN_BITS = 62


def chained_token(history: Sequence[int], sampling: Sampling, seed: int) -> int:
    """What a `ScriptedBackend` draws unless told otherwise: any change in the history changes it. A byte, never EOS."""
    chain = 0 if sampling.temperature == 0.0 else seed
    for token in history:
        chain = _chained(chain, token)
    return (chain >> 24) % 256


def _chained(chain: int, token: int) -> int:
    return (chain * 6364136223846793005 + token * 2862933555777941757 + 1442695040888963407) % (1 << _CHAIN_BITS)


class ScriptedBackend:
    """A device without a model (`runtime.Backend`), which notices when it is handed a state that is not what it seems.

    The row of a token is (token, position, fingerprint of the history up to it); each stage keeps its own. Whenever a
    stage computes or continues a sequence, its rows under the page table must be one unbroken history, or
    `AssertionError` names the row: so a wrong page, a stale row, a page that another sequence wrote to, a ring at
    another position, or a stage that computes before its rows were written is seen at once. Of fences only those of the
    host are obeyed: where a script's token may not come, the next one that may.

    window: tokens of a ring that a sequence keeps besides its pages (0: none, the state can be cut anywhere).
    group_pages: of one transfer. next_token: the token that follows a history (prompt and output so far), given
    sampling and seed. before: called with the name of each call of `Backend` before it does anything; it may raise,
    wait or count. hold_copies: a copy into the state is done only once it is waited for or `end_copies` is called, and
    then its source must not have changed.
    """

    def __init__(
        self,
        *,
        num_pages: int = 32,
        page_tokens: int = 4,
        num_slots: int = 4,
        max_pages: int = 16,
        window: int = 0,
        num_rings: int = 8,
        chunk_sizes: tuple[int, ...] = (4, 16),
        decode_steps: int = 4,
        num_stages: int = 2,
        group_pages: int = 2,
        next_token: NextToken = chained_token,
        before: Callable[[str], None] = lambda name: None,
        hold_copies: bool = False,
    ) -> None:
        from zllm_jax.runtime import Capacity  # here, because the runtime imports jax and this module must not

        self.capacity: Capacity = Capacity(
            num_pages=num_pages,
            page_tokens=page_tokens,
            num_rings=num_rings if window else 0,
            num_slots=num_slots,
            max_pages=max_pages,
            page_bytes=num_stages * page_tokens * _ROW_BYTES,
            ring_bytes=num_stages * window * _ROW_BYTES,
            truncatable=not window,
            chunk_sizes=chunk_sizes,
            decode_steps=decode_steps,
            num_stages=num_stages,
            group_tokens=group_pages * page_tokens,
        )
        self.next_token, self.before, self.hold_copies = next_token, before, hold_copies
        self.fences: list[str] = []  # in use
        self.num_computed = 0  # tokens whose rows were computed here, by all stages
        self._stages = [_ScriptedStage(i, num_pages, page_tokens, num_rings, window) for i in range(num_stages)]
        self.row_layout: RowLayout = {name: spec for stage in self._stages for name, spec in stage.layout.items()}
        self._copies: list[_ScriptedCopy] = []

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        self.before("begin")

    def prefill(self, chunk: Chunk) -> Drawn | None:
        self.before("prefill")
        carry: Any = None
        for stage in self._stages:
            carry = self._prefill(chunk, stage, carry)
        return cast("Drawn | None", carry)

    def prefill_stage(self, chunk: Chunk, stage: int, carry: Any) -> Any:
        self.before("prefill_stage")
        return self._prefill(chunk, self._stages[stage], carry)

    def decode(self, rows: Sequence[Row], steps: int) -> list[list[Drawn]]:
        self.before("decode")
        if len(rows) > self.capacity.num_slots or len({row.slot for row in rows}) < len(rows):
            raise AssertionError(f"slots {[row.slot for row in rows]} of {self.capacity.num_slots}")
        return [self._decode(row, steps) for row in rows]

    def load_fence(self, tables: TokenTables) -> Place:
        """Nothing is masked here: what a script says is drawn."""
        from zllm_jax.fence import Place

        self.before("load_fence")
        self.fences.append(tables.digest)
        return Place(0, 0)

    def release_fence(self, tables: TokenTables) -> None:
        self.before("release_fence")
        self.fences.remove(tables.digest)

    def loops_broken(self, slot: int) -> int:
        """Nothing is excluded here either."""
        return 0

    def copy_page(self, source: int, target: int) -> None:
        self.before("copy_page")
        for stage in self._stages:
            stage.pages[target] = stage.pages[source]

    def copy_ring(self, source: int, target: int) -> None:
        self.before("copy_ring")
        for stage in self._stages:
            stage.rings[target] = stage.rings[source]

    def read_pages(self, stage: int, pages: Sequence[int]) -> dict[str, Any]:
        """Besides, each page must hold rows that were computed or restored: all of it, but for the last one's end."""
        self.before("read_pages")
        return self._stages[stage].read_pages(pages, self.capacity.group_tokens)

    def read_ring(self, stage: int, ring: int) -> dict[str, Any]:
        self.before("read_ring")
        return self._stages[stage].read_ring(ring)

    def write_pages(self, stage: int, rows: Mapping[str, np.ndarray], pages: Sequence[int]) -> Copying:
        self.before("write_pages")
        self._stages[stage].write_pages(rows, pages, self.capacity.group_tokens)
        return self._copying(rows)

    def write_ring(self, stage: int, rows: Mapping[str, np.ndarray], ring: int) -> Copying:
        self.before("write_ring")
        self._stages[stage].write_ring(rows, ring)
        return self._copying(rows)

    def end_copies(self) -> int:
        """End the copies that are held; returns how many. `AssertionError` if the source of one has changed."""
        held = [copy for copy in self._copies if not copy.done()]
        for copy in held:
            copy.wait()
        self._copies.clear()
        return len(held)

    def _copying(self, rows: Mapping[str, np.ndarray]) -> Copying:
        copy = _ScriptedCopy(rows)
        if self.hold_copies:
            self._copies.append(copy)
        else:
            copy.wait()
        return copy

    def _prefill(self, chunk: Chunk, stage: _ScriptedStage, carry: Any) -> Any:
        if len(chunk.tokens) > self.capacity.chunk_sizes[-1]:
            raise AssertionError(f"a chunk of {len(chunk.tokens)} tokens, at most {self.capacity.chunk_sizes[-1]}")
        if carry != (None if stage.index == 0 else (chunk, stage.index)):
            raise AssertionError(
                f"stage {stage.index} of {chunk} was handed {carry}, not what the stage before returned"
            )
        history = stage.history(chunk.pages, chunk.ring, chunk.start)
        for token in chunk.tokens:
            stage.append(history, token, chunk.pages, chunk.ring)
        if stage.index < len(self._stages) - 1:
            return chunk, stage.index + 1
        self.num_computed += len(chunk.tokens)
        return self._draw(history, chunk) if chunk.last else None

    def _decode(self, row: Row, steps: int) -> list[Drawn]:
        from zllm_jax.fence import HostMatcher

        histories = [stage.history(row.pages, row.ring, row.position) for stage in self._stages]
        if isinstance(row.fence, HostMatcher):
            steps = 1
        out: list[Drawn] = []
        token = row.token
        while len(out) < min(steps, row.budget) and (not out or token not in row.stop_ids):
            for stage, history in zip(self._stages, histories, strict=True):
                stage.append(history, token, row.pages, row.ring)
            self.num_computed += 1
            out.append(self._draw(histories[-1], row))
            token = out[-1].token
        return out

    def _draw(self, history: list[int], asked: Row | Chunk) -> Drawn:
        from zllm_jax.fence import HostMatcher
        from zllm_jax.runtime import Drawn

        sampling = asked.sampling
        token = self.next_token(history, sampling, asked.seed)
        if isinstance(asked.fence, HostMatcher):
            allowed = _allowed_ids(asked.fence)
            token = min(allowed, key=lambda one: (one < token, one))
        return Drawn(token, None if sampling.logprobs is None else made_up_logprob(token, sampling.logprobs))


def _allowed_ids(at: HostMatcher) -> list[int]:
    """The tokens that may come next; EOS where none may."""
    from zllm_jax.fence import unpack_bits

    found = np.flatnonzero(unpack_bits(at.mask(), len(at.shared.vocabulary))).tolist()
    return found or list(at.shared.eos_ids)


class _ScriptedCopy:
    """A copy that is made, but not said to be."""

    def __init__(self, rows: Mapping[str, np.ndarray]) -> None:
        self._rows, self._copied = rows, {name: part.copy() for name, part in rows.items()}
        self._done = False

    def done(self) -> bool:
        return self._done

    def wait(self) -> None:
        self._done = True
        for name, part in self._copied.items():
            if not np.array_equal(self._rows[name], part):
                raise AssertionError(f"{name} changed before its copy was done")
        self._copied = {}


class _ScriptedStage:
    """One stage's rows, i64[num_pages, page_tokens, 3], and rings, i64[num_rings, window, 3]."""

    def __init__(self, index: int, num_pages: int, page_tokens: int, num_rings: int, window: int) -> None:
        self.index, self._page_tokens, self._window = index, page_tokens, window
        self.pages = np.full((num_pages, page_tokens, 3), -1, np.int64)
        self.rings = np.full((num_rings, window, 3), -1, np.int64)
        kind = self.pages.dtype
        self._paged, self._ring = f"paged.rows.{index}", f"ring.rows.{index}"
        self.layout = {self._paged: RowSpec(kind, (None, 3), 0, index)}
        if window:
            self.layout[self._ring] = RowSpec(kind, (window, 3), None, index)

    def read_pages(self, pages: Sequence[int], group_tokens: int) -> dict[str, np.ndarray]:
        for i, page in enumerate(pages):
            last = i == len(pages) - 1
            self._check_page(page, 1 if last else self._page_tokens)
        rows = np.full((group_tokens, 3), -1, np.int64)
        rows[: len(pages) * self._page_tokens] = self.pages[list(pages)].reshape(-1, 3)
        return {self._paged: rows}

    def read_ring(self, ring: int) -> dict[str, np.ndarray]:
        return {self._ring: self.rings[ring].copy()} if self._window else {}

    def write_pages(self, rows: Mapping[str, np.ndarray], pages: Sequence[int], group_tokens: int) -> None:
        given = self._given(rows, self._paged, (group_tokens, 3))
        self.pages[list(pages)] = given[: len(pages) * self._page_tokens].reshape(-1, self._page_tokens, 3)

    def write_ring(self, rows: Mapping[str, np.ndarray], ring: int) -> None:
        if self._window:
            self.rings[ring] = self._given(rows, self._ring, (self._window, 3))

    def append(self, history: list[int], token: int, pages: Sequence[int], ring: int) -> None:
        position = len(history)
        before = int(self.pages[self._place(pages, position - 1)][2]) if position else 0
        row = token, position, _chained(before, token)
        self.pages[self._place(pages, position)] = row
        if self._window:
            self.rings[ring, position % self._window] = row
        history.append(token)

    def history(self, pages: Sequence[int], ring: int, num_tokens: int) -> list[int]:
        """The tokens of the first `num_tokens` rows, each row checked."""
        tokens: list[int] = []
        chain = 0
        for position in range(num_tokens):
            page, offset = self._place(pages, position)
            found = tuple(self.pages[page, offset].tolist())
            chain = _chained(chain, found[0])
            if found[1:] != (position, chain):
                raise AssertionError(
                    f"row {offset} of page {page} in stage {self.index} should hold position {position}, "
                    f"it holds {found}"
                )
            kept = self.rings[ring, position % self._window] if self._window else None
            if kept is not None and position >= num_tokens - self._window and tuple(kept.tolist()) != found:
                raise AssertionError(
                    f"row {position % self._window} of ring {ring} in stage {self.index} should hold position "
                    f"{position}, it holds {kept}"
                )
            tokens.append(found[0])
        return tokens

    def _given(self, rows: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
        if rows.keys() != {name} or rows[name].shape != shape or rows[name].ctypes.data % ALIGNMENT:
            found = {one: part.shape for one, part in rows.items()}
            raise AssertionError(f"stage {self.index} takes {name} of {shape} at a 64-byte address, not {found}")
        return rows[name]

    def _check_page(self, page: int, num_tokens: int) -> None:
        """The page's first rows continue each other, and begin where a page begins."""
        chain = None
        for offset, (token, position, found) in enumerate(self.pages[page, :num_tokens].tolist()):
            first = found if chain is None else _chained(chain, token)
            if position < 0 or position % self._page_tokens != offset or found != first:
                raise AssertionError(f"row {offset} of page {page} in stage {self.index} holds nothing to be read")
            chain = found

    def _place(self, pages: Sequence[int], position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._page_tokens)
        if index >= len(pages):
            raise AssertionError(f"position {position} is beyond the {len(pages)} pages of its sequence")
        return pages[index], offset


_ROW_BYTES = 3 * np.dtype(np.int64).itemsize
