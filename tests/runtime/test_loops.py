"""The loop guard inside the steps: whose output it sees, what it takes from a draw, and that no path differs."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.fence.small_guard import SMALL
from tests.runtime import drive
from tests.runtime.drive import Place, Scorer
from zllm_jax.fence import FencePool, Vocabulary, compile_fence, compile_tokens
from zllm_jax.runtime import Fenced, Row, Runner, StateShape, Watched, count_compilations, init_params
from zllm_jax.testing import ByteTokenizer, tiny_config
from zllm_jax.values import Fence, Sampling

SHAPE = StateShape(num_pages=96, page_tokens=8, num_rings=3, num_slots=3, max_pages=24)
PLACES = [Place(tuple(range(24 * i, 24 * i + 24)), ring=i, slot=i) for i in range(3)]
TOKENIZER = ByteTokenizer()
VOCABULARY = Vocabulary(TOKENIZER.vocabulary(), TOKENIZER.eos_ids)
WORDS = np.array([chr(token).isalpha() and token < 128 for token in range(TOKENIZER.vocab_size)])
PROMPT = list(b"Say it.")
COUNT = 80
A, Z, DASH = b"aZ-"
WATCHED = Watched()


def only(token: int) -> Sampling:
    """Nothing but `token`, as long as it is allowed."""
    return Sampling(temperature=0.0, logit_bias=((token, 100.0),))


@pytest.fixture(scope="module")
def runner() -> Scorer:
    cfg = tiny_config("llama")
    made = drive.scorer(
        init_params(cfg, jax.random.key(0)),
        cfg,
        SHAPE,
        prefill_buckets=(8,),
        decode_buckets=(3,),
        decode_steps=16,
        fences=FencePool(VOCABULARY, 128),
        guard=SMALL,
        words=WORDS,
    )
    begun(made, PLACES[0], None)
    made.decode([drive.row(A, len(PROMPT), PLACES[0])], 1)
    return made


def begun(runner: Runner, place: Place, watch: Watched | None, **changes: object) -> int:
    """The first token after the prompt, in a slot that was begun."""
    runner.begin(place.slot, PROMPT)
    drawn = runner.prefill(drive.chunk(PROMPT, 0, place, last=True, watch=watch, **changes))
    assert drawn is not None
    return drawn.token


def generated(
    runner: Runner, place: Place, watch: Watched | None, *, steps: int = 4, count: int = COUNT, **changes: object
) -> list[int]:
    """`count` tokens of one row, alone."""
    out = [begun(runner, place, watch, **changes)]
    while len(out) < count:
        here = None if watch is None else watch.after(out)
        row = drive.row(out[-1], len(PROMPT) + len(out) - 1, place, budget=count - len(out), watch=here, **changes)
        (more,) = runner.decode([row], min(steps, count - len(out)))
        out += drive.ids(more)
    return out


def together(
    runner: Runner, rows: list[tuple[Watched | None, dict[str, object]]], count: int = COUNT
) -> list[list[int]]:
    """Each in its own place, in one batch."""
    outs = [[begun(runner, place, watch, **more)] for place, (watch, more) in zip(PLACES, rows, strict=False)]
    while len(outs[0]) < count:
        batch: list[Row] = []
        for out, place, (watch, more) in zip(outs, PLACES, rows, strict=False):
            here = None if watch is None else watch.after(out)
            batch.append(
                drive.row(out[-1], len(PROMPT) + len(out) - 1, place, budget=count - len(out), watch=here, **more)
            )
        for out, more_drawn in zip(outs, runner.decode(batch, min(4, count - len(outs[0]))), strict=True):
            out += drive.ids(more_drawn)
    return outs


def first_other(tokens: list[int], token: int) -> int:
    return next((i for i, one in enumerate(tokens) if one != token), -1)


@pytest.mark.parametrize("token, length", [(A, 13), (DASH, 21)], ids=["a word", "a symbol"])
def test_a_loop_is_left_sooner_the_more_it_says(runner: Scorer, token: int, length: int) -> None:
    """The repeated stretch, behind its first time; the first token of the output is part of it."""
    assert generated(runner, PLACES[0], None, sampling=only(token)) == [token] * COUNT
    watched = generated(runner, PLACES[0], WATCHED, sampling=only(token))
    assert first_other(watched, token) == length
    assert watched[length + 1] == token  # one token is excluded once
    assert runner.loops_broken(PLACES[0].slot) == sum(one != token for one in watched)


def test_a_slot_begins_anew(runner: Scorer) -> None:
    once = generated(runner, PLACES[1], WATCHED, sampling=only(A), count=30)
    assert runner.loops_broken(1) > 0
    assert generated(runner, PLACES[1], WATCHED, sampling=only(A), count=30) == once
    begun(runner, PLACES[1], WATCHED, sampling=only(A))
    assert runner.loops_broken(1) == 0


@pytest.mark.parametrize(
    "sampling", [drive.GREEDY, Sampling(logit_bias=((A, 14.0),)), only(A)], ids=["greedy", "warm", "one"]
)
def test_every_path_gives_the_same(runner: Scorer, sampling: Sampling) -> None:
    """Alone in several slots, one step a call or four, in a batch with a row that is not watched and another one."""
    alone = generated(runner, PLACES[0], WATCHED, sampling=sampling, seed=3)
    assert runner.loops_broken(0) > 0
    assert generated(runner, PLACES[2], WATCHED, sampling=sampling, seed=3, steps=1) == alone
    free = generated(runner, PLACES[1], None, sampling=only(DASH))
    rows = [(WATCHED, {"sampling": sampling, "seed": 3}), (None, {"sampling": only(DASH)})]
    assert together(runner, [*rows, (WATCHED, {"sampling": only(DASH)})]) == [
        alone,
        free,
        generated(runner, PLACES[2], WATCHED, sampling=only(DASH)),
    ]


@pytest.mark.slow
def test_a_row_that_is_not_watched_is_that_of_a_runner_without_a_guard(runner: Scorer) -> None:
    cfg = tiny_config("llama")
    bare = drive.scorer(
        init_params(cfg, jax.random.key(0)), cfg, SHAPE, prefill_buckets=(8,), decode_buckets=(1,), decode_steps=4
    )
    sampling = Sampling(temperature=0.7)
    assert generated(runner, PLACES[0], None, sampling=sampling) == generated(bare, PLACES[0], None, sampling=sampling)
    assert bare.loops_broken(0) == 0


def test_rows_that_are_idle_or_not_watched_leave_the_memory_as_it_is(runner: Scorer) -> None:
    """The padding of a batch stands in slot 0; a row that has stopped goes on being computed."""
    begun(runner, PLACES[0], WATCHED, sampling=only(A))
    before = remembered(runner, 0)
    rows = [
        drive.row(A, len(PROMPT), PLACES[1], budget=4, watch=WATCHED, sampling=only(A)),
        drive.row(A, len(PROMPT), PLACES[0], budget=4, sampling=only(A)),
    ]
    runner.begin(1, PROMPT)
    runner.decode(rows, 4)
    assert all(np.array_equal(one, two) for one, two in zip(remembered(runner, 0), before, strict=True))
    stopping = replace(rows[0], stop_ids=(A,))
    runner.begin(1, PROMPT)
    runner.decode([stopping, replace(rows[0], slot=2)], 4)
    recent = runner.history.guard.recent
    assert (recent[1] == A).sum() == 1
    assert (recent[2] == A).sum() == 4


def remembered(runner: Scorer, slot: int) -> list[np.ndarray]:
    return [np.array(part[slot]) for part in jax.tree.leaves(runner.history.guard)]


def test_no_program_is_compiled_between_watched_and_free_rows(runner: Scorer) -> None:
    with count_compilations() as count:
        for watch in (None, WATCHED, Watched(DASH, Z, inside=True), None):
            generated(runner, PLACES[0], watch, sampling=only(A), count=30)
    assert count.programs == 0


@pytest.mark.parametrize("steps", [1, 4, 16])
def test_thinking_that_only_loops_is_closed(runner: Scorer, steps: int) -> None:
    """After two loops were broken; outside of such a region, or once it is closed, nothing is."""
    inside = generated(runner, PLACES[0], Watched(DASH, Z, inside=True), sampling=only(A), steps=steps)
    outside = generated(runner, PLACES[0], Watched(DASH, Z), sampling=only(A), steps=steps)
    assert Z not in outside
    end = inside.index(Z)
    assert inside[:end] == outside[:end]
    assert sum(one != A for one in inside[:end]) == SMALL.end_after
    assert Z not in inside[end + 1 :]


def test_a_region_that_the_output_opens_is_closed_too(runner: Scorer) -> None:
    tokens = generated(runner, PLACES[0], Watched(A, Z), sampling=only(A), count=60)
    assert tokens.index(Z) == generated(runner, PLACES[0], Watched(DASH, Z, inside=True), sampling=only(A)).index(Z)


@pytest.mark.parametrize("pattern, used, left", [("a{60}", b"a", -1), ("b{60}", b"b", 0), ("[ab]{60}", b"ab", 13)])
def test_a_grammar_comes_first(runner: Scorer, pattern: str, used: bytes, left: int) -> None:
    """Where it leaves nothing but the loop, the loop goes on; else it is left within the grammar."""
    compiled = compile_fence(Fence(regex=pattern)).machine
    tables = compile_tokens(compiled, VOCABULARY)
    place, at = runner.load_fence(tables), compiled.begin
    watch = Watched(DASH, Z, inside=True)
    out = [begun(runner, PLACES[0], watch, sampling=only(A), fence=Fenced(place, at))]
    while len(out) < 30:
        at = compiled.run(bytes(out))
        row = drive.row(
            out[-1],
            len(PROMPT) + len(out) - 1,
            PLACES[0],
            budget=4,
            watch=watch,
            sampling=only(A),
            fence=Fenced(place, at),
        )
        out += drive.ids(runner.decode([row], 4)[0])
    runner.release_fence(tables)
    assert set(out) == set(used)
    assert first_other(out, A) == left


def test_a_guard_needs_to_know_the_words() -> None:
    cfg = tiny_config("llama")
    params = init_params(cfg, jax.random.key(0))
    for options in ({"guard": SMALL}, {"words": WORDS}, {"guard": SMALL, "words": WORDS[:-1]}):
        with pytest.raises(ValueError, match="259 tokens are words"):
            Runner(params, cfg, SHAPE, **options)
