"""What every test stands on: strict jax, one platform, the folders of reference data and of models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Set before anything imports jax, and inherited by the processes that tests start.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ["JAX_PLATFORMS"] = os.environ.get("ZLLM_TEST_PLATFORM", "cpu")

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
