"""Fences: which tokens may come next, as values on the device.

Knows automata over bytes and their masks over a vocabulary. Must not know the name of any tool, nor who asks.
"""

from zllm_jax.fence.automaton import DEAD, ByteAutomaton, choices, decimal_number
from zllm_jax.fence.device import FenceState, TokenAutomaton, fence_advance, fence_mask, fence_start
from zllm_jax.fence.machine import MAX_DEPTH, Condition, Edge, Frame, Machine, MachineBuilder, Position, machine_of
from zllm_jax.fence.tokens import FREE, Fences, compile_fences, pack_bits, unpack_bits

__all__ = [
    "DEAD",
    "FREE",
    "MAX_DEPTH",
    "ByteAutomaton",
    "Condition",
    "Edge",
    "FenceState",
    "Fences",
    "Frame",
    "Machine",
    "MachineBuilder",
    "Position",
    "TokenAutomaton",
    "choices",
    "compile_fences",
    "decimal_number",
    "fence_advance",
    "fence_mask",
    "fence_start",
    "machine_of",
    "pack_bits",
    "unpack_bits",
]
