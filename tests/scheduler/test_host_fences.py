"""Sequences whose fence a host follows: alone or beside others, to their end or to a dead one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.scheduler.device import GREEDY, Bench, answer, result
from zllm_jax.fence import HostMatcher, HostVocabulary, lark
from zllm_jax.testing import ByteTokenizer
from zllm_jax.values import Sampling, Status

Make = Callable[..., Bench]
EOS = ByteTokenizer.eos_id


@pytest.fixture(scope="module")
def vocabulary() -> HostVocabulary:
    tokenizer = ByteTokenizer()
    return HostVocabulary(tokenizer.vocabulary(), tokenizer.eos_ids)


@pytest.fixture
def brackets(vocabulary: HostVocabulary) -> HostMatcher:
    return vocabulary.matcher(lark('start: "(" start? ")"\n'))


def opening(history: Sequence[int], sampling: Sampling, seed: int) -> int:
    """Thirty brackets are opened and closed; when it ends is the grammar's doing."""
    return ord("(") if history.count(ord("(")) < 30 else ord(")")


def test_a_fence_is_followed_to_its_end(bench: Make, brackets: HostMatcher) -> None:
    one = bench(next_token=opening, max_pages=32, num_pages=64)
    tokens, outcome = one.run([1, 2, 3], 90, fence=brackets, stop_ids=(EOS,))
    assert bytes(tokens[:-1]) == b"(" * 30 + b")" * 30
    assert tokens[-1] == EOS
    assert (outcome.status, outcome.telemetry.finish, outcome.telemetry.fence) == (Status.COMPLETED, "eos", "host")


def test_others_beside_it_say_what_they_say_alone(bench: Make, brackets: HostMatcher) -> None:
    one = bench(max_pages=32, num_pages=64)
    alone, _ = one.run([7], 12, fence=brackets, stop_ids=(EOS,))
    tickets = [one.submit([seed], 12) for seed in range(3)]
    fenced = one.submit([7], 12, fence=brackets, stop_ids=(EOS,))
    assert [result(ticket)[0] for ticket in tickets] == [answer([seed], 12) for seed in range(3)]
    assert result(fenced)[0] == alone


def test_a_text_that_cannot_go_on_is_a_fault_with_its_reason(bench: Make, vocabulary: HostVocabulary) -> None:
    grammar = vocabulary.matcher(lark('start: "a" ' + '"b"? ' * 3000 + "\n"))
    tokens, outcome = bench().run([1], 8, fence=grammar, stop_ids=(EOS,), sampling=GREEDY)
    assert tokens[-1] == EOS
    assert (outcome.status, outcome.conversation) == (Status.FAULTED, None)
    assert outcome.error is not None
    assert "left no token to go on with: " in outcome.error


def test_a_sequence_without_a_fence_says_so(bench: Make) -> None:
    assert bench().run([1], 2)[1].telemetry.fence == ""
