"""What an engine on four devices saved is restored on two and on one: the same bits, and the same answer."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.cache.driver import rows_of
from tests.checkpoint import writers
from tests.killing import REPO
from zllm_jax.values import Request, Sampling, Tier

CONFIG: dict[str, Any] = {
    "max_seq_tokens": 96,
    "page_tokens": 16,
    "prefill_buckets": (32,),
    "decode_buckets": (1,),
    "max_batch": 1,
    "device_cache_bytes": 4 << 20,
    "compilation_cache": False,
}
PROMPT = tuple(range(3, 43))
PROGRAM = "import sys; from tests.e2e.test_mesh import main; main(*sys.argv[1:])"


def main(model: str, store: str, *counts: str) -> None:
    """Talk to one engine after the other, each on so many devices; print what each one did."""
    print(json.dumps([talk(model, store, int(count)) for count in counts]))


def talk(model: str, store: str, tensor_parallel: int) -> dict[str, Any]:
    from zllm_jax import Engine, EngineConfig

    config = EngineConfig(**CONFIG, store=Path(store), tensor_parallel=tensor_parallel, save_on_close=False)
    with Engine.from_pretrained(model, config) as engine:
        first = ask(engine, PROMPT)
        if first.usage.tier is Tier.COLD:
            engine.evict()
        rows = (*PROMPT, *first.tokens[:-1])
        digest = engine._scheduler.call(lambda: digest_of_restored(engine, rows))
        second = ask(engine, (*rows, 50, 51))
        return {
            "devices": tensor_parallel,
            "first": [first.usage.tier, first.usage.cached_tokens, first.tokens],
            "second": [second.usage.tier, second.usage.cached_tokens, second.tokens],
            "digest": digest,
        }


def ask(engine: Any, tokens: Sequence[int]) -> Any:
    return engine.generate(
        Request(tokens=tuple(tokens), max_tokens=8, sampling=Sampling(temperature=0.0), ignore_eos=True, cache=True)
    )


def digest_of_restored(engine: Any, tokens: Sequence[int]) -> str:
    """Of the rows of a stored state, restored anew; runs on the device's thread."""
    cache = engine._cache
    cache.forget(keep_disk=True)
    lease = cache.acquire(np.array((*tokens, 0), np.int32), 1)
    assert (lease.tier, lease.cached_tokens) == (Tier.DISK, len(tokens))
    while not lease.restoring.done:
        lease.restoring.advance()
    cache.restored(lease)
    used = -(-len(tokens) // CONFIG["page_tokens"])
    rows = rows_of(cache._backend, lease.pages[:used], lease.ring, len(tokens))
    cache.abort(lease)
    digest = hashlib.sha256()
    for name in sorted(rows):
        digest.update(name.encode() + np.ascontiguousarray(rows[name]).tobytes())
    return digest.hexdigest()


def four_heads(folder: Path) -> Path:
    """The tiny llama with four kv heads and a vocabulary that four devices can share."""
    where = writers.copy_tiny("llama3", folder, vocab_size=200, num_key_value_heads=4)
    tensors = writers.tiny_tensors("llama3")
    for name, tensor in tensors.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] = np.concatenate([tensor, tensor[::-1]])
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = np.pad(tensor, ((0, 1), (0, 0)))
    writers.save_tiny(tensors, where)
    return where


def run(model: Path, store: Path, devices: int, *counts: int) -> list[dict[str, Any]]:
    """What `main` tells of a process with so many devices; compiling is most of it, so nothing is optimised."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-c", PROGRAM, str(model), str(store), *map(str, counts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=REPO, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    told: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_four_devices_save_and_fewer_restore(tmp_path: Path) -> None:
    model = four_heads(tmp_path / "model")
    (four,) = run(model, tmp_path / "store", 4, 4)
    fewer = run(model, tmp_path / "store", 2, 2, 1)
    assert four["first"][:2] == [Tier.COLD, 0]
    for one in fewer:
        assert one["first"] == [Tier.DISK, len(PROMPT) - 1, four["first"][2]]
        assert one["second"] == four["second"]
        assert one["digest"] == four["digest"]
    assert four["second"][0] == Tier.DISK
