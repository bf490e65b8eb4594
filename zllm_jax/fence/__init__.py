"""Fences: which tokens may come next, as values on the device.

Knows grammars, machines over bytes and their masks over a vocabulary. Must not know the name of any tool, nor who asks.
"""

from zllm_jax.fence.automaton import DEAD, ByteAutomaton, choices, decimal_number
from zllm_jax.fence.device import FREE, FenceState, FenceTables, fence_advance, fence_mask, pack_positions
from zllm_jax.fence.grammars import Compiled, compile_fence
from zllm_jax.fence.machine import MAX_DEPTH, Condition, Edge, Frame, Machine, MachineBuilder, Position, machine_of
from zllm_jax.fence.pool import FencePool, Place
from zllm_jax.fence.tables import TokenTables, compile_tokens
from zllm_jax.fence.vocabulary import Vocabulary, pack_bits, unpack_bits

__all__ = [
    "DEAD",
    "FREE",
    "MAX_DEPTH",
    "ByteAutomaton",
    "Compiled",
    "Condition",
    "Edge",
    "FencePool",
    "FenceState",
    "FenceTables",
    "Frame",
    "Machine",
    "MachineBuilder",
    "Place",
    "Position",
    "TokenTables",
    "Vocabulary",
    "choices",
    "compile_fence",
    "compile_tokens",
    "decimal_number",
    "fence_advance",
    "fence_mask",
    "machine_of",
    "pack_bits",
    "pack_positions",
    "unpack_bits",
]
