"""Counter-based Gumbel noise: a function of (key, token id) alone, so any implementation can make any part of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
ROUNDS = 13  # the fewest with which Threefry-2x32 passes all of BigCrush (Salmon et al., SC 2011, table 2)
PARITY = 0x1BD11BDA


def threefry_2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array], rounds: int = ROUNDS
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 of Random123. All u32 of one shape; adds, rotations and xors only, which every vector unit has."""
    k0, k1 = key
    schedule = (k0, k1, k0 ^ k1 ^ jnp.uint32(PARITY))
    x0, x1 = counter[0] + k0, counter[1] + k1
    for index in range(rounds):
        turn = ROTATIONS[index % 8]
        x0 = x0 + x1
        x1 = (x1 << jnp.uint32(turn)) | (x1 >> jnp.uint32(32 - turn))
        x1 = x1 ^ x0
        if index % 4 == 3:
            step = index // 4 + 1
            x0 = x0 + schedule[step % 3]
            x1 = x1 + schedule[(step + 1) % 3] + jnp.uint32(step)
    return x0, x1


def gumbel(key: tuple[jax.Array, jax.Array], token: jax.Array) -> jax.Array:
    """Standard Gumbel noise. key: two u32, token: i32, all of one shape. Returns f32 of that shape.

    The winner of a large vocabulary has a u near 0, so that is where u keeps its resolution (2^-33, then relative),
    unlike a uniform number near 1, whose steps of 2^-24 would merge the best candidates' noise.
    """
    counter = jax.lax.bitcast_convert_type(token, jnp.uint32)
    bits, _ = threefry_2x32(key, (counter, jnp.zeros_like(counter)))
    high = jax.lax.bitcast_convert_type(bits >> jnp.uint32(16), jnp.int32).astype(jnp.float32)
    low = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF), jnp.int32).astype(jnp.float32)
    u = high * 2.0**-16 + (low + 0.5) * 2.0**-32
    u = jnp.minimum(u, 1 - 2.0**-24)  # the sum may round up to 1, whose logarithm would be infinite
    return -jnp.log(-jnp.log1p(-u))
