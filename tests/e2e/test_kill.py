"""`kill -9` while an engine evicts: afterwards every listed snapshot is whole, and the next engine hits it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.process import REPO
from tests.engine.talker import Talker
from zllm_jax.cache import SnapshotStore
from zllm_jax.values import Request, Sampling, Tier

# Imports once, then forks an engine for each line it reads; that one evicts its conversations until it is killed.
EVICTOR = """
import os, sys
from tests.e2e.test_kill import open_store, talk
for line in sys.stdin:
    child = os.fork()
    if child:
        print(child, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)
        continue
    talk(open_store(sys.argv[1]), int(line))
"""


def open_store(root: Path | str, **options: float) -> SnapshotStore:
    return SnapshotStore(root, namespace="n", chunk_tokens=32, **options)


def talk(store: SnapshotStore, seed: int) -> None:
    one = Talker(store=store)
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
    rng = random.Random(seed)
    restored = leftovers = 0
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # forking wants a process without threads
    with subprocess.Popen(
        [sys.executable, "-c", EVICTOR, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=REPO,
        env=environment,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for turn in range(turns):
            print(1000 * turn, file=parent.stdin, flush=True)
            child = int(parent.stdout.readline())
            if turn % 2:
                assert parent.stdout.readline() == "evicted\n"
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(child, signal.SIGKILL)
            while parent.stdout.readline() != "dead\n":
                pass
            entries = len(list(root.glob("*/*")))
            found = restore_all(root)
            restored, leftovers = restored + found, leftovers + entries - found
        parent.stdin.close()
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
