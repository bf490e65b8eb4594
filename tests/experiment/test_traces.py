"""Traces: the generator keeps to the statistics that it names, files are read whole or refused by line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from zllm_jax.errors import ConfigError
from zllm_jax.experiment.cache_sim import Costs, run_unlimited
from zllm_jax.experiment.traces import Agents, Step, Trace, _merged, make_trace, read_mooncake

COSTS = Costs(prefill_token_s=1.0, prefill_position_s=0.0, restore_bytes_s=1.0, write_bytes_s=1.0, token_bytes=1)
HANDMADE = Path("tests/data/traces/handmade.jsonl")


def reused(trace: Trace) -> float:
    """The share of all prompt tokens that unlimited memory reuses."""
    served = run_unlimited(trace, COSTS, 128).served
    return sum(one.cached_tokens for one in served) / sum(one.prompt_tokens for one in served)


def same(a: Trace, b: Trace) -> bool:
    pairs = zip(a.asks, b.asks, strict=True)
    return all(np.array_equal(x.prompt, y.prompt) and np.array_equal(x.reply, y.reply) for x, y in pairs)


def test_a_seed_is_a_trace() -> None:
    settings = Agents(name="t", requests=200)
    assert same(make_trace(settings, 1), make_trace(settings, 1))
    assert not same(make_trace(settings, 1), make_trace(settings, 2))


def test_chats_and_calls_are_as_long_and_as_often_reused_as_published() -> None:
    trace = make_trace(Agents(name="t", requests=3000, chats=0.3, calls=0.7, forks=0.0), 5)
    lengths = [ask.prompt_tokens for ask in trace.asks]
    assert 6500 < np.mean(lengths) < 9000  # 7,590 in Mooncake
    assert 140 < np.mean([len(ask.reply) for ask in trace.asks]) < 220  # 182 there
    assert 0.48 < reused(trace) < 0.64  # 54 and 62 % in arXiv 2506.02634


def test_agents_reuse_as_much_as_published() -> None:
    trace = make_trace(Agents(name="t", requests=1500, chats=0.0, calls=0.0, session_every_s=30.0), 5)
    assert 0.9 < reused(trace) < 0.97  # 94 % in the traces of Codex


def test_prompts_stay_below_the_limit() -> None:
    settings = Agents(name="t", requests=800, chats=0.2, calls=0.2, max_tokens=20_000, branches=1.0, forks=0.2)
    assert max(ask.prompt_tokens for ask in make_trace(settings, 3).asks) < 20_000


def test_forks_ask_from_an_earlier_turn_again() -> None:
    def repeated(forks: float) -> int:
        settings = Agents(name="t", requests=600, chats=1.0, calls=0.0, chat_turns=12.0, forks=forks)
        prompts = [ask.prompt.tobytes() for ask in make_trace(settings, 4).asks]
        return len(prompts) - len(set(prompts))

    assert repeated(0.0) == 0
    assert repeated(0.3) > 50


def test_sessions_run_side_by_side_in_the_order_of_time() -> None:
    def session(name: int, *waits: float) -> Iterator[Step]:
        return iter([(wait, np.array([name]), np.array([turn])) for turn, wait in enumerate(waits)])

    endless = itertools.chain([(0.0, session(1, 0, 10, 10)), (5.0, session(2, 1, 1)), (6.0, session(3))])
    steps = [(float(wait), int(prompt[0]), int(reply[0])) for wait, prompt, reply in _merged(endless)]
    assert steps == [(0, 1, 0), (6, 2, 0), (1, 2, 1), (3, 1, 1), (10, 1, 2)]


def test_settings_that_make_no_trace_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"chats 0\.6 and calls 0\.68 are more than 1"):
        Agents(name="t", chats=0.6)
    with pytest.raises(ConfigError, match="requests is 0, must be at least 1"):
        Agents(name="t", requests=0)


def test_a_file_of_hashed_blocks_is_read(repo: Path) -> None:
    trace = read_mooncake(repo / HANDMADE, "handmade")
    assert trace.unit_tokens == 512
    assert [ask.prompt.tolist() for ask in trace.asks][2:4] == [[0, 1, 4, 5], [6]]
    assert [ask.prompt_tokens for ask in trace.asks] == [1300, 700, 1900, 512, 2600]
    assert len(read_mooncake(repo / HANDMADE, "handmade", limit=2).asks) == 2
    cached = [one.cached_tokens for one in run_unlimited(trace, COSTS, 1).served]
    assert cached == [0, 512, 1024, 0, 3 * 512]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2 is no request"),
        ('{"input_length": 5}', "line 2 is no request"),
        ('{"input_length": 5, "hash_ids": ["a"]}', "line 2 is no request"),
        ('{"input_length": 5, "hash_ids": [99999999999]}', "line 2 is no request"),
        ('{"input_length": 600, "hash_ids": [1]}', "line 2: 1 hash_ids for 600 tokens"),
        ('{"input_length": 0, "hash_ids": []}', "line 2: 0 hash_ids"),
        ("[1]", "line 2 is no request"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"input_length": 5, "hash_ids": [1]}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        read_mooncake(path, "t")


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no request"):
        read_mooncake(tmp_path / "empty.jsonl", "t")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_mooncake(tmp_path / "absent.jsonl", "t")


@pytest.mark.shared
def test_the_published_conversation_trace_is_read(shared_dir: Path) -> None:
    trace = read_mooncake(shared_dir / "traces" / "conversation-4000.jsonl", "mooncake", limit=1000)
    assert len(trace.asks) == 1000
    assert 0.05 < reused(trace) < 0.5
