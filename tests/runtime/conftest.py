"""The runtime is tested under strict promotion: neither a dtype nor a rank changes unless the code says so."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
