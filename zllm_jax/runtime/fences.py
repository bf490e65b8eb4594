"""The grammars on the device: one table of fixed size, made where it stays and written in place."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zllm_jax.fence import FencePool, FenceTables, Patch, Place, TokenTables, blocks_of, first_patch, fixed_parts
from zllm_jax.runtime import programs
from zllm_jax.runtime.sharding import whole


class DeviceFences:
    """The pool's table on one device, or whole on each of a mesh. It may be large, and the host has no copy."""

    def __init__(self, pool: FencePool, mesh: Mesh | None = None) -> None:
        self._pool, self._mesh = pool, mesh
        zeros = jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype, device=whole(mesh)), pool.shapes)
        fixed = {name: jax.device_put(part, whole(mesh)) for name, part in fixed_parts(pool.vocabulary).items()}
        self.tables: FenceTables = replace(zeros, **fixed)
        self._write(first_patch(pool.vocabulary))

    def load(self, tables: TokenTables) -> Place:
        """Raises as `FencePool.load` does. A failure of the device may leave `tables` without arrays."""
        where, patch = self._pool.load(tables)
        if patch is not None:
            try:
                self._write(patch)
            except BaseException:
                self._pool.forget(tables)
                raise
        return where

    def release(self, tables: TokenTables) -> None:
        self._pool.release(tables)

    def _write(self, patch: Patch) -> None:
        for block in blocks_of(patch, self.tables):
            self.tables = programs.write_fences(self.tables, block, mesh=self._mesh)
