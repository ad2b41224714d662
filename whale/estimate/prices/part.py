"""What one stage runs, wherever it runs, and what it computes again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from whale.ir.graph import ModelGraph

Segment = tuple[str, ...]
"""A run of a stage's ops."""


@dataclass(frozen=True)
class Part:
    """What one stage runs, wherever it runs.

    Attributes:
        ops: calls in graph order, repeated ones included.
        parameters: names of the parameters and buffers that these read.
        received: per source stage, ascending, the ops whose tensors arrive.
        handed_on: the ops whose tensors other stages read.
    """

    ops: tuple[str, ...]
    parameters: tuple[str, ...]
    received: tuple[tuple[int, tuple[str, ...]], ...]
    handed_on: tuple[str, ...] = ()

    @cached_property
    def arriving(self) -> tuple[str, ...]:
        """The ops of other stages whose tensors arrive, each once."""
        return tuple(dict.fromkeys(name for _, names in self.received for name in names))

    def received_from(self, stage: int) -> tuple[str, ...]:
        """The ops of another stage whose tensors arrive."""
        return dict(self.received).get(stage, ())

    def returned(self, graph: ModelGraph) -> frozenset[str]:
        """Values that leave the stage: they are made whole."""
        terms = (name for term in graph.loss for name in (term.sum, term.weight) if name)
        return frozenset(self.ops).intersection((*self.handed_on, *graph.outputs, *terms))

    def crossing(self, graph: ModelGraph) -> tuple[str, ...]:
        """The storages of what arrives and of what is handed on: they are there until a micro-batch is done."""
        return tuple(dict.fromkeys(graph.storage[name] for name in (*self.arriving, *self.handed_on)))

    @cached_property
    def _hash(self) -> int:
        return hash((self.ops, self.parameters, self.received, self.handed_on))

    def __hash__(self) -> int:  # parts are keys of what was worked out about them, and long
        return self._hash


@dataclass(frozen=True, slots=True)
class Recompute:
    """What one stage computes again in its backward pass.

    Attributes:
        segments: runs of its ops, in order.
        num_alive: where R actions recompute the whole stage, how many recomputed micro-batches are alive at once; else 0.
    """

    segments: tuple[Segment, ...] = ()
    num_alive: int = 0


@dataclass(frozen=True, slots=True)
class Alive:
    """How many micro-batches a stage holds something of at once.

    Attributes:
        in_flight: all of them, from F to the last of B or W.
        waiting: those among them that may be between I and W.
    """

    in_flight: int
    waiting: int = 0


NOTHING = Recompute()
