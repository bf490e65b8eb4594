"""Fences: which tokens may come next, as values on the device.

Knows grammars, machines over bytes and their masks over a vocabulary. Must not know the name of any tool, nor who asks.
"""

from zllm_jax.fence.automaton import DEAD, ByteAutomaton, choices, decimal_number
from zllm_jax.fence.device import FREE, FenceState, FenceTables, fence_advance, fence_mask, pack_positions
from zllm_jax.fence.forced import MIN_TOKENS, ForcedRuns, forced_text, may_force
from zllm_jax.fence.grammars import Compiled, Grammar, Refused, compile_fence, compile_grammar
from zllm_jax.fence.guard import NO_TOKEN, LoopGuard, word_tokens
from zllm_jax.fence.guard_device import (
    GuardRows,
    combine,
    ending_mask,
    excluding_mask,
    guard_rows,
    rows_advance,
    rows_begin,
    rows_end,
    rows_excluded,
)
from zllm_jax.fence.host import HostMachine, HostMatcher, HostVocabulary, lark
from zllm_jax.fence.machine import MAX_DEPTH, Condition, Edge, Frame, Machine, MachineBuilder, Position, machine_of
from zllm_jax.fence.placed import Block, Patch, blocks_of, first_patch, fixed_parts, write_block
from zllm_jax.fence.pool import FencePool, Place
from zllm_jax.fence.stored import tables_from_bytes, tables_to_bytes
from zllm_jax.fence.tables import TokenTables, compile_tokens
from zllm_jax.fence.vocabulary import Vocabulary, pack_bits, unpack_bits

__all__ = [
    "DEAD",
    "FREE",
    "MAX_DEPTH",
    "MIN_TOKENS",
    "NO_TOKEN",
    "Block",
    "ByteAutomaton",
    "Compiled",
    "Condition",
    "Edge",
    "FencePool",
    "FenceState",
    "FenceTables",
    "ForcedRuns",
    "Frame",
    "Grammar",
    "GuardRows",
    "HostMachine",
    "HostMatcher",
    "HostVocabulary",
    "LoopGuard",
    "Machine",
    "MachineBuilder",
    "Patch",
    "Place",
    "Position",
    "Refused",
    "TokenTables",
    "Vocabulary",
    "blocks_of",
    "choices",
    "combine",
    "compile_fence",
    "compile_grammar",
    "compile_tokens",
    "decimal_number",
    "ending_mask",
    "excluding_mask",
    "fence_advance",
    "fence_mask",
    "first_patch",
    "fixed_parts",
    "forced_text",
    "guard_rows",
    "lark",
    "machine_of",
    "may_force",
    "pack_bits",
    "pack_positions",
    "rows_advance",
    "rows_begin",
    "rows_end",
    "rows_excluded",
    "tables_from_bytes",
    "tables_to_bytes",
    "unpack_bits",
    "word_tokens",
    "write_block",
]
