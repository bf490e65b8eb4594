"""Sharding as data: the rule table, what it refuses, and that a mesh changes no token."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from zllm_jax.runtime import architecture, make_mesh
from zllm_jax.runtime.sharding import RULES, check_mesh, partition, sharding
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
        check_mesh(mesh, cfg, {})
    check_mesh(mesh, dataclasses.replace(cfg, num_kv_heads=4), {})


def test_a_mesh_that_cannot_take_the_model_is_refused() -> None:
    cfg = tiny_config("llama")
    specs = architecture(cfg).param_specs(cfg)
    kinds = (jax.sharding.AxisType.Auto,)
    with pytest.raises(ValueError, match=r"the mesh has the axes \('data',\), but parameters are split over 'model'"):
        check_mesh(AbstractMesh((2,), ("data",), kinds), cfg, specs)
    with pytest.raises(ValueError, match="axis 'vocab' of 259 cannot be split over 2 devices"):
        check_mesh(AbstractMesh((2,), ("model",), kinds), cfg, specs)
    assert make_mesh(1) is None
    with pytest.raises(ValueError, match=f"99 devices are asked for, but there are {len(jax.devices())}"):
        make_mesh(99)


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
    runner = drive.scorer(params, cfg, shape, prefill_buckets=(64,), decode_buckets=(1,), mesh=on)
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


# The rows of a state are saved on four devices and written on two and on one: what they are is not where they lay.
FROM_FOUR_TO_FEWER = """
import dataclasses, json, re, sys
import jax
import numpy as np
from tests.runtime import drive
from zllm_jax.runtime import (
    StateShape, architecture, count_compilations, fetch_decode, fetch_prefill, init_params, make_mesh, programs
)
from zllm_jax.runtime.sharding import sharding
from zllm_jax.testing import tiny_config

cfg = dataclasses.replace(tiny_config(sys.argv[1]), num_heads=8, num_kv_heads=4, vocab_size=260)
shape = StateShape(num_pages=24, page_tokens=8, num_rings=3, num_slots=2, max_pages=8)
prompt = np.random.default_rng(0).integers(0, 256, 45).tolist()
kept = 41
params = init_params(cfg, jax.random.key(0))
specs = architecture(cfg).param_specs(cfg)


def placed(mesh):
    if mesh is None:
        return params
    def put(path, leaf):
        name = ".".join(str(getattr(one, "key", getattr(one, "idx", None))) for one in path)
        return jax.device_put(leaf, sharding(mesh, specs[name].axes, leaf.shape))
    return jax.tree_util.tree_map_with_path(put, params)


def runner(count):
    mesh = make_mesh(count)
    fetch_prefill(cfg, shape, "float32", "float32", 16, mesh)
    fetch_decode(cfg, shape, "float32", "float32", 1, 2, mesh)
    made = drive.scorer(
        placed(mesh), cfg, shape, prefill_buckets=(16,), decode_buckets=(1,), decode_steps=2, mesh=mesh
    )
    with count_compilations() as fetched:
        drive.fed(made, prompt[:1], drive.Place((0,)))
        made.prefill(drive.chunk(prompt[:9], 0, drive.Place((0, 1)), last=True))
    made.warmup()
    return made, fetched.programs


four, fetched = runner(4)
before = drive.Place((7, 2, 5, 0, 9, 4, 23, 11), ring=1)
drive.prefilled(four, prompt[:kept], before, size=16)
rows = drive.saved(four, before, kept)
first = drive.prefilled(four, prompt, before, size=16, start=kept)
answer = drive.ids(drive.continued(four, first, len(prompt), before, 9))
pool = jax.tree.leaves(four.layers)[0]
step = programs.decode.lower(
    four._params, four._state, programs.decode_inputs((), 1, 8, 1), cfg=cfg, max_steps=2, mesh=four._mesh
).compile()
shapes = re.findall(r"= \\w+\\[([0-9,]*)\\]\\S* (?:all-|collective-|reduce-)", step.as_text())
print(json.dumps({
    "fetched": fetched,
    "heads": [one.data.shape[1] for one in pool.addressable_shards],
    "kept": step.memory_analysis().alias_size_in_bytes == four.state_bytes // 4,
    "most exchanged": max(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes),
}))
for count in (2, 1):
    made, fetched = runner(count)
    place = drive.Place((3, 1, 8, 20, 6, 13, 2, 17), ring=2)
    with count_compilations() as compiled:
        drive.restore(made, rows, place, kept)
        again = drive.saved(made, place, kept)
        first = drive.prefilled(made, prompt, place, size=16, start=kept)
        tokens = drive.ids(drive.continued(made, first, len(prompt), place, 9))
        made.begin(0, prompt)
        made.copy_page(3, 1)
    print(json.dumps({
        "devices": count,
        "bits": all(np.array_equal(again[name], part) for name, part in rows.items()),
        "tokens": tokens == answer,
        "compiled": compiled.programs,
        "fetched": fetched,
    }))
"""


def on_four_devices(script: str, *args: str, repo: Path, work: Path) -> list[Any]:
    """Each line that a script prints."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": str(repo)}
    done = subprocess.run(
        [sys.executable, "-c", script, *args], env=environment, capture_output=True, text=True, check=False, cwd=work
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("arch", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_saved_on_four_devices_restored_on_fewer(arch: str, repo: Path, tmp_path: Path) -> None:
    split, *restored = on_four_devices(FROM_FOUR_TO_FEWER, arch, repo=repo, work=tmp_path)
    vocabulary = 260  # the most that a step exchanges is a row of logits
    assert split == {"fetched": 0, "heads": [1, 1, 1, 1], "kept": True, "most exchanged": vocabulary}
    for count, one in zip((2, 1), restored, strict=True):
        assert one == {"devices": count, "bits": True, "tokens": True, "compiled": 0, "fetched": 0}


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_mesh_changes_no_token(name: str, repo: Path, tmp_path: Path) -> None:
    (answer,) = on_four_devices(ON_FOUR_DEVICES, name, str(tmp_path), repo=repo, work=tmp_path)
    for sharded in ("sharded", "orbax"):
        assert answer[sharded]["tokens"] == answer["alone"]["tokens"]
        rows, columns = answer[sharded]["whole"]
        assert answer[sharded]["part"] == [rows, columns // 2]
        assert (answer["alone"]["devices"], answer[sharded]["devices"]) == (1, 2)
