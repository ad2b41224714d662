"""What one stage runs and recomputes, independent of devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from whale.ir.graph import ModelGraph

Segment = tuple[str, ...]
"""A run of a stage's ops."""


@dataclass(frozen=True)
class Part:
    """What one stage runs."""

    ops: tuple[str, ...]  # calls in graph order, repeated ones included
    parameters: tuple[str, ...]  # names of the parameters and buffers that these read
    received: tuple[tuple[int, tuple[str, ...]], ...]  # per source stage, ascending, the ops whose tensors arrive
    handed_on: tuple[str, ...] = ()  # the ops whose tensors other stages read

    @cached_property
    def arriving(self) -> tuple[str, ...]:
        """The distinct ops of other stages whose tensors arrive."""
        return tuple(dict.fromkeys(name for _, names in self.received for name in names))

    @cached_property
    def crossing(self) -> frozenset[str]:
        """The ops whose tensors arrive or are handed on."""
        return frozenset((*self.arriving, *self.handed_on))

    def received_from(self, stage: int) -> tuple[str, ...]:
        return dict(self.received).get(stage, ())

    def returned(self, graph: ModelGraph) -> frozenset[str]:
        """Values that leave the stage: they must be whole."""
        terms = (name for term in graph.loss for name in (term.sum, term.weight) if name)
        return frozenset(self.ops).intersection((*self.handed_on, *graph.outputs, *terms))

    @cached_property
    def _hash(self) -> int:
        return hash((self.ops, self.parameters, self.received, self.handed_on))

    def __hash__(self) -> int:  # parts are keys of what was worked out about them, and long
        return self._hash


@dataclass(frozen=True, slots=True)
class Recompute:
    """What one stage recomputes."""

    segments: tuple[Segment, ...] = ()  # runs of its ops, in order
    num_alive: int = 0  # with R actions for the whole stage, the recomputed micro-batches alive at once; else 0


@dataclass(frozen=True, slots=True)
class Alive:
    """Micro-batches alive at once on a stage."""

    in_flight: int  # from F to the last of B or W
    waiting: int = 0  # of these, between I and W
    is_all: bool = False  # whether all micro-batches are in flight when the first goes back


NOTHING = Recompute()
