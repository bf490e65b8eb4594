"""The interpreter that the kernel tests trust does report what it is trusted to report."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._common.interpret import interpreted


def copy_then_read(x: jax.Array, *, wait_first: bool) -> jax.Array:
    def kernel(x_ref: Any, out_ref: Any, scratch_ref: Any, semaphore: Any) -> None:
        copy = pltpu.make_async_copy(x_ref, scratch_ref, semaphore)
        copy.start()
        if wait_first:
            copy.wait()
        out_ref[...] = scratch_ref[...]
        if not wait_first:
            copy.wait()

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
    )(x)


def test_a_read_that_does_not_wait_for_its_copy_is_reported() -> None:
    x = jnp.ones((8, 128))
    with pytest.raises(Exception, match=r"(?i)race|copy in flight"), interpreted():
        jax.block_until_ready(copy_then_read(x, wait_first=False))
    with interpreted():
        np.testing.assert_array_equal(copy_then_read(x, wait_first=True), x)


def test_fresh_memory_is_nan() -> None:
    def kernel(out_ref: Any, scratch_ref: Any) -> None:
        out_ref[...] = scratch_ref[...]

    block = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    with interpreted():
        out = pl.pallas_call(kernel, out_shape=block, scratch_shapes=[pltpu.VMEM(block.shape, block.dtype)])()
        assert np.isnan(out).all()


def test_a_read_from_beyond_the_end_raises() -> None:
    def kernel(start_ref: Any, x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[pl.ds(start_ref[0], 8), :]

    def rows_from(start: int) -> jax.Array:
        grid_spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(1,))
        call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32), grid_spec=grid_spec)
        return jax.block_until_ready(call(jnp.array([start], jnp.int32), jnp.ones((16, 128))))

    with interpreted():
        assert (rows_from(8) == 1).all()
    with pytest.raises(Exception, match=r"(?i)out-of-bounds"), interpreted():
        rows_from(9)
