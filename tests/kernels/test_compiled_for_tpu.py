"""Every case compiles for a real TPU target, on a machine without one: the whole compiler runs, Mosaic included.

Needs the libtpu that matches the installed jaxlib: importable, or in the folder that ZLLM_LIBTPU names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pallas_kernels.masked_sampler.cases as masked_sampler_cases
import pallas_kernels.paged_attention.cases as paged_attention_cases

TOPOLOGY = "v5e:2x2"
REQUESTS = [("paged_attention", case.name) for case in paged_attention_cases.CASES] + [
    ("masked_sampler", case.name) for case in masked_sampler_cases.CASES
]


def _libtpu_folder() -> Path | None:
    """Where libtpu lies. It isn't imported here: it would take the TPU, or look for one, in the tests' own process."""
    if folder := os.environ.get("ZLLM_LIBTPU"):
        return Path(folder)
    spec = importlib.util.find_spec("libtpu")
    return Path(spec.origin).parent.parent if spec and spec.origin else None


@pytest.fixture(scope="module")
def reports(repo: Path) -> dict[tuple[str, str], dict[str, Any]]:
    libtpu = _libtpu_folder()
    if libtpu is None:
        pytest.skip("libtpu is not installed (pip install 'zllm-jax[tpu]', or name its folder in ZLLM_LIBTPU)")
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(repo), str(libtpu)]),
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for_tpu.py")), TOPOLOGY],
        input="".join(json.dumps({"kernel": kernel, "case": case}) + "\n" for kernel, case in REQUESTS),
        capture_output=True,
        text=True,
        env=env,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(line["kernel"], line["case"]): line for line in lines}


@pytest.mark.tpu_compile
@pytest.mark.parametrize("kernel, case", REQUESTS)
def test_compiles_to_a_mosaic_kernel_and_copies_no_operand(
    reports: dict[tuple[str, str], dict[str, Any]], kernel: str, case: str
) -> None:
    report = reports[kernel, case]
    assert "error" not in report, report["error"]
    assert report["mosaic"]
    assert report["copies"] == []
