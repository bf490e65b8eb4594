"""Which states of a machine look alike to the next few bytes: they are walked as one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zllm_jax.fence.flow import chain
from zllm_jax.fence.machine import Machine

Ints = npt.NDArray[np.int64]


def alike(machine: Machine, frame_of: dict[int, frozenset[int]], most: int) -> Ints:
    """By number of bytes h and state: the first state that looks alike for h bytes, i64[h, Q].

    States look alike for no bytes where both are alive, and for one more where each byte leads to such as look alike,
    or takes the same edge; and, where that leaves the frame, out of frames that the same edges opened.
    """
    edges = machine.edges[:, machine.columns]
    taken = _named_edges(machine, edges, frame_of)
    state, column = np.nonzero(np.concatenate([edges, np.ones((machine.num_states, 1), np.int32)], axis=1))
    own = column == edges.shape[1]
    after = np.append(taken, np.arange(machine.num_states)[:, None], axis=1)[state, column]
    scramble = np.random.default_rng(0).integers(1, 2**63, edges.shape[1] + 1, dtype=np.uint64) | np.uint64(1)
    scramble, begin = scramble[column], np.flatnonzero(own) - np.diff(np.flatnonzero(own), prepend=-1) + 1
    fixed = _mixed(np.arange(machine.num_states, int(after.max(initial=0)) + 1))
    label = np.minimum(np.arange(machine.num_states), 1)
    num, layers = 2, [_firsts(label)]
    for _ in range(most):
        mixed = np.append(_mixed(label), fixed)
        names, new = np.unique(np.add.reduceat(mixed[after] * scramble, begin), return_inverse=True)
        layers.append(_firsts(new))
        if len(names) == num:
            break
        num, label = len(names), new
    return np.stack(layers)


def _named_edges(machine: Machine, edges: npt.NDArray[np.int32], frame_of: dict[int, frozenset[int]]) -> Ints:
    """The next states, and instead of special edges numbers behind all states: the same where they do the same."""
    frames = {one: i for i, one in enumerate(dict.fromkeys(frame_of.values()), 1)}
    frame = np.zeros(machine.num_states, np.int64)
    frame[list(frame_of)] = [frames[one] for one in frame_of.values()]
    pops = np.array([any(one.pop is not None for one in chain(edge)) for edge in machine.special], np.bool_)
    named = edges.astype(np.int64)
    state, column = np.nonzero(edges < 0)
    special = ~named[state, column]
    left = pops[special] if len(pops) else np.zeros(0, np.bool_)
    numbers = special + np.where(left, frame[state] * len(pops), 0)
    named[state, column] = machine.num_states + np.unique(numbers, return_inverse=True)[1]
    return named


def _mixed(numbers: Ints) -> npt.NDArray[np.uint64]:
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _firsts(label: Ints) -> Ints:
    """Of each state, the first one with its label."""
    first = np.zeros(int(label.max()) + 1, np.int64)
    first[label[::-1]] = np.arange(len(label))[::-1]  # of equal ones the last write stays
    firsts: Ints = first[label]
    return firsts
