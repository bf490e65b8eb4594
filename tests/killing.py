"""Programs that die at a random instant."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]

# Imports once, then forks a worker for each line it reads.
FORKER = """
import importlib, os, sys
module, function = sys.argv[1].split(":")
work = getattr(importlib.import_module(module), function)
for line in sys.stdin:
    worker = os.fork()
    if worker:
        os.waitpid(worker, 0)
        print("dead", flush=True)
        continue
    print(os.getpid(), flush=True)
    work(*sys.argv[2:], int(line))
"""


def killed(
    work: str, arguments: Sequence[object], *, turns: int, seed: int, within_s: float, started: str = ""
) -> Iterator[list[str]]:
    """Run `module:function(*arguments, number)` in a process of its own and kill -9 it; yields what each one printed.

    The instant is random within `within_s` of the start, or of when it has printed `started`.
    """
    rng = random.Random(seed)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # forking wants a process without threads
    with subprocess.Popen(
        [sys.executable, "-c", FORKER, work, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO,
        env=environment,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for turn in range(turns):
            print(turn * 1000 + 1, file=parent.stdin, flush=True)
            worker = int(parent.stdout.readline())
            try:
                if started:
                    assert parent.stdout.readline().strip() == started
                time.sleep(rng.uniform(0.0, within_s))
            finally:
                os.kill(worker, signal.SIGKILL)
            yield [line.strip() for line in iter(parent.stdout.readline, "dead\n")]
        parent.stdin.close()
