"""What a split stage exchanges a second time in its backward pass, and which forms of tensors it keeps for it.

[ norm -> gather -> up -> gelu -> down -> sum ]    computed again as a segment: what it exchanges, too
  norm -> gather -> up                             beside segments: the part is kept, and gathered again
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from whale.axes.labels import Labels
from whale.estimate.costs.line import Line
from whale.estimate.costs.op_table import spec_line
from whale.estimate.prices.part import Segment
from whale.estimate.prices.prices import Prices
from whale.ir.writes import MemoryWrites
from whale.sharding.bridges import Bridge


class Again:
    """The bridges of a stage beside what it computes again.

    Args:
        prices: of the whole graph.
        labels: of the stage.
        bridges: of it.
        segments: the runs of its ops that are computed again.
    """

    def __init__(self, prices: Prices, labels: Labels, bridges: Iterable[Bridge], segments: Sequence[Segment]) -> None:
        self._prices, self._labels, self._segments = prices, labels, segments
        self._repeated = frozenset(name for segment in segments for name in segment)
        self._firsts = frozenset(segment[0] for segment in segments)
        self._bridges = tuple(bridges)

    def exchanged(self) -> Iterator[Bridge]:
        """What moves forward again: inside segments, and inputs of which only parts are kept."""
        return (bridge for bridge in self._bridges if self._is_inside(bridge) or bridge in self._kept_in_parts)

    def _is_inside(self, bridge: Bridge) -> bool:
        """A sum moves where it is made; anything else before its first user, and so outside where that begins a segment."""
        first = bridge.tensor if bridge.is_sum else next(iter(bridge.users), "")
        return first in self._repeated and (bridge.is_sum or first not in self._firsts)

    def copies(self, position: int) -> Line:
        """Bytes of the forms into which bridges bring tensors and that their users keep, by rows, at a position of the split group."""
        return Line.sum(self._size(bridge, position) for bridge in self._kept if bridge not in self._kept_in_parts)

    def largest(self, position: int, num_rows: float) -> Line:
        """Bytes of the largest tensor that is gathered again: it is whole while its users' backward passes run."""
        return max((self._size(bridge, position) for bridge in self._kept_in_parts), key=lambda line: line.at(num_rows), default=Line())

    def _size(self, bridge: Bridge, position: int) -> Line:
        """Bytes of what a bridge makes, by rows."""
        share = 1.0
        if bridge.target:
            sizes = next(shard.sizes for shard in self._labels.shards if shard.axis == bridge.target)
            share = sizes[position] / self._prices.axes.by_name[bridge.target].size
        graph = self._prices.graph
        return Line.sum(spec_line(spec, graph.num_rows) for spec in graph.by_name[bridge.tensor].outputs) * share

    @cached_property
    def _kept(self) -> tuple[Bridge, ...]:
        """The bridges that make a form of an activation which ops outside of segments keep."""
        graph, kept, found = self._prices.graph, self._prices.kept, list[Bridge]()
        for bridge in self._bridges:
            op = graph.by_name[bridge.tensor]
            keepers = (user for user in bridge.users if user not in self._repeated and graph.storage[op.name] in kept.get(user, ()))
            if op.kind == "call" and bridge.forward and not bridge.is_sum and any(keepers):
                found.append(bridge)
        return tuple(found)

    @cached_property
    def _kept_in_parts(self) -> frozenset[Bridge]:
        """Of those, the ones of which the parts are kept: where parts of the stage are computed again, what was gathered is, too."""
        if not self._segments:
            return frozenset()
        writes = MemoryWrites(self._prices.graph, self._labels.ops)
        return frozenset(bridge for bridge in self._kept if bridge.forward == "all-gather" and not writes.is_written_later(bridge.tensor))
