"""Logits and greedy tokens of an independent float32 implementation, however they are computed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime import drive
from zllm_jax.checkpoint import open_checkpoint
from zllm_jax.config import ModelConfig
from zllm_jax.runtime import Drawn, StateShape, load_params

DATA = Path(__file__).parent.parent / "data"
TINY = ("llama3", "qwen2", "qwen3", "gemma3")
TINY_SHAPE = StateShape(num_pages=40, page_tokens=16, num_rings=3, num_slots=2, max_pages=16)
LARGE_SHAPE = StateShape(num_pages=24, page_tokens=64, num_rings=3, num_slots=2, max_pages=12)
SURE = 0.01  # below this margin between the first and the second token a different one is rounding, not an error


@dataclass(frozen=True)
class Model:
    params: Any
    cfg: ModelConfig

    @classmethod
    def load(cls, path: Path) -> Model:
        checkpoint = open_checkpoint(path)
        return cls(load_params(checkpoint, checkpoint.config, "float32"), checkpoint.config)


def assert_same_tokens(drawn: list[Drawn], greedy: list[int], margin: list[float]) -> None:
    """Equal, or apart from a step on where the reference itself was not sure."""
    found = drive.ids(drawn)
    assert len(found) == len(greedy)
    apart = [i for i, (a, b) in enumerate(zip(found, greedy, strict=True)) if a != b]
    assert not apart or margin[apart[0]] < SURE, f"step {apart[0]}: {found} instead of {greedy}"


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest) -> tuple[Model, Any]:
    folder = DATA / "tiny" / request.param
    return Model.load(folder), np.load(folder / "reference.npz")


@pytest.mark.parametrize("size", [256, 13, 1], ids=["whole", "in chunks of 13", "token by token"])
@pytest.mark.parametrize("length", ["n40", "n200"])
def test_tiny_logits_at_every_position(tiny: tuple[Model, Any], length: str, size: int) -> None:
    model, reference = tiny
    runner = drive.scorer(model.params, model.cfg, TINY_SHAPE)
    place = drive.Place(drive.scattered(TINY_SHAPE, seed=1), ring=2)
    wanted = reference[f"{length}.logits"]
    found = runner.score(reference[f"{length}.ids"].tolist(), place, size=size)
    np.testing.assert_allclose(found[-len(wanted) :], wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", ["n40", "n200"])
def test_tiny_greedy_tokens(tiny: tuple[Model, Any], length: str) -> None:
    model, reference = tiny
    prompt, greedy = reference[f"{length}.ids"].tolist(), reference[f"{length}.greedy"].tolist()
    runner = drive.scorer(model.params, model.cfg, TINY_SHAPE, prefill_buckets=(16,), decode_buckets=(1,))
    for i, size in enumerate((16, 7)):
        place = drive.Place(drive.scattered(TINY_SHAPE, seed=i), ring=i)
        first = drive.prefilled(runner, prompt, place, size=size)
        assert_same_tokens(
            drive.continued(runner, first, len(prompt), place, len(greedy)), greedy, reference[f"{length}.margin"]
        )
    place = drive.Place(drive.scattered(TINY_SHAPE, seed=9), ring=2)
    first = drive.fed(runner, prompt, place)
    assert_same_tokens(
        drive.continued(runner, first, len(prompt), place, len(greedy)), greedy, reference[f"{length}.margin"]
    )


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    greedy: list[int]
    margin: list[float]
    logits: np.ndarray  # f32[V] after the last token


class Large:
    """A real model with its reference prompts; one runner, so that each program is compiled once."""

    def __init__(self, weights: Path, reference: Path) -> None:
        model = Model.load(weights)
        last = np.load(reference / "last_logits.npz")
        self.prompts = {
            one["name"]: Prompt(
                one["prompt_ids"], one["greedy_ids"], one["greedy_margin"], last[f"{one['name']}.last_logits"]
            )
            for one in json.loads((reference / "reference.json").read_text())["prompts"]
        }
        self.runner = drive.scorer(
            model.params, model.cfg, LARGE_SHAPE, prefill_buckets=(64,), decode_buckets=(1,), decode_steps=8
        )

    def check(self, name: str, way: str) -> None:
        """The prompt `name`, computed in one `way`: logits of its last position and the continuation."""
        prompt = self.prompts[name]
        place = drive.Place(drive.scattered(LARGE_SHAPE, seed=3), ring=1)
        if way == "whole":
            logits = self.runner.score(prompt.ids, place, size=512)[-1]
            assert np.abs(logits - prompt.logits).max() < 2e-3
            first = Drawn(int(logits.argmax()))
        else:
            first = self.first(prompt.ids, place, way)
            self.check_logprobs(first, prompt.logits)
        drawn = drive.continued(self.runner, first, len(prompt.ids), place, len(prompt.greedy), steps=8)
        assert_same_tokens(drawn, prompt.greedy, prompt.margin)

    def first(self, ids: list[int], place: drive.Place, way: str) -> Drawn:
        if way == "token by token":
            return drive.fed(self.runner, ids, place, sampling=drive.GREEDY_LOGPROBS)
        size = 64 if len(ids) > 64 else 7
        return drive.prefilled(self.runner, ids, place, size=size, sampling=drive.GREEDY_LOGPROBS)

    def check_logprobs(self, drawn: Drawn, logits: np.ndarray) -> None:
        assert drawn.logprob is not None
        wanted = drive.log_softmax(logits)
        found = dict(drawn.logprob.top)
        assert len(found) == 20
        assert max(abs(value - wanted[token]) for token, value in found.items()) < 2e-3

    def check_restored(self, name: str) -> None:
        """All of the prompt but its last token is saved and restored elsewhere; the rest is computed there."""
        prompt = self.prompts[name]
        kept = len(prompt.ids) - 1
        before = drive.Place(drive.scattered(LARGE_SHAPE, seed=4), ring=0)
        self.first(prompt.ids[:kept], before, "in chunks")
        rows = drive.saved(self.runner, before, kept)
        after = drive.Place(before.pages[::-1], ring=2)
        drive.restore(self.runner, rows, after, kept)
        first = drive.prefilled(self.runner, prompt.ids, after, size=64, start=kept, sampling=drive.GREEDY_LOGPROBS)
        self.check_logprobs(first, prompt.logits)
        drawn = drive.continued(self.runner, first, len(prompt.ids), after, len(prompt.greedy), steps=8)
        assert_same_tokens(drawn, prompt.greedy, prompt.margin)


WAYS = ("whole", "in chunks", "token by token")


@pytest.fixture(scope="module")
def large_smollm2(smollm2: Path) -> Large:
    return Large(smollm2, DATA / "reference" / "smollm2")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["plain_paris", "chat_gravity", "code_fib"])
def test_smollm2(large_smollm2: Large, name: str, way: str) -> None:
    large_smollm2.check(name, way)


def test_smollm2_restored(large_smollm2: Large) -> None:
    large_smollm2.check_restored("chat_gravity")


@pytest.fixture(scope="module")
def large_gemma3(gemma3: Path, shared_dir: Path) -> Large:
    return Large(gemma3, shared_dir / "reference" / "gemma3")


@pytest.mark.shared
def test_gemma3_restored_beyond_its_window(large_gemma3: Large) -> None:
    large_gemma3.check_restored("long_700")


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["plain", "code", "long_700"])
def test_gemma3(large_gemma3: Large, name: str, way: str) -> None:
    large_gemma3.check(name, way)
