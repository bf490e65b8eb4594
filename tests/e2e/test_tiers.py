"""Real weights: cold, resident and restored say the same, in this process and in another, alone and in a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import ask, request
from zllm_jax import Engine, EngineConfig, Envelope, Request, Sampling, Tier
from zllm_jax.checkpoint import open_checkpoint
from zllm_jax.runtime import architecture

CONFIG: dict[str, Any] = {
    "max_seq_tokens": 768,
    "page_tokens": 64,
    "prefill_buckets": (32, 128),
    "device_cache_bytes": 256 << 20,
}
TEXT = (
    "The keeper of the light climbed the stairs every evening, trimmed the wick, and wrote down the hour, the wind "
    "and the ships that passed. On the ninth of November the sea was so high that the spray reached the lantern. "
)


@dataclass(frozen=True)
class Story:
    """One conversation told three times: its second turn cold, from the device and from disk."""

    model: Path
    store: Path
    engine: Engine
    follow_up: tuple[int, ...]
    state_tokens: int  # of the first turn
    cold: Envelope
    resident: Envelope
    restored: Envelope


def told(model: Path, store: Path) -> Iterator[Story]:
    with Engine.from_pretrained(model, EngineConfig(store=store, **CONFIG)) as engine:
        assert engine.tokenizer is not None
        prompt = engine.tokenizer.encode(TEXT * 4)
        tail = engine.tokenizer.encode(" And then", add_bos=False)

        def first_turn() -> Envelope:
            engine.forget()
            return engine.generate(request(prompt, 12))

        first = first_turn()
        rows = (*prompt, *first.tokens[:-1])
        follow_up = (*rows, *tail)
        resident = engine.generate(request(follow_up, 12))
        assert first_turn().logprobs == first.logprobs
        engine.evict()
        restored = engine.generate(request(follow_up, 12))
        engine.forget()
        cold = engine.generate(request(follow_up, 12))
        first_turn()
        engine.evict()  # what another process will find
        yield Story(model, store, engine, follow_up, len(rows), cold, resident, restored)


@pytest.fixture(scope="module")
def smol(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    yield from told(smollm2, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def gemma(gemma3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    yield from told(gemma3, tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(
    scope="module", params=["smol", pytest.param("gemma", marks=pytest.mark.slow)], ids=["smollm2", "gemma3"]
)
def story(request: pytest.FixtureRequest) -> Story:
    found: Story = request.getfixturevalue(request.param)
    return found


def test_three_tiers_one_answer(story: Story) -> None:
    tiers = [(one.usage.tier, one.usage.cached_tokens) for one in (story.cold, story.resident, story.restored)]
    assert tiers == [(Tier.COLD, 0), (Tier.RESIDENT, story.state_tokens), (Tier.DISK, story.state_tokens)]
    assert story.cold.tokens == story.resident.tokens == story.restored.tokens
    assert story.restored.telemetry.bytes_read > 0


def test_restored_goes_on_with_the_bits_of_the_never_evicted(story: Story) -> None:
    assert story.resident.logprobs == story.restored.logprobs


def test_restored_is_close_to_computed_whole(story: Story) -> None:
    for cold, restored in zip(story.cold.logprobs, story.restored.logprobs, strict=True):
        assert math.isclose(cold.logprob, restored.logprob, abs_tol=2e-3)


@pytest.fixture(scope="module")
def elsewhere(story: Story) -> dict[str, Any]:
    """The second turn, asked of another process on the same store (and with the compilations of this one)."""
    return ask(story.model, story.store, CONFIG, story.follow_up, 12)


def test_another_process_restores_the_same_bits(story: Story, elsewhere: dict[str, Any]) -> None:
    assert (elsewhere["tier"], elsewhere["cached_tokens"]) == (Tier.DISK, story.state_tokens)
    assert tuple(elsewhere["tokens"]) == story.restored.tokens
    here = [[entry.logprob, *(value for _, value in entry.top)] for entry in story.restored.logprobs]
    assert elsewhere["logprobs"] == here


def test_no_second_copy_of_weights_or_state(story: Story, elsewhere: dict[str, Any]) -> None:
    """Issue: peak RSS at most weights + state + 700 MB while loading and serving."""
    if elsewhere["peak_bytes"] is None:
        pytest.skip("this system does not tell a process its peak memory")
    weights = sum(4 * math.prod(shape) for shape in parameter_shapes(story.model))
    assert elsewhere["peak_bytes"] <= weights + elsewhere["state_bytes"] + 700 * 10**6


def parameter_shapes(model: Path) -> list[tuple[int, ...]]:
    cfg = open_checkpoint(model).config
    return [spec.shape for spec in architecture(cfg).param_specs(cfg).values()]


def test_the_seed_decides_alone_and_in_a_batch_of_eight(smol: Story) -> None:
    def hot(seed: int, number: int) -> Request:
        tokens = (*smol.follow_up[: 20 + 7 * number],)
        return Request(tokens=tokens, max_tokens=16, sampling=Sampling(temperature=1.0, seed=seed), ignore_eos=True)

    alone = smol.engine.generate(hot(5, 3))
    calls = [smol.engine.submit(hot(5 if number == 3 else number, number)) for number in range(8)]
    envelopes = [[delta.envelope for delta in call][-1] for call in calls]
    together = envelopes[3]
    assert together is not None
    assert together.tokens == alone.tokens
    assert len({one.tokens for one in envelopes if one is not None}) == 8
    assert smol.engine.generate(hot(6, 3)).tokens != alone.tokens
