"""What must hold whatever the model says: one computation, however it is cut, batched, moved or interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from tests.runtime import drive
from tests.runtime.drive import GREEDY_LOGPROBS, Place, Scorer
from zllm_jax.runtime import Drawn, StateShape, init_params
from zllm_jax.runtime.state import Pages
from zllm_jax.testing import tiny_config
from zllm_jax.values import Sampling

C, WINDOW, SIZE = 8, 16, 32  # tokens a page, window of gemma3's local layers, tokens of the larger prefill bucket
SHAPE = StateShape(num_pages=72, page_tokens=C, num_rings=5, num_slots=5, max_pages=8)
PROMPT = np.random.default_rng(7).integers(0, 256, 56).tolist()
OTHERS = [np.random.default_rng(8 + i).integers(0, 256, 11 + 9 * i).tolist() for i in range(2)]
PLACES = [Place(tuple(range(8 * i, 8 * i + 8))[:: (-1) ** i], ring=4 - i, slot=i) for i in range(4)]

# Largest difference of a log-probability between two ways to compute the same thing. The mutants below must exceed it.
TOLERANCE = {"float32": 2e-5}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def shared_runner(request: pytest.FixtureRequest) -> Scorer:
    cfg = tiny_config(request.param)
    assert cfg.window in (0, WINDOW)
    params = init_params(cfg, jax.random.key(0))
    return drive.scorer(params, cfg, SHAPE, prefill_buckets=(C, SIZE), decode_buckets=(1, 4))


@pytest.fixture
def runner(shared_runner: Scorer) -> Scorer:
    """Nothing is in its state but NaN."""
    shared_runner.forget()
    return shared_runner


@pytest.fixture
def strangers(runner: Scorer) -> list[Any]:
    """Rows of two other sequences under way, with sampling of their own."""
    rows = []
    for prompt, place, sampling in zip(
        OTHERS, PLACES[1:], (Sampling(temperature=0.7, top_k=9), drive.GREEDY), strict=False
    ):
        first = drive.prefilled(runner, prompt, place, size=SIZE, sampling=sampling, seed=5)
        rows.append(drive.row(first.token, len(prompt), place, sampling=sampling, seed=5))
    return rows


def difference(drawn: Drawn, logits: np.ndarray) -> float:
    """Largest error of the drawn token's 20 log-probabilities against logits f32[V]."""
    assert drawn.logprob is not None
    wanted = drive.log_softmax(logits)
    return max(abs(value - wanted[token]) for token, value in drawn.logprob.top)


def bits(drawn: Sequence[Drawn]) -> list[Any]:
    """Tokens and log-probabilities, to be compared exactly."""
    return [(one.token, one.logprob) for one in drawn]


def written(before: list[np.ndarray], runner: Scorer) -> Iterator[set[tuple[int, int]]]:
    """For each array of keys or values, the (page, token in page) or (ring, row) whose bits changed."""
    layers = len(jax.tree.leaves(runner.layers))
    for old, new in zip(before[:layers], runner.bits[:layers], strict=True):
        changed = (old != new).any(axis=(1, 3))
        yield {(int(a), int(b)) for a, b in np.argwhere(changed)}


BORDERS = sorted({n + d for n in (C, WINDOW, SIZE, 40) for d in (-1, 0, 1)} | {1, 2, 55})


@pytest.mark.parametrize("n", BORDERS)
def test_prefill_then_decode_is_a_longer_prefill(runner: Scorer, strangers: list[Any], n: int) -> None:
    wanted = runner.score(PROMPT[: n + 1], PLACES[3], size=SIZE)[-1]
    drive.prefilled(runner, PROMPT[:n], PLACES[0], size=SIZE)
    row = drive.row(PROMPT[n], n, PLACES[0], sampling=GREEDY_LOGPROBS)
    ((drawn,), *_) = runner.decode([row, *strangers], 1)
    assert drawn.token == wanted.argmax()
    assert difference(drawn, wanted) < TOLERANCE["float32"]


@pytest.mark.parametrize("mutant", ["scale 2 % off", "values 10 % off"])
def test_the_tolerance_rejects(runner: Scorer, mutant: str) -> None:
    """One decode step with attention slightly wrong. The stored values stay right: a common factor Gemma norms away."""
    n = 24
    params, cfg = runner._params, runner._cfg
    if mutant == "scale 2 % off":
        wrong: dict[str, Any] = {"cfg": replace(cfg, query_scale=1.02 * cfg.head_dim**-0.5)}
    else:
        layers = tuple({**layer, "wv": layer["wv"] * np.float32(1.1)} for layer in params["layers"])
        wrong = {"params": {**params, "layers": layers}}
    wanted = runner.score(PROMPT[: n + 1], PLACES[3], size=SIZE)[-1]
    drive.prefilled(runner, PROMPT[:n], PLACES[0], size=SIZE)
    with runner.mutated(**wrong):
        drawn = drive.fed(runner, PROMPT[n : n + 1], PLACES[0], start=n, sampling=GREEDY_LOGPROBS)
    assert difference(drawn, wanted) > 10 * TOLERANCE["float32"]


@pytest.mark.parametrize("size", [C, 5, 1])
def test_chunked_is_whole(runner: Scorer, size: int) -> None:
    drive.prefilled(runner, PROMPT, PLACES[0], size=SIZE)
    whole = drive.saved(runner, PLACES[0], len(PROMPT))
    first = drive.prefilled(runner, PROMPT, PLACES[1], size=size, sampling=GREEDY_LOGPROBS)
    for name, rows in drive.saved(runner, PLACES[1], len(PROMPT)).items():
        np.testing.assert_allclose(rows, whole[name], rtol=0, atol=1e-4, err_msg=name)
    wanted = runner.score(PROMPT, PLACES[2], size=SIZE)[-1]
    assert difference(first, wanted) < TOLERANCE["float32"]


def test_a_row_computes_the_same_bits_in_any_company(runner: Scorer, strangers: list[Any]) -> None:
    first = drive.prefilled(runner, PROMPT[:20], PLACES[0], size=SIZE)
    idle = drive.row(0, 0, PLACES[0], budget=0)
    row = drive.row(first.token, 20, PLACES[0], sampling=GREEDY_LOGPROBS)
    (alone, *_) = runner.decode([row, idle], 1)
    (_, _, among) = runner.decode([*strangers, row], 1)  # the same row of the state is written with the same bits
    assert bits(alone) == bits(among)


def test_a_batch_draws_what_its_rows_draw_alone(runner: Scorer) -> None:
    """In another bucket another program runs, whose sums may round differently: the tokens are the same."""
    samplings = [drive.GREEDY, Sampling(temperature=0.8), Sampling(temperature=1.2, top_p=0.9)]

    def rows() -> list[Any]:
        ready = []
        for i, sampling in enumerate(samplings):
            place, count = PLACES[i], 10 + 7 * i
            first = drive.prefilled(runner, PROMPT[:count], place, size=SIZE, sampling=sampling, seed=i)
            ready.append(drive.row(first.token, count, place, sampling=sampling, seed=i, budget=4))
        return ready

    together = runner.decode(rows(), 4)
    alone = [runner.decode([row], 4)[0] for row in rows()]
    assert [drive.ids(one) for one in alone] == [drive.ids(one) for one in together]


def test_restored_continues_with_the_bits_of_the_never_evicted(runner: Scorer) -> None:
    first = drive.prefilled(runner, PROMPT[:27], PLACES[0], size=SIZE)
    drawn = drive.continued(runner, first, 27, PLACES[0], 4)
    kept = 27 + 3  # the last token drawn is not fed yet
    rows = drive.saved(runner, PLACES[0], kept)
    stayed = drive.continued(runner, drawn[-1], kept, PLACES[0], 12, sampling=GREEDY_LOGPROBS)
    runner.forget()
    elsewhere = Place(PLACES[2].pages[::-1], ring=1, slot=3)
    drive.restore(runner, rows, elsewhere, kept)
    for name, array in drive.saved(runner, elsewhere, kept).items():
        np.testing.assert_array_equal(array, rows[name], err_msg=name)
    restored = drive.continued(runner, drawn[-1], kept, elsewhere, 12, sampling=GREEDY_LOGPROBS)
    assert bits(restored) == bits(stayed)


def test_a_state_is_read_as_its_layout_says(runner: Scorer) -> None:
    drive.prefilled(runner, PROMPT[:19], PLACES[0], size=SIZE)
    offered, found = runner.capacity, set()
    for stage in range(offered.num_stages):
        rows = {**runner.read_pages(stage, PLACES[0].pages[:3]), **runner.read_ring(stage, PLACES[0].ring)}
        for name, part in rows.items():
            spec = runner.row_layout[name]
            assert (spec.stage, spec.dtype) == (stage, part.dtype)
            assert part.shape == tuple(offered.group_tokens if size is None else size for size in spec.shape)
            assert (spec.token_axis is None) == (None not in spec.shape)
            real = part if spec.token_axis is None else drive.along(np.asarray(part), spec, 0, 19)
            assert np.isfinite(real).all(), name
        found |= rows.keys()
    assert found == runner.row_layout.keys()


def test_padding_of_a_chunk_never_writes(runner: Scorer) -> None:
    place = PLACES[0]
    drive.prefilled(runner, PROMPT[:6], place, size=C)
    before = runner.bits
    drive.prefilled(runner, PROMPT[:11], place, size=SIZE, start=6)  # 5 tokens in a bucket of 32
    for layer, changed in zip(np.repeat(runner.layers, 2), written(before, runner), strict=True):
        if isinstance(layer, Pages):
            assert changed == {(place.pages[p // C], p % C) for p in range(6, 11)}
        else:
            assert changed == {(place.ring, p % WINDOW) for p in range(6, 11)}


def test_a_chunk_longer_than_the_window_fills_one_ring(runner: Scorer) -> None:
    before = runner.bits
    drive.prefilled(runner, PROMPT[:30], PLACES[0], size=SIZE)
    for layer, changed in zip(np.repeat(runner.layers, 2), written(before, runner), strict=True):
        if not isinstance(layer, Pages):
            assert changed == {(PLACES[0].ring, r) for r in range(WINDOW)}


def test_idle_rows_never_write(runner: Scorer, strangers: list[Any]) -> None:
    before = runner.bits
    assert runner.decode([replace(row, budget=0) for row in strangers], 4) == [[], []]
    for old, new in zip(before, runner.bits, strict=True):
        np.testing.assert_array_equal(old, new)


def test_warmup_touches_nothing_that_is_owned(runner: Scorer, strangers: list[Any]) -> None:
    before = runner.bits
    runner.warmup()
    for changed in written(before, runner):
        assert changed == set()
    for old, new in zip(before[-2:], runner.bits[-2:], strict=True):  # what penalties need
        np.testing.assert_array_equal(old, new)


def test_several_steps_are_single_steps(runner: Scorer) -> None:
    first = drive.prefilled(runner, PROMPT[:13], PLACES[0], size=SIZE)
    at_once = drive.continued(runner, first, 13, PLACES[0], 9, sampling=GREEDY_LOGPROBS)
    after = runner.bits
    first = drive.prefilled(runner, PROMPT[:13], PLACES[0], size=SIZE)
    singly = drive.continued(runner, first, 13, PLACES[0], 9, steps=1, sampling=GREEDY_LOGPROBS)
    assert bits(singly) == bits(at_once)
    for old, new in zip(after[: len(jax.tree.leaves(runner.layers))], runner.bits, strict=False):
        np.testing.assert_array_equal(old, new)


def test_a_row_ends_at_its_stop_id_or_budget_and_the_others_go_on(runner: Scorer) -> None:
    first = drive.prefilled(runner, PROMPT[:9], PLACES[0], size=SIZE)
    tokens = drive.ids(drive.continued(runner, first, 9, PLACES[0], 5))
    stop = tokens[2]
    ends = tokens.index(stop, 1)  # the first time it is drawn in a decode step
    runner.forget()
    rows = []
    for place, changes in zip(PLACES, ({"stop_ids": (300, stop)}, {"budget": 3}, {}), strict=False):
        drive.prefilled(runner, PROMPT[:9], place, size=SIZE)
        rows.append(drive.row(first.token, 9, place, **{"budget": 4, **changes}))
    before = runner.bits
    stopped, spent, full = (drive.ids(one) for one in runner.decode(rows, 4))
    assert stopped == tokens[1 : ends + 1]
    assert spent == tokens[1:4]
    assert full == tokens[1:5]
    fed = [len(stopped), len(spent), len(full)]
    for layer, changed in zip(np.repeat(runner.layers, 2), written(before, runner), strict=True):
        if isinstance(layer, Pages):
            assert changed == {
                (place.pages[p // C], p % C) for place, n in zip(PLACES, fed, strict=False) for p in range(9, 9 + n)
            }


def test_a_row_with_more_stop_ids_than_the_device_knows_ends_at_any_of_them(runner: Scorer) -> None:
    """It runs a step a call, so that the caller sees each token before another is fed."""
    first = drive.prefilled(runner, PROMPT[:9], PLACES[0], size=SIZE)
    tokens = drive.ids(drive.continued(runner, first, 9, PLACES[0], 3))
    many = (*range(1000, 1000 + 20), tokens[1])
    (drawn,) = runner.decode([drive.row(first.token, 9, PLACES[0], budget=4, stop_ids=many)], 4)
    assert drive.ids([first, *drawn]) == tokens[:2]


def test_fewer_steps_than_compiled(runner: Scorer) -> None:
    first = drive.prefilled(runner, PROMPT[:9], PLACES[0], size=SIZE)
    (drawn,) = runner.decode([drive.row(first.token, 9, PLACES[0], budget=4)], 2)
    assert len(drawn) == 2


def test_a_copied_page_and_ring_carry_a_fork(runner: Scorer) -> None:
    """A sequence shares its whole pages and copies its last partial page and its ring: both continue alike."""
    prompt = PROMPT[:21]
    first = drive.prefilled(runner, prompt, PLACES[0], size=SIZE)
    fork = Place((*PLACES[0].pages[:2], *PLACES[1].pages[2:]), ring=PLACES[1].ring, slot=1)
    before = runner.bits
    runner.copy_page(PLACES[0].pages[2], fork.pages[2])
    if not runner.capacity.truncatable:
        runner.copy_ring(PLACES[0].ring, fork.ring)
    for changed in written(before, runner):
        assert {owner for owner, _ in changed} <= {fork.pages[2], fork.ring}
    kept = drive.continued(runner, first, 21, PLACES[0], 8, sampling=GREEDY_LOGPROBS)
    forked = drive.continued(runner, first, 21, fork, 8, sampling=GREEDY_LOGPROBS)
    assert bits(forked) == bits(kept)


def test_capacity_is_what_the_arrays_take(runner: Scorer) -> None:
    offered = runner.capacity
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.layers))
    assert stored == offered.num_pages * offered.page_bytes + offered.num_rings * offered.ring_bytes
    history = SHAPE.num_slots * tiny_config("llama").vocab_size * (1 + 4)
    assert runner.state_bytes == stored + history


def test_misuse_is_refused(runner: Scorer) -> None:
    with pytest.raises(ValueError, match=f"{SIZE + 1} tokens exceeds the largest bucket, {SIZE}"):
        drive.prefilled(runner, PROMPT[: SIZE + 1], PLACES[0], size=SIZE + 1)
    with pytest.raises(ValueError, match="5 rows exceed the largest decode bucket, 4"):
        runner.decode([drive.row(0, 0, PLACES[0])] * 5, 1)
    with pytest.raises(ValueError, match="33 pages, but a transfer moves at most 32"):
        runner.read_pages(0, range(33))
    with pytest.raises(ValueError, match="4 pages cannot hold one sequence of 5 pages"):
        StateShape(num_pages=4, page_tokens=C, num_rings=1, num_slots=1, max_pages=5)


def test_more_pages_than_a_transfer_moves(runner: Scorer) -> None:
    """Three transfers a stage, the last of one page, through one room."""
    assert runner.capacity.group_tokens == 32 * C
    num_tokens, place = 64 * C + 3, Place(drive.scattered(SHAPE, seed=3, count=65), ring=2)
    random = np.random.default_rng(0)
    rows = {
        name: random.standard_normal([num_tokens if size is None else size for size in spec.shape]).astype(spec.dtype)
        for name, spec in runner.row_layout.items()
    }
    drive.restore(runner, rows, place, num_tokens)
    for name, array in drive.saved(runner, place, num_tokens).items():
        np.testing.assert_array_equal(array, rows[name], err_msg=name)
