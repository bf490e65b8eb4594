"""`kill -9` while an engine evicts: afterwards every listed snapshot is whole, and the next engine hits it."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from tests.engine.talker import Talker
from tests.killing import killed
from zllm_jax.cache import SnapshotStore
from zllm_jax.cli import main
from zllm_jax.values import Request, Sampling, Tier


def open_store(root: Path | str, **options: float) -> SnapshotStore:
    return SnapshotStore(root, namespace="n", chunk_tokens=32, **options)


def talk_forever(root: str, seed: int) -> None:
    one = Talker(store=open_store(root))
    one.say(*"a longer answer, so that its state is more than one chunk and takes a moment to write")
    while True:
        for turn in range(3):
            prompt = (*f"{seed} {turn}".encode(), *[turn] * (60 * turn), 10)
            one.engine.generate(Request(tokens=prompt, max_tokens=100, sampling=Sampling(temperature=0.0)))
        one.engine.evict()
        print("evicted", flush=True)
        seed += 1


def kill_and_check(root: Path, turns: int, seed: int) -> tuple[int, int]:
    """Returns (snapshots restored, unfinished ones left behind by the kills)."""
    restored = leftovers = 0
    work = "tests.e2e.test_kill:talk_forever"
    for _ in killed(work, [root], turns=turns, seed=seed, within_s=0.1, started="evicted"):
        assert main(["cache", "verify", "--store", str(root)]) == 0
        assert not list(root.glob("*/quarantine"))
        entries = len(list(root.glob("*/*")))
        found = restore_all(root)
        restored, leftovers = restored + found, leftovers + entries - found
    return restored, leftovers


def restore_all(root: Path) -> int:
    """Everything that a new store lists is verified, hit by a new engine, and removed; how many there were."""
    store = open_store(root, grace_s=0.0)
    listed = store.list()
    one = Talker(store=store)
    one.say("yes")
    for info in listed:
        store.verify(info.id)
        tokens = store.tokens(info.id).tolist()
        prompt = (*tokens, 10)
        envelope = one.engine.generate(Request(tokens=prompt, max_tokens=8, sampling=Sampling(temperature=0.0)))
        assert (envelope.usage.tier, envelope.usage.cached_tokens) == (Tier.DISK, len(tokens))
        assert envelope.text == "yes"
    one.engine.forget()
    one.engine.close()
    return len(listed)


def test_killed_while_evicting(tmp_path: Path) -> None:
    assert kill_and_check(tmp_path, turns=3, seed=0)[0] >= 3


@pytest.mark.slow
def test_killed_while_evicting_fifty_times(tmp_path: Path) -> None:
    restored, leftovers = kill_and_check(tmp_path, turns=50, seed=1)
    assert restored >= 50
    assert leftovers > 0  # some kills did hit the middle of a save


CONFIG = {
    "max_batch": 1,
    "max_seq_tokens": 256,
    "page_tokens": 32,
    "prefill_buckets": (64,),
    "device_cache_bytes": None,
}


def run_forever(model: str, store: str, seed: int) -> None:
    from zllm_jax import Engine, EngineConfig

    with Engine.from_pretrained(model, EngineConfig(store=Path(store), **CONFIG)) as engine:
        while True:
            engine.generate(prose(seed, 64))
            engine.evict()
            print("evicted", flush=True)
            seed += 1


def prose(seed: int, num_tokens: int) -> Request:
    tokens = tuple(random.Random(seed).choices(range(100, 40_000), k=num_tokens))
    return Request(tokens=tokens, max_tokens=8, ignore_eos=True, sampling=Sampling(temperature=0.0))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # fifty processes, each of which loads the model
def test_a_real_model_killed_fifty_times(smollm2: Path, tmp_path: Path) -> None:
    """Many processes die while they evict to one store; what it lists is whole, and continues as if computed anew."""
    from zllm_jax import Engine, EngineConfig

    for _ in killed(
        "tests.e2e.test_kill:run_forever", [smollm2, tmp_path], turns=50, seed=2, within_s=0.5, started="evicted"
    ):
        assert main(["cache", "verify", "--store", str(tmp_path)]) == 0
    with Engine.from_pretrained(smollm2, EngineConfig(store=tmp_path, **CONFIG)) as engine:
        (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
        store = SnapshotStore(tmp_path, namespace=folder.name)
        assert len(store.list()) >= 25
        for info in store.list():
            request = dataclasses.replace(prose(0, 1), tokens=(*store.tokens(info.id).tolist(), 1000))
            hit = engine.generate(request)
            cold = engine.generate(dataclasses.replace(request, cache=False))
            assert (hit.usage.tier, hit.usage.cached_tokens) == (Tier.DISK, info.num_tokens)
            assert hit.tokens == cold.tokens
