"""What a stage holds of one micro-batch, tensor by tensor: the lines of `PartCost`, the cuts of a split stage, and the simulation are sums.

received, handed on   F ------------------------> end of B
kept                  F -------------> B                      for backward; where R recomputes the stage, from R on
restored                           [ a segment's turn ]       by recomputing it, one segment at a time
for weights                            I -------> W           in place of what is kept, where W makes weight gradients
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whale.estimate.costs.line import Floats, Line
from whale.estimate.memory.memory import kept_for_weights, kept_names, place_share, places_line, size_line
from whale.ir.graph import ModelGraph

Names = tuple[str, ...]
"""Tensors by the ops that make them, each once."""


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """The tensors that a stage holds of one micro-batch."""

    received: Names = ()  # from other stages
    handed_on: Names = ()
    kept: Names = ()  # for backward, outside recomputed segments; what is received or handed on may be among them
    restored: tuple[frozenset[str], ...] = ()  # per recomputed segment
    for_weights: Names = ()
    with_indices: Names = ()  # the ops that keep indices as well
    is_away: bool = False  # whether what is kept waits on the host

    @property
    def crossing(self) -> Names:
        return tuple(dict.fromkeys((*self.received, *self.handed_on)))

    @property
    def kept_there(self) -> Names:
        """What is kept on the device."""
        return () if self.is_away else self.kept

    @property
    def there(self) -> Names:
        """What lies on the device from F to B."""
        return tuple(dict.fromkeys((*self.kept_there, *self.crossing)))

    def bytes_there(self, graph: ModelGraph, sizes: Mapping[str, Line]) -> Line:
        """Bytes on the device from F to B, by rows; `sizes`: per op, the bytes of its results."""
        return size_line(sizes, self.there) + places_line(graph, sizes, () if self.is_away else self.with_indices)

    def bytes_away(self, graph: ModelGraph, sizes: Mapping[str, Line]) -> Line:
        """Bytes on the host, where what is kept waits there; what arrives stays on the device."""
        arrives = frozenset(self.received)
        return size_line(sizes, (name for name in self.kept if name not in arrives)) + places_line(graph, sizes, self.with_indices)


def held_tensors(
    graph: ModelGraph,
    ops: Sequence[str],
    kept: Mapping[str, tuple[str, ...]],
    segments: Sequence[Collection[str]] = (),
    *,
    received: Iterable[str] = (),
    handed_on: Iterable[str] = (),
    is_away: bool = False,
) -> HeldTensors:
    """What a stage that runs these ops holds; nothing without training.

    Args:
        kept: per op, what it keeps for backward (`kept_tensors`).
        segments: the runs of its ops that are recomputed.
        received: ops of other stages whose tensors arrive.
        handed_on: its ops whose tensors others read.
        is_away: whether what is kept waits on the host.
    """
    if graph.mode != "train":
        return HeldTensors()
    names, restored = kept_names(graph, ops, kept, segments)
    repeated = frozenset(name for segment in segments for name in segment)
    storage = graph.storage
    return HeldTensors(
        tuple(dict.fromkeys(storage[name] for name in received)),
        tuple(dict.fromkeys(storage[name] for name in handed_on)),
        tuple(names),
        restored,
        tuple(kept_for_weights(graph, ops)),
        tuple(name for name in ops if name not in repeated),
        is_away,
    )


def kept_by_maker(graph: ModelGraph, made: Sequence[Line], kept: Mapping[str, tuple[str, ...]]) -> Floats:
    """Bytes kept for backward without recomputation, each at the op that makes them, as lines by rows: ``[2, ops]``.

    Sums over the ops of stages are `HeldTensors.bytes_there` but for what crosses between them.

    Args:
        made: per op, the bytes of its results.
        kept: per op, what it keeps on the device; nothing where all of it waits on the host.
    """
    names, found = {name for owned in kept.values() for name in owned}, np.zeros((2, len(graph.ops)))
    for place, (op, line) in enumerate(zip(graph.ops, made, strict=True)):
        times = (op.name in names) + (place_share(op) if op.name in kept else 0.0)
        if times:
            found[:, place] = line.fixed * times, line.per_row * times
    return found
