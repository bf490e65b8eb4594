"""Compiles one kernel case for a TPU topology. Run by test_compiled_for_tpu.py in a process of its own.

usage: compile_for_tpu.py TOPOLOGY < one JSON object a line, {"kernel": ..., "case": ...}
prints one JSON object a line: what the compiled program holds, or the error.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

import pallas_kernels.masked_sampler.cases as masked_sampler_cases
import pallas_kernels.paged_attention.cases as paged_attention_cases
from pallas_kernels.masked_sampler import masked_sample
from pallas_kernels.paged_attention import paged_attention

KERNELS: dict[str, tuple[Any, Any]] = {
    "masked_sampler": (masked_sample, masked_sampler_cases.CASES),
    "paged_attention": (paged_attention, paged_attention_cases.CASES),
}


def compile_case(device: Any, kernel: str, case: str) -> dict[str, Any]:
    function, cases = KERNELS[kernel]
    inputs = next(each for each in cases if each.name == case).inputs()
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    static = {name: value for name, value in inputs.items() if name not in arrays}

    def row_major(array: np.ndarray) -> jax.ShapeDtypeStruct:
        layout = Format(Layout(tuple(range(array.ndim))), SingleDeviceSharding(device))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=layout)

    # `auto`, lowered on a machine without a TPU: it must choose by what the program is for.
    step = jax.jit(functools.partial(function, **static, implementation="auto"))
    compiled = step.lower(**{name: row_major(array) for name, array in arrays.items()}).compile()
    largest = max(arrays.values(), key=lambda array: array.nbytes)
    shape = "[" + ",".join(map(str, largest.shape)) + "]"
    text = compiled.as_text()
    return {
        "mosaic": 'custom_call_target="tpu_custom_call"' in text,
        "copies": [line.strip()[:200] for line in text.splitlines() if shape in line and " copy(" in line],
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def main() -> None:
    device = topologies.get_topology_desc(sys.argv[1], platform="tpu").devices[0]
    for line in sys.stdin:
        request = json.loads(line)
        try:
            report = compile_case(device, **request)
        except Exception as error:  # reported to the test of this case; the other cases go on
            report = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(request | report), flush=True)


if __name__ == "__main__":
    main()
