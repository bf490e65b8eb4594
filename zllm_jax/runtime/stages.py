"""A model's layers in a few contiguous groups: what computes, and what moves in and out, as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from zllm_jax.runtime.specs import LayerSpec, StateSpec

MAX_STAGES = 4
T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """Layers first, first + 1, ... of a model, and what each keeps."""

    index: int
    first: int
    spec: StateSpec

    @property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """What the layers keep: stages that are equal in this run the same compiled programs."""
        return self.spec.layers

    def of(self, layers: tuple[T, ...]) -> tuple[T, ...]:
        """This stage's part of a tuple that has an element a layer."""
        return layers[self.first : self.first + len(self.kinds)]

    def put(self, layers: tuple[T, ...], mine: tuple[T, ...]) -> tuple[T, ...]:
        """`layers` with this stage's part replaced."""
        return (*layers[: self.first], *mine, *layers[self.first + len(self.kinds) :])


def cut(spec: StateSpec) -> tuple[Stage, ...]:
    """Two to `MAX_STAGES` groups of equal length (the last may be shorter), one group for a single layer.

    The length is that which leaves the fewest layers to compile, then the shortest: 30 equal layers are 3 x 10, and
    five ring layers before each paged one are cut after a paged one.
    """
    num_layers = len(spec.layers)
    lengths = range(-(-num_layers // MAX_STAGES), max(2, num_layers))
    best = min(lengths, key=lambda length: sum(map(len, set(_groups(spec, length)))))
    return tuple(Stage(i, i * best, StateSpec(kinds)) for i, kinds in enumerate(_groups(spec, best)))


def _groups(spec: StateSpec, length: int) -> Iterator[tuple[LayerSpec, ...]]:
    for first in range(0, len(spec.layers), length):
        yield spec.layers[first : first + length]
