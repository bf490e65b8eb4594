"""The runtime is tested under strict promotion: neither a dtype nor a rank changes unless the code says so."""

from collections.abc import Iterator

import jax
import pytest

from tests.runtime import drive
from zllm_jax.fence import FencePool, Vocabulary
from zllm_jax.runtime import StateShape, init_params
from zllm_jax.testing import ByteTokenizer, tiny_config


@pytest.fixture(autouse=True)
def strict_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="session")
def fenced_runner() -> drive.Scorer:
    """A warm one for bytes and EOS, three rows at most. Its programs are compiled once for all tests of fences."""
    tokenizer, cfg = ByteTokenizer(), tiny_config("llama")
    made = drive.scorer(
        init_params(cfg, jax.random.key(0)),
        cfg,
        StateShape(num_pages=64, page_tokens=8, num_rings=4, num_slots=4, max_pages=16),
        prefill_buckets=(16,),
        decode_buckets=(1, 3),
        decode_steps=4,
        fences=FencePool(Vocabulary(tokenizer.vocabulary(), tokenizer.eos_ids), 512),
    )
    made.warmup()
    return made
