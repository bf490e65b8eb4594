"""What every test stands on: strict jax, one platform, the folders of reference data and of models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from zllm_jax.config import zllm_home as default_home
from zllm_jax.errors import DownloadFailed

# Set before anything imports jax, and inherited by the processes that tests start.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(default_home() / "compilations"))
os.environ["JAX_PLATFORMS"] = os.environ.get("ZLLM_TEST_PLATFORM", "cpu")

# How long an example takes says more about the machine than about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return REPO


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of shared reference data: `ZLLM_SHARED`, else `shared` beside the checkout."""
    folder = Path(os.environ.get("ZLLM_SHARED") or REPO.parent / "shared")
    if not (folder / "reference").is_dir():
        pytest.skip(f"no reference data in {folder}: set ZLLM_SHARED")
    return folder


@pytest.fixture
def zllm_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `ZLLM_HOME`, this test's alone."""
    home = tmp_path / "zllm"
    home.mkdir()
    monkeypatch.setenv("ZLLM_HOME", str(home))
    return home


def pulled(name: str) -> Path:
    from zllm_jax.checkpoint import pull

    try:
        return pull(name)
    except DownloadFailed as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The weights of SmolLM2-135M-Instruct, fetched if missing; skips where they can't be."""
    return pulled("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The weights of Gemma 3 270M, fetched if missing; skips where they can't be."""
    return pulled("gemma3-270m")


@pytest.fixture(scope="session")
def deepseek() -> Path:
    """The tokenizer of DeepSeek V4, fetched if missing; skips where it can't be."""
    return pulled("deepseek-v4-tokenizer")
