"""`kill -9` while both tiers are busy: afterwards every listed snapshot is whole, and the next engine hits it."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from pathlib import Path

import pytest

from tests.engine.talker import Talker, always_restore
from tests.killing import killed
from zllm_jax.cache import SnapshotStore
from zllm_jax.cli import main
from zllm_jax.values import Request, Sampling, Status, Tier

ANSWER = "an answer of some steps"
NUM_CLIENTS = 4
MAX_TOKENS = 24  # the answer, and its end
UNSAID = 256  # a token that no conversation goes on with


def open_store(root: Path | str, **options: float) -> SnapshotStore:
    return SnapshotStore(root, namespace="n", chunk_tokens=16, **options)


def talk_forever(root: str, seed: int) -> None:
    """Clients talk on, fork and cancel; says "busy" once both tiers are, and afterwards only what went wrong."""
    one = Talker(store=open_store(root, max_bytes=150_000), num_pages=60, page_tokens=8, max_pages=24)
    always_restore(one.cache)
    one.say(*ANSWER)
    for number in range(NUM_CLIENTS):
        threading.Thread(target=talk, args=(one, seed + number), daemon=True).start()
    while not is_busy(one):
        time.sleep(0.01)
    print("busy", flush=True)
    threading.Event().wait()


def is_busy(one: Talker) -> bool:
    counters = one.cache.counters
    return counters.evictions >= 5 and counters.hits[Tier.DISK] >= 2 and counters.hits[Tier.RESIDENT] >= 1


def talk(one: Talker, seed: int) -> None:
    rng = random.Random(seed)
    told: list[tuple[int, ...]] = []
    while True:
        past = rng.choice(told[-6:]) if told and rng.random() < 0.8 else ()
        if rng.random() < 0.3:
            past = past[: rng.randint(0, len(past))]
        if len(past) > 120:
            past = ()
        prompt = (*past, *rng.choices(range(11, 256), k=rng.randint(3, 40)), 10)
        call = one.engine.submit(Request(tokens=prompt, max_tokens=MAX_TOKENS, sampling=Sampling(temperature=0.0)))
        cancel_after = rng.randint(1, 10) if rng.random() < 0.2 else None
        envelope = None
        for number, delta in enumerate(call):
            envelope = delta.envelope
            if number == cancel_after:
                call.cancel()
        assert envelope is not None
        if envelope.status is Status.COMPLETED and envelope.text == ANSWER:
            told.append((*prompt, *envelope.tokens))
        elif envelope.status is not Status.CANCELED or cancel_after is None:
            print("wrong:", repr(envelope), flush=True)


def kill_and_check(root: Path, turns: int, seed: int) -> tuple[int, int]:
    """Returns (snapshots restored, kills that left files of an unfinished save behind)."""
    restored = interrupted = 0
    work = "tests.e2e.test_kill:talk_forever"
    for said in killed(work, [root], turns=turns, seed=seed, within_s=0.3, started="busy"):
        assert said == []
        assert main(["cache", "verify", "--store", str(root)]) == 0
        assert not list(root.glob("*/quarantine"))
        files = sum(path.stat().st_size for path in root.glob("*/*/*"))
        store = open_store(root, repair=False)
        assert not store.broken
        interrupted += files > store.nbytes
        store.close()
        restored += restore_all(root)
    return restored, interrupted


def restore_all(root: Path) -> int:
    """Everything that a new store lists is hit by a new engine, whose rows check themselves; how many there were."""
    store = open_store(root, grace_s=0.0)
    one = Talker(store=store)
    always_restore(one.cache)
    one.say("yes")
    listed = store.list()
    for info in listed:
        one.engine.forget(keep_disk=True)
        tokens = store.tokens(info.id).tolist()
        request = Request(tokens=(*tokens, UNSAID, 10), max_tokens=8, sampling=Sampling(temperature=0.0))
        envelope = one.engine.generate(request)
        assert (envelope.usage.tier, envelope.usage.cached_tokens) == (Tier.DISK, len(tokens))
        assert (envelope.status, envelope.text) == (Status.COMPLETED, "yes")
    one.engine.forget(keep_disk=True)
    one.engine.close()
    return len(listed)


def test_killed_under_load(tmp_path: Path) -> None:
    assert kill_and_check(tmp_path, turns=3, seed=0)[0] >= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_under_load_three_hundred_times(tmp_path: Path) -> None:
    restored, interrupted = kill_and_check(tmp_path, turns=300, seed=1)
    assert restored >= 300
    assert interrupted >= 30  # kills did hit the middle of a save


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
