"""Rows whose masks come from the host: drawn as the device's own tables would, beside rows of every other kind."""

from __future__ import annotations

import jax
import pytest

from tests.runtime import drive
from tests.runtime.drive import Place, Scorer
from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import (
    HostMatcher,
    HostVocabulary,
    TokenTables,
    Vocabulary,
    compile_tokens,
    lark,
    machine_of,
    regular,
)
from zllm_jax.runtime import Fenced, Row, StateShape, count_compilations, init_params, programs
from zllm_jax.testing import ByteTokenizer, tiny_config
from zllm_jax.values import Sampling

SHAPE = StateShape(num_pages=64, page_tokens=8, num_rings=4, num_slots=4, max_pages=16)
PLACES = [Place(tuple(range(16 * i, 16 * i + 16)), ring=i, slot=i) for i in range(3)]
TOKENIZER = ByteTokenizer()
VOCABULARY = Vocabulary(TOKENIZER.vocabulary(), TOKENIZER.eos_ids)
EOS = TOKENIZER.eos_id
PROMPT = list(b"Say it.")
WARM = Sampling(temperature=1.5)
PENALISED = Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
PATTERN = "(ab|c[0-9]{2}){3,12}"
GRAMMAR = lark("start: part{3,12}\npart: /ab/ | /c[0-9]{2}/\n")


@pytest.fixture
def runner(fenced_runner: Scorer) -> Scorer:
    return fenced_runner


@pytest.fixture(scope="module")
def begin() -> HostMatcher:
    return HostVocabulary(VOCABULARY.tokens, VOCABULARY.eos_ids).matcher(GRAMMAR)


@pytest.fixture(scope="module")
def tables() -> TokenTables:
    return compile_tokens(machine_of(regular.fullmatch_regex(PATTERN)), VOCABULARY)


def row(
    token: int,
    position: int,
    place: Place,
    fence: Fenced | HostMatcher | None,
    *,
    seed: int = 7,
    sampling: Sampling = WARM,
) -> Row:
    return drive.row(token, position, place, budget=9, stop_ids=(EOS,), sampling=sampling, seed=seed, fence=fence)


def generated(
    runner: Scorer, fence: Fenced | HostMatcher, tables: TokenTables, place: Place, sampling: Sampling = WARM
) -> list[int]:
    """The fenced tokens to EOS, one a call."""
    runner.begin(place.slot, PROMPT)
    first = runner.prefill(drive.chunk(PROMPT, 0, place, last=True, sampling=sampling, seed=7, fence=fence))
    assert first is not None
    drawn = [first.token]
    while drawn[-1] != EOS:
        if isinstance(fence, HostMatcher):
            fence = fence.advance(drawn[-1])
        else:
            fence = Fenced(fence.place, tables.machine.run(VOCABULARY.tokens[drawn[-1]], fence.at))
        ((one,),) = runner.decode([row(drawn[-1], len(PROMPT) + len(drawn) - 1, place, fence, sampling=sampling)], 1)
        drawn.append(one.token)
    return drawn


@pytest.mark.parametrize("sampling", [WARM, PENALISED], ids=["warm", "penalised"])
def test_the_host_draws_what_the_device_draws(
    runner: Scorer, begin: HostMatcher, tables: TokenTables, sampling: Sampling
) -> None:
    where = runner.load_fence(tables)
    drawn = generated(runner, begin, tables, PLACES[0], sampling)
    assert drawn == generated(runner, Fenced(where, tables.machine.begin), tables, PLACES[1], sampling)
    assert tables.machine.accepts(bytes(drawn[:-1]))
    runner.release_fence(tables)


def test_rows_of_every_kind_share_a_batch(runner: Scorer, begin: HostMatcher, tables: TokenTables) -> None:
    """One token each, whatever the steps that were wanted, and the same as alone."""
    fences = [begin, Fenced(runner.load_fence(tables), tables.machine.begin), None]
    alone, rows = [], []
    for i, (place, fence) in enumerate(zip(PLACES, fences, strict=True)):
        runner.prefill(drive.chunk(PROMPT[:-1], 0, place))
        rows.append(row(PROMPT[-1], len(PROMPT) - 1, place, fence, seed=i))
        alone.append(drive.ids(runner.decode([rows[-1]], 4)[0])[:1])
    for place in PLACES:
        runner.prefill(drive.chunk(PROMPT[:-1], 0, place))
    together = [drive.ids(one) for one in runner.decode(rows, 4)]
    assert together == alone
    assert together[0][0] in b"ac"
    runner.release_fence(tables)


def test_the_mask_is_asked_for_once_the_layers_are_under_way(
    runner: Scorer, begin: HostMatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(name: str, call: object) -> object:
        def noting(*args: object, **options: object) -> object:
            order.append(name)
            return call(*args, **options)  # type: ignore[operator]

        return noting

    runner.prefill(drive.chunk(PROMPT[:-1], 0, PLACES[0]))
    for name in ("run_stage", "draw_rows"):
        monkeypatch.setattr(programs, name, noted(name, getattr(programs, name)))
    monkeypatch.setattr(HostMatcher, "mask", noted("mask", HostMatcher.mask))
    runner.decode([row(PROMPT[-1], len(PROMPT) - 1, PLACES[0], begin)], 1)
    stages = runner.capacity.num_stages
    assert order == ["run_stage"] * stages + ["mask", "draw_rows"]


def test_a_row_that_is_stuck_draws_eos(runner: Scorer, begin: HostMatcher) -> None:
    dead = begin.advance(ord("z"))
    assert dead.dead
    runner.prefill(drive.chunk(PROMPT[:-1], 0, PLACES[0]))
    assert drive.ids(runner.decode([row(PROMPT[-1], len(PROMPT) - 1, PLACES[0], dead)], 1)[0]) == [EOS]


def test_nothing_is_compiled_for_it(runner: Scorer, begin: HostMatcher, tables: TokenTables) -> None:
    with count_compilations() as count:
        generated(runner, begin, tables, PLACES[2])
        runner.decode([row(PROMPT[-1], len(PROMPT) - 1, place, begin) for place in PLACES], 4)
    assert count.programs == 0


def test_a_runner_without_a_pool_says_so(begin: HostMatcher) -> None:
    cfg = tiny_config("llama")
    bare = drive.scorer(init_params(cfg, jax.random.key(0)), cfg, SHAPE, prefill_buckets=(16,), decode_buckets=(1,))
    with pytest.raises(UnsupportedGrammar, match="fence_states is 0"):
        bare.decode([row(1, 0, PLACES[0], begin)], 1)
