"""The flax module: it declares what the runtime loads, computes what prefill computes, and learns."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.runtime import drive
from zllm_jax.config import ModelConfig
from zllm_jax.runtime import StateShape, architecture, init_params
from zllm_jax.runtime.sharding import RULES, partition
from zllm_jax.runtime.training import LanguageModel, loss
from zllm_jax.testing import tiny_config

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 24)).astype(np.int32)  # beyond the window of 16


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def cfg(request: pytest.FixtureRequest) -> ModelConfig:
    return tiny_config(request.param)


@pytest.fixture(scope="module")
def variables(cfg: ModelConfig) -> Any:
    return jax.jit(LanguageModel(cfg).init)(jax.random.key(1), TOKENS)


def test_flax_declares_the_tree_that_the_runtime_loads(cfg: ModelConfig, variables: Any) -> None:
    assert variables.keys() == {"params"}, "a module keeps nothing besides its parameters"
    found = nn.meta.unbox(variables["params"])
    wanted = init_params(cfg, jax.random.key(0))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, wanted)
    assert (np.asarray(found["final_norm"]) == 1).all()
    assert np.std(np.asarray(found["layers"][0]["wq"])) == pytest.approx(cfg.embed_dim**-0.5, rel=0.05)
    assert not np.array_equal(found["layers"][0]["wq"], found["layers"][1]["wq"])


def test_each_parameter_carries_its_logical_axes(cfg: ModelConfig, variables: Any) -> None:
    axes = nn.get_partition_spec(variables)["params"]
    for name, spec in architecture(cfg).param_specs(cfg).items():
        at: Any = axes
        for part in name.split("."):
            at = at[int(part)] if part.isdigit() else at[part]
        assert tuple(at) == spec.axes, name
        assert nn.logical_to_mesh_axes(at, tuple(RULES.items())) == partition(spec.axes)


def test_it_computes_what_prefill_computes(cfg: ModelConfig, variables: Any) -> None:
    params = nn.meta.unbox(variables["params"])
    found = np.asarray(jax.jit(LanguageModel(cfg).apply)(variables, TOKENS))
    shape = StateShape(num_pages=4, page_tokens=8, num_rings=1, num_slots=1, max_pages=4)
    runner = drive.scorer(params, cfg, shape)
    for b, tokens in enumerate(TOKENS.tolist()):
        wanted = runner.score(tokens, drive.Place((2, 0, 3, 1)), size=32)
        np.testing.assert_allclose(found[b], wanted, rtol=0, atol=1e-4)
    assert found.dtype == np.float32


def test_the_loss_is_the_next_token_s(cfg: ModelConfig, variables: Any) -> None:
    logits = np.asarray(jax.jit(LanguageModel(cfg).apply)(variables, TOKENS[:, :-1]))
    logp = np.take_along_axis(drive.log_softmax(logits), TOKENS[:, 1:, None], axis=-1)
    assert float(loss(variables["params"], TOKENS, cfg=cfg)) == pytest.approx(-logp.mean(), abs=1e-5)


def test_training_lowers_the_loss(cfg: ModelConfig, variables: Any) -> None:
    """20 steps of Adam on one batch: from about ln V to less than half of it, and every parameter has moved."""
    optimiser = optax.adam(1e-2)

    @jax.jit
    def step(params: Any, memory: Any) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, TOKENS, cfg=cfg)
        with jax.numpy_dtype_promotion("standard"):  # optax promotes its step count
            update, memory = optimiser.update(gradient, memory)
        return optax.apply_updates(params, update), memory, value

    start = params = nn.meta.unbox(variables["params"])
    memory = optimiser.init(params)
    losses = []
    for _ in range(20):
        params, memory, value = step(params, memory)
        losses.append(float(value))
    assert losses[0] > 0.8 * np.log(cfg.vocab_size)
    assert losses[-1] < 0.5 * losses[0]
    jax.tree.map(lambda old, new: np.testing.assert_array_less(0, np.abs(old - new).max()), start, params)
