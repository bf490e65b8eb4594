"""Loading: what does not fit is refused by name before anything is read, and nothing is in memory twice."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import jax
import numpy as np
import pytest

from zllm_jax.config import Dtype, ModelConfig
from zllm_jax.errors import BadCheckpoint
from zllm_jax.runtime import architecture, check_shapes, init_params, load_params, params_bytes
from zllm_jax.runtime.weights import nest
from zllm_jax.testing import tiny_config

ARCHITECTURES = ("llama", "gemma3")


class Source:
    """Random tensors. Counts how many of the arrays it has given are still alive, at most at a time."""

    def __init__(self, cfg: ModelConfig) -> None:
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: spec.shape for name, spec in architecture(cfg).param_specs(cfg).items()
        }
        self.alive = self.most_alive = 0

    def read(self, name: str, dtype: Dtype) -> np.ndarray:
        shape = self.shapes[name]
        count = int(np.prod(shape))
        # Never at an address that jax could take over as it is: what it keeps is then a copy of its own.
        raw = np.empty(count * 4 + 68, np.uint8)
        offset = 4 + -raw.ctypes.data % 64
        array = raw[offset : offset + count * 4].view(np.float32).reshape(shape)
        array[...] = np.random.default_rng(len(name)).standard_normal(shape)
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        weakref.finalize(raw, self._gone)
        return array

    def _gone(self) -> None:
        self.alive -= 1


class Untouchable(Source):
    def read(self, name: str, dtype: Dtype) -> np.ndarray:
        raise AssertionError(f"{name} was read before all shapes were checked")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("fault", ["missing", "wrong shape", "extra"])
def test_what_does_not_fit_is_refused_by_name_and_unread(arch: str, fault: str) -> None:
    cfg = tiny_config(arch)
    source = Untouchable(cfg)
    shapes = dict(source.shapes)
    name = "layers.1.w_up"
    if fault == "missing":
        del shapes[name]
        complaint = r"layers\.1\.w_up is missing; expected shape \(64, 128\)"
    elif fault == "wrong shape":
        shapes[name] = (128, 64)
        complaint = r"layers\.1\.w_up has shape \(128, 64\), expected \(64, 128\)"
    else:
        shapes[name := "layers.1.w_sideways"] = (1,)
        complaint = r"layers\.1\.w_sideways is not part of architecture"
    source.shapes = shapes
    with pytest.raises(BadCheckpoint, match=complaint) as refused:
        load_params(source, cfg, "float32")
    assert refused.value.tensor == name


def test_an_unknown_architecture_is_refused() -> None:
    cfg = tiny_config("llama")
    object.__setattr__(cfg, "arch", "mamba")
    with pytest.raises(BadCheckpoint, match="architecture 'mamba' is unknown"):
        architecture(cfg)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_is_loaded_is_what_was_read(arch: str) -> None:
    cfg = tiny_config(arch)
    source = Source(cfg)
    seen: list[tuple[str, int, int]] = []
    params = load_params(source, cfg, "float32", progress=lambda *now: seen.append(now))
    wanted = nest({name: source.read(name, "float32") for name in source.shapes})
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    total = len(source.shapes)
    assert seen == [("load weights", i + 1, total) for i in range(total)]
    assert params_bytes(params) == 4 * sum(int(np.prod(shape)) for shape in source.shapes.values())


def test_loading_holds_a_few_tensors_in_host_memory() -> None:
    """One in each of two workers and one on its way to the device, of 35; the test's own counter sees all of them."""
    cfg = tiny_config("gemma3")
    source = Source(cfg)
    load_params(source, cfg, "float32")
    assert len(source.shapes) > 30
    assert source.most_alive <= 4
    hoarded = [source.read(name, "float32") for name in source.shapes]
    assert source.most_alive >= len(hoarded)


def test_check_shapes_returns_what_the_model_declares() -> None:
    cfg = tiny_config("llama")
    specs = check_shapes(Source(cfg), cfg)
    assert specs["layers.0.wq"].axes == ("embed", "heads")
    assert specs["final_norm"].init == "ones"


def test_random_parameters_follow_their_initialisers() -> None:
    cfg = tiny_config("llama")
    params = init_params(cfg, jax.random.key(0))
    assert (np.asarray(params["final_norm"]) == 1).all()
    for name, fan_in in (("wq", cfg.embed_dim), ("w_down", cfg.ffn_dim)):
        assert np.std(np.asarray(params["layers"][0][name])) == pytest.approx(fan_in**-0.5, rel=0.05)
    assert np.std(np.asarray(params["embed"])) == pytest.approx(cfg.embed_dim**-0.5, rel=0.05)
    again = init_params(cfg, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    other = np.asarray(init_params(cfg, jax.random.key(1))["embed"])
    assert (other != np.asarray(params["embed"])).any()
