"""An engine in a process of its own: it takes a request as JSON and prints what came of it.

python -m tests.e2e.process <model> <store> <json: {"config": {...}, "tokens": [...], "max_tokens": n}>
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zllm_jax.values import Request, Sampling

REPO = Path(__file__).resolve().parents[2]


def ask(model: Path, store: Path, config: dict[str, Any], tokens: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """One greedy request to a fresh process: tier, tokens, log-probabilities, and its peak memory in bytes."""
    what = json.dumps({"config": config, "tokens": list(tokens), "max_tokens": max_tokens})
    command = [sys.executable, "-m", "tests.e2e.process", str(model), str(store), what]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=REPO, env=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def request(tokens: Sequence[int], max_tokens: int) -> Request:
    return Request(tokens=tuple(tokens), max_tokens=max_tokens, sampling=Sampling(temperature=0.0, logprobs=3))


def peak_bytes() -> int | None:
    """Of this program alone: `ru_maxrss` would count what the process that started it held. None but on Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    (kilobytes,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(kilobytes)


def main(model: str, store: str, what: str) -> None:
    from zllm_jax import Engine, EngineConfig

    todo = json.loads(what)
    with Engine.from_pretrained(model, EngineConfig(store=Path(store), **todo["config"])) as engine:
        envelope = engine.generate(request(todo["tokens"], todo["max_tokens"]))
        report = engine.report()
    answer = {
        "tier": envelope.usage.tier,
        "cached_tokens": envelope.usage.cached_tokens,
        "tokens": envelope.tokens,
        "logprobs": [[entry.logprob, *(value for _, value in entry.top)] for entry in envelope.logprobs],
        "state_bytes": report["device_budget_bytes"],
        "peak_bytes": peak_bytes(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
