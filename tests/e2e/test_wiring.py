"""Everything joined, on a tiny model: what cannot be opened is refused by name, what can't be stored is a miss."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.killing import REPO
from zllm_jax import ContextExtension, Engine, EngineConfig, Envelope, Request, Sampling, Status, Tier
from zllm_jax.checkpoint import open_checkpoint
from zllm_jax.config import RopeConfig
from zllm_jax.errors import BadCheckpoint, BudgetExceeded, ConfigError, InvalidRequest, ModelNotPulled, UnknownModel
from zllm_jax.wiring import namespace

pytestmark = pytest.mark.shared
CONFIG: dict[str, Any] = {
    "max_seq_tokens": 96,
    "page_tokens": 16,
    "prefill_buckets": (32,),
    "decode_buckets": (1,),
    "max_batch": 1,
    "device_cache_bytes": 4 << 20,
}
PROMPT = tuple(range(3, 43))


@pytest.fixture(scope="module")
def tiny(shared_dir: Path) -> Path:
    return shared_dir / "reference" / "tiny" / "llama3"


@pytest.fixture
def opened(tiny: Path, tmp_path: Path) -> Iterator[Any]:
    """Opens engines on one store; closes them."""
    with ExitStack() as stack:

        def open_(**options: Any) -> Engine:
            config = EngineConfig(**{**CONFIG, "store": tmp_path / "store", **options})
            return stack.enter_context(Engine.from_pretrained(tiny, config))

        yield open_


def ask(engine: Engine, tokens: tuple[int, ...] = PROMPT, max_tokens: int = 4) -> Envelope:
    return engine.generate(Request(tokens=tokens, max_tokens=max_tokens, sampling=Sampling(temperature=0.0)))


def test_a_state_is_found_by_whom_it_belongs_to(opened: Any) -> None:
    """Invariants 4 and 18: another salt never hits; another page size does."""
    first = opened(salt="a")
    cold = ask(first)
    assert first.evict() > 0
    for options, tier in [
        ({"salt": "b"}, Tier.COLD),
        ({"salt": "a", "page_tokens": 32}, Tier.DISK),
        ({"salt": "a"}, Tier.DISK),
    ]:
        envelope = ask(opened(**options))
        assert envelope.usage.tier is tier, options
        assert envelope.tokens == cold.tokens


def test_the_identity_of_a_state(repo: Path) -> None:
    checkpoint = open_checkpoint(repo / "tests" / "data" / "tiny" / "llama3")
    cfg = checkpoint.config
    same = EngineConfig(page_tokens=32, max_batch=2, device_cache_bytes=1 << 20, prefill_buckets=(16,))
    others = [
        (cfg, EngineConfig(state_dtype="bfloat16")),
        (cfg, EngineConfig(dtype="bfloat16")),
        (cfg, EngineConfig(salt="a")),
        (replace(cfg, rope=RopeConfig(theta=1.0)), EngineConfig()),
    ]
    one = namespace(checkpoint, cfg, EngineConfig(), None)
    assert namespace(checkpoint, cfg, same, None) == one
    assert len({one, *(namespace(checkpoint, *other, None) for other in others)}) == 5


def test_a_context_is_extended_once(shared_dir: Path, tmp_path: Path) -> None:
    tiny = shared_dir / "reference" / "tiny"
    twice = EngineConfig(context_extension=ContextExtension(kind="linear", factor=2.0), store=tmp_path)
    native = open_checkpoint(tiny / "qwen2").config.max_context_tokens
    with Engine.from_pretrained(tiny / "qwen2", twice) as engine:
        assert engine.report()["budget_tokens"] == 2 * native
    with pytest.raises(ConfigError, match="already scaled"):
        Engine.from_pretrained(tiny / "llama3", twice)


def test_a_full_store_is_a_logged_miss(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = opened(disk_cache_bytes=1000)
    first = ask(engine)
    with caplog.at_level(logging.WARNING):
        assert engine.evict() == 0
    assert "could not be saved" in caplog.text
    again = ask(engine)
    assert (again.tokens, again.usage.tier) == (first.tokens, Tier.COLD)


def test_a_corrupt_snapshot_is_a_logged_miss(opened: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = opened()
    first = ask(engine)
    engine.evict()
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file() and path.stat().st_size > 4000:
            data = bytearray(path.read_bytes())
            data[2000] ^= 4
            path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        again = ask(engine)
    assert "the checksum does not match" in caplog.text
    assert (again.tokens, again.usage.tier, again.status) == (first.tokens, Tier.COLD, first.status)


def test_a_store_that_is_a_file_is_refused(opened: Any, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    with pytest.raises(ConfigError, match=r"set store= or disk_cache=False"):
        opened()
    assert ask(opened(disk_cache=False)).status is Status.TRUNCATED


def test_devices_that_are_not_there_are_not_used(opened: Any) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel is 64: 64 devices are asked for, but there are"):
        opened(tensor_parallel=64)


def test_budgets_and_vocabulary(opened: Any) -> None:
    engine = opened()
    with pytest.raises(BudgetExceeded, match=r"90 tokens.*7.*97.* 96"):
        ask(engine, tuple(range(90)), 7)
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        ask(engine, (engine.model_config.vocab_size,))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        engine.generate(Request("text"))


def test_too_little_memory_names_what_is_needed(opened: Any) -> None:
    with pytest.raises(ConfigError, match=r"one sequence of 96 tokens needs .* bytes of state"):
        opened(device_cache_bytes=1000)


def test_no_budget_is_room_for_one_sequence(opened: Any) -> None:
    one = opened(device_cache_bytes=None)
    pages = one.report()["pages"]
    assert pages["total"] * pages["tokens"] >= one.report()["budget_tokens"]
    assert (pages["total"] - 1) * pages["tokens"] < one.report()["budget_tokens"]


def test_half_a_download(tiny: Path, tmp_path: Path) -> None:
    half = shutil.copytree(tiny, tmp_path / "half", copy_function=shutil.copyfile)
    half.chmod(0o755)
    weights = half / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        Engine.from_pretrained(half)


def test_a_name_keeps_the_dots_of_its_folder(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-1.7B"
    folder.symlink_to(tiny)
    with Engine.from_pretrained(folder, EngineConfig(**CONFIG, store=tmp_path / "store")) as engine:
        assert engine.model_name == "Tiny-1.7B"


def test_a_process_that_ends_while_programs_compile_ends_well(tiny: Path, zllm_home: Path) -> None:
    """The compilation cache is empty, so the process is done long before the compiler is."""
    program = "import sys; from zllm_jax import Engine; Engine.from_pretrained(sys.argv[1]); sys.exit(3)"
    command = [sys.executable, "-c", program, str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=REPO)
    assert done.returncode == 3, done.stderr[-2000:]


def test_models_that_are_not_there(zllm_home: Path) -> None:
    with pytest.raises(UnknownModel, match="no-such-model"):
        Engine.from_pretrained("no-such-model")
    with pytest.raises(ModelNotPulled, match="zllm pull smollm2-135m"):
        Engine.from_pretrained("smollm2-135m")
