"""Runs that a fence forces are computed as chunks, and are tokens of the output like any other to everybody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.scheduler.device import Bench, result
from zllm_jax.fence import ForcedRuns, TokenTables, Vocabulary, compile_tokens, machine_of
from zllm_jax.fence.regular import fullmatch_regex
from zllm_jax.runtime import Watched
from zllm_jax.testing import ByteTokenizer
from zllm_jax.values import Sampling, Status, Tier

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_id
VOCABULARY = Vocabulary(TOKENIZER.vocabulary(), TOKENIZER.eos_ids)
RUNS = ForcedRuns(VOCABULARY, lambda text: [list(text.encode())])
PROMPT = list(b"Call it. ")
WHOLE = b"first=b;second=99;the end"
FORCED = b"first=;second=the end"


def tables_of(pattern: str) -> TokenTables:
    return compile_tokens(machine_of(fullmatch_regex(pattern)), VOCABULARY)


TABLES = tables_of("first=(a|b);second=[0-9]{1,4};the end")


def saying(text: bytes) -> Callable[[Sequence[int], Sampling, int], int]:
    """A device that draws `text` byte by byte, then EOS."""

    def next_token(history: Sequence[int], sampling: Sampling, seed: int) -> int:
        said = bytes(history[len(PROMPT) :])
        assert text.startswith(said), said
        return text[len(said)] if len(said) < len(text) else EOS

    return next_token


def bench_of(text: bytes = WHOLE, **options: Any) -> Bench:
    return Bench(**{"next_token": saying(text), "decode_steps": 1, **options})


KINDS = {"paged": {}, "ring": {"window": 4}, "stages": {"num_stages": 3, "page_tokens": 8}}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = bench_of(**request.param)
    yield made
    made.close()


def fenced(tables: TokenTables = TABLES, **options: Any) -> dict[str, Any]:
    return {"fence": tables, "forced": RUNS, "stop_ids": (EOS,), **options}


def test_runs_are_chunks_and_the_output_is_what_it_was(bench: Bench) -> None:
    tokens, outcome = bench.run(PROMPT, 40, **fenced())
    assert bytes(tokens[:-1]) == WHOLE
    assert tokens[-1] == EOS
    assert outcome.status is Status.COMPLETED
    assert outcome.telemetry.forced_tokens == len(FORCED)
    assert outcome.usage.generated_tokens == len(tokens)
    drawn = len(tokens) - len(FORCED)
    assert bench.device.calls.count("decode") == drawn - 3  # each chunk draws the token behind it
    plain, outcome = bench.run(PROMPT, 40, **fenced(forced=None, cache=False))
    assert plain == tokens
    assert outcome.telemetry.forced_tokens == 0


def test_the_state_behind_a_run_is_kept_and_found_again(bench: Bench) -> None:
    tokens, _ = bench.run(PROMPT, 40, **fenced())
    bench.device.next_token = lambda *_: EOS
    _, outcome = bench.run([*PROMPT, *tokens, 1, 2], 4, stop_ids=(EOS,))
    assert outcome.usage.tier is Tier.RESIDENT
    assert outcome.usage.cached_tokens == len(PROMPT) + len(tokens) - 1


@pytest.mark.parametrize("max_tokens", [1, 2, 6, 7, 8, 14, 15, 16, 24])
def test_the_budget_cuts_a_run_and_its_last_token_is_drawn(bench: Bench, max_tokens: int) -> None:
    tokens, outcome = bench.run(PROMPT, max_tokens, **fenced())
    assert bytes(tokens) == WHOLE[:max_tokens]
    assert outcome.status is Status.TRUNCATED
    assert outcome.telemetry.forced_tokens < max_tokens
    assert outcome.telemetry.saved_steps == 0


def test_a_run_longer_than_a_chunk() -> None:
    text = b"abcdefghijklmnopqrstuvwxyz" * 2
    bench = bench_of(text + b"!", chunk_sizes=(4, 16))
    tokens, outcome = bench.run(PROMPT, 55, **fenced(tables_of(text.decode() + "[!?]")))
    assert bytes(tokens[:-1]) == text + b"!"
    assert outcome.telemetry.forced_tokens == len(text)
    assert bench.device.calls.count("decode") == 1
    bench.close()


NO_RUNS = {
    "log-probabilities": {"sampling": Sampling(temperature=0.0, logprobs=0)},
    "penalties": {"sampling": Sampling(temperature=0.0, frequency_penalty=0.5)},
    "loop guard": {"watch": Watched()},
}


@pytest.mark.parametrize("options", NO_RUNS.values(), ids=NO_RUNS)
def test_who_needs_to_see_each_token_draws_each(options: dict[str, Any]) -> None:
    bench = bench_of()
    tokens, outcome = bench.run(PROMPT, 40, **fenced(**options))
    assert bytes(tokens[:-1]) == WHOLE
    assert outcome.telemetry.forced_tokens == 0
    bench.close()


@pytest.mark.parametrize("window, forced", [(0, len(FORCED)), (4, 0)])
def test_who_may_stop_anywhere_has_runs_only_where_the_state_can_be_cut(window: int, forced: int) -> None:
    bench = bench_of(window=window)
    _, outcome = bench.run(PROMPT, 40, **fenced(single_step=True))
    assert outcome.telemetry.forced_tokens == forced
    bench.close()


def test_a_stop_within_a_run_keeps_what_came_before_it() -> None:
    bench = bench_of()
    bench.device.held = True
    ticket = bench.submit(PROMPT, 40, **fenced(single_step=True))
    bench.device.wait_for_call()
    bench.device.let(2)  # the fence is loaded, the prompt computed with the first run behind it
    first = ticket.wait()
    assert [bytes(one.token for one in event) for event in first] == [b"first=b"]
    ticket.stop_after(3)
    bench.device.let_go()
    tokens, outcome = result(ticket)
    assert outcome.status is Status.COMPLETED
    assert (outcome.usage.generated_tokens, outcome.telemetry.forced_tokens) == (3, 3)
    assert tokens == list(b";second=9")[: len(tokens)]
    bench.close()


def test_a_cancelled_run_leaves_nothing_behind(bench: Bench) -> None:
    bench.device.held = True
    ticket = bench.submit(PROMPT, 40, **fenced())
    bench.device.wait_for_call()
    ticket.cancel()
    bench.device.let_go()
    _, outcome = result(ticket)
    assert outcome.status is Status.CANCELED
