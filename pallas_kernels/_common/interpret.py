"""Run TPU kernels on a CPU, with memories, copies and semaphores simulated as strictly as this JAX can."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulator
from jax.experimental.pallas import tpu as pltpu


class RaceFound(AssertionError):
    """A copy and a read or write of the same memory were not ordered."""


@contextmanager
def interpreted() -> Iterator[None]:
    """Within it, every `pallas_call` is interpreted: NaN in fresh memory, out-of-bounds reads and races raise.

    Raises RaceFound on leaving when a kernel raced (newer JAX raises its own error at the race itself). Results must be
    waited for (`jax.block_until_ready`) inside.
    """
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    try:
        with pltpu.force_tpu_interpret_mode(params):
            yield
        # 0.10 only notes a race, and only in this private place; 0.12 has `on_race`, which raises by default.
        raises_itself = "on_race" in {field.name for field in dataclasses.fields(params)}
        if not raises_itself and simulator.races is not None and simulator.races.races_found:
            raise RaceFound("the kernel reads or writes memory that a copy in flight also touches")
    finally:
        pltpu.reset_tpu_interpret_mode_state()
