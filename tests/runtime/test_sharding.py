"""Sharding as data: the rule table, what it refuses, and that a mesh changes no token."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from zllm_jax.runtime import architecture
from zllm_jax.runtime.sharding import RULES, check_heads, partition, sharding
from zllm_jax.runtime.specs import ArraySpec
from zllm_jax.testing import tiny_config


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_every_parameter_has_a_place(arch: str) -> None:
    placed = {
        name: partition(spec.axes)
        for name, spec in architecture(tiny_config(arch)).param_specs(tiny_config(arch)).items()
    }
    assert placed["embed"] == PartitionSpec("model", None)
    assert placed["layers.1.wq"] == placed["layers.1.w_up"] == PartitionSpec(None, "model")
    assert placed["layers.1.wo"] == placed["layers.1.w_down"] == PartitionSpec("model", None)
    assert placed["final_norm"] == PartitionSpec(None)


def test_a_mesh_axis_is_used_once_an_array() -> None:
    with pytest.raises(ValueError, match=r"\('heads', 'ffn'\) map twice to mesh axis 'model'"):
        partition(("heads", "ffn"))
    assert partition(("heads", "ffn"), {**RULES, "ffn": None}) == PartitionSpec("model", None)


def test_an_axis_without_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="'colour' has no rule; known: "):
        partition(("colour",))  # type: ignore[arg-type]


def test_a_split_must_come_out_even() -> None:
    mesh = AbstractMesh((4,), ("model",), (jax.sharding.AxisType.Auto,))
    assert sharding(mesh, ("embed", "ffn"), (6, 8)).spec == PartitionSpec(None, "model")
    with pytest.raises(ValueError, match="axis 'ffn' of 6 cannot be split over 4 devices"):
        sharding(mesh, ("embed", "ffn"), (8, 6))


def test_a_head_stays_whole() -> None:
    mesh = AbstractMesh((4,), ("model",), (jax.sharding.AxisType.Auto,))
    cfg = dataclasses.replace(tiny_config("llama"), num_heads=4, num_kv_heads=2, head_dim=16)
    sharding(mesh, ("embed", "kv_heads"), (cfg.embed_dim, cfg.num_kv_heads * cfg.head_dim))  # 8 columns a device
    with pytest.raises(ValueError, match="2 kv_heads cannot be split over 4 devices"):
        check_heads(mesh, cfg)
    check_heads(mesh, dataclasses.replace(cfg, num_kv_heads=4))


def test_a_spec_names_an_axis_a_dimension() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        ArraySpec((3, 4), ("embed",))


# Four devices need a process of their own: jax fixes their number when it starts. The models get one token more, so
# that their vocabulary can be split; two kv heads are split over two of the devices.
ON_FOUR_DEVICES = """
import json, sys
from pathlib import Path
import jax
import numpy as np
from tests.checkpoint import writers
from tests.runtime import drive
from zllm_jax.checkpoint import convert, open_checkpoint
from zllm_jax.runtime import StateShape, load_params

name, work = sys.argv[1], Path(sys.argv[2])
where = writers.copy_tiny(name, work / name, vocab_size=200)
tensors = writers.tiny_tensors(name)
for embedding in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
    tensors[embedding] = np.pad(tensors[embedding], ((0, 1), (0, 0)))
writers.save_tiny(tensors, where)
mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
hugging_face = open_checkpoint(where)
orbax = open_checkpoint(convert(hugging_face, work / "orbax"))
cfg = hugging_face.config
shape = StateShape(num_pages=8, page_tokens=16, num_rings=2, num_slots=1, max_pages=8)
prompt = np.load(writers.TINY / name / "reference.npz")["n40.ids"].tolist()
place = drive.Place(drive.scattered(shape, seed=0), ring=1)
answer = {}
for name, source, on in (("alone", hugging_face, None), ("sharded", hugging_face, mesh), ("orbax", orbax, mesh)):
    params = load_params(source, cfg, "float32", mesh=on)
    runner = drive.scorer(params, cfg, shape, prefill_buckets=(64,), decode_buckets=(1,))
    first = drive.prefilled(runner, prompt, place, size=64)
    wq = params["layers"][0]["wq"]
    answer[name] = {
        "tokens": drive.ids(drive.continued(runner, first, len(prompt), place, 12)),
        "part": wq.addressable_shards[0].data.shape,
        "devices": len(wq.sharding.device_set),
        "whole": wq.shape,
    }
print(json.dumps(answer))
"""


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_mesh_changes_no_token(name: str, repo: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": str(repo)}
    done = subprocess.run(
        [sys.executable, "-c", ON_FOUR_DEVICES, name, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    for sharded in ("sharded", "orbax"):
        assert answer[sharded]["tokens"] == answer["alone"]["tokens"]
        rows, columns = answer[sharded]["whole"]
        assert answer[sharded]["part"] == [rows, columns // 2]
        assert (answer["alone"]["devices"], answer[sharded]["devices"]) == (1, 2)
