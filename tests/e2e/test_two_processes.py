"""Two engines in processes of their own, one store: each goes on from what the other told, whoever is first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import REPO
from zllm_jax.cli.app import main
from zllm_jax.values import Tier

REPLY = [259, 260, 261]  # what a talker says, by its ids; the end of the output is not part of the state
ROUNDS = 3


def talk(root: str) -> None:
    """Answer orders, a line of JSON each: {"tokens": [...]} is a request, {} evicts all to disk."""
    from tests.engine.talker import Talker, always_restore
    from zllm_jax.cache import SnapshotStore
    from zllm_jax.values import Request, Sampling

    one = Talker(store=SnapshotStore(root, namespace="n", chunk_tokens=8))
    always_restore(one.cache)
    one.say("one ", "two ", "three")
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "tokens" in order:
            envelope = one.engine.generate(
                Request(order["tokens"], max_tokens=8, sampling=Sampling(temperature=0.0), tenant="t")
            )
            usage = envelope.usage
            answer: Any = [list(envelope.tokens), usage.tier.value, usage.cached_tokens, envelope.status.value]
        else:
            one.engine.evict()
            answer = one.cache.report()["counters"]["dropped"]
        print(json.dumps(answer), flush=True)
    one.engine.close()


class Other:
    """An engine elsewhere. `order` does not wait for its answer."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def order(self, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def ask(self, tokens: list[int]) -> tuple[Tier, int]:
        """From where, and how much of the prompt came from the cache."""
        self.order(tokens=tokens)
        return self.told()

    def told(self) -> tuple[Tier, int]:
        said, tier, cached, status = self.answer()
        assert (said[:3], status) == (REPLY, "COMPLETED")
        return Tier(tier), cached

    def evict(self) -> None:
        self.order()
        assert self.answer() == 0  # nothing was lost


@contextmanager
def other(root: Path) -> Iterator[Other]:
    code = "import sys; from tests.e2e.test_two_processes import talk; talk(sys.argv[1])"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        cwd=REPO,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Other(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(30) == 0
        finally:
            process.kill()


def question(*seeds: int) -> list[int]:
    """A prompt, 21 tokens longer for each turn before it."""
    turns = [[100 + seed, *range(20, 36), 10, *REPLY] for seed in seeds]
    return [token for turn in turns for token in turn][: -len(REPLY)]


def rows(*seeds: int) -> int:
    """How many rows the state of a conversation has."""
    return len(question(*seeds)) + len(REPLY)


def test_each_goes_on_from_what_the_other_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        a, b = (stack.enter_context(other(tmp_path)) for _ in range(2))
        assert [one.answer() for one in (a, b)] == ["ready", "ready"]
        assert a.ask(question(1)) == (Tier.COLD, 0)
        a.evict()
        assert b.ask(question(1, 2)) == (Tier.DISK, rows(1))
        b.evict()
        assert a.ask(question(1, 2, 3)) == (Tier.DISK, rows(1, 2))
        a.evict()

        shared: tuple[int, ...] = (1, 2, 3)
        for i in range(ROUNDS):
            told = {a: (*shared, 10 + i), b: (*shared, 30 + i)}
            for one, seeds in told.items():
                one.order(tokens=question(*seeds))
            assert [one.told() for one in told] == [(Tier.DISK, rows(*shared))] * 2
            for one in told:  # both continue, and replace, one snapshot
                one.order()
            assert [one.answer() for one in told] == [0, 0]
            assert a.ask(question(*told[b], 5)) == (Tier.DISK, rows(*told[b]))
            assert b.ask(question(*told[a], 5)) == (Tier.DISK, rows(*told[a]))
            a.evict()
            b.evict()
            shared = (*told[a], 5)
    assert main(["cache", "verify", "--store", str(tmp_path)]) == 0
    assert "snapshots are whole" in capsys.readouterr().out
    assert not list(tmp_path.glob("*/quarantine/*"))
