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
from whale.estimate.memory.forms import BridgedTensor
from whale.estimate.memory.memory import keeps_parameter
from whale.estimate.prices.part import Segment
from whale.estimate.prices.prices import Prices
from whale.ir.writes import MemoryWrites
from whale.sharding.bridges import Bridge


class RepeatedBridges:
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

    def forms(self, position: int, num_rows: float) -> tuple[BridgedTensor, ...]:
        """What bridges make on a device.

        Args:
            position: its own in the split group.
            num_rows: that the group takes.
        """
        return tuple(self._form(bridge, position, num_rows) for bridge in self._moving if bridge.is_sum or bridge.users)

    def _form(self, bridge: Bridge, position: int, num_rows: float) -> BridgedTensor:
        users = (bridge.tensor,) if bridge.is_sum else bridge.users
        keepers = tuple(user for user in bridge.users if self._keeps(user, bridge))
        is_kept = bridge in self._kept and bridge not in self._kept_in_parts
        return BridgedTensor(users, keepers, self._size(bridge, position).at(num_rows), is_kept, bool(bridge.backward))

    def _size(self, bridge: Bridge, position: int) -> Line:
        """Bytes of what a bridge makes, by rows; of a sum, of each term."""
        share = 1.0
        if bridge.target and not bridge.is_sum:
            sizes = next(shard.sizes for shard in self._labels.shards if shard.axis == bridge.target)
            share = sizes[position] / self._prices.axes.by_name[bridge.target].size
        graph = self._prices.graph
        return Line.sum(spec_line(spec, graph.num_rows) for spec in graph.by_name[bridge.tensor].outputs) * share

    @cached_property
    def _kept(self) -> tuple[Bridge, ...]:
        """The bridges that make a form of a tensor which ops outside of segments keep, or which enters a segment."""
        return tuple(bridge for bridge in self._moving if not bridge.is_sum and (self._enters(bridge) or any(self._keepers(bridge))))

    def _keepers(self, bridge: Bridge) -> Iterator[str]:
        """The ops outside of segments that keep what a bridge makes."""
        return (user for user in bridge.users if user not in self._repeated and self._keeps(user, bridge))

    def _enters(self, bridge: Bridge) -> bool:
        """Whether it makes its form outside of a segment that reads it, and so keeps it."""
        return not self._is_inside(bridge) and not self._repeated.isdisjoint(bridge.users)

    @cached_property
    def _moving(self) -> tuple[Bridge, ...]:
        return tuple(bridge for bridge in self._bridges if bridge.forward)

    def _keeps(self, user: str, bridge: Bridge) -> bool:
        graph = self._prices.graph
        if self._is_activation(bridge):
            return graph.storage[bridge.tensor] in self._prices.kept.get(user, ())
        return keeps_parameter(graph, graph.by_name[user], bridge.tensor)

    @cached_property
    def _kept_in_parts(self) -> frozenset[Bridge]:
        """Of those, the ones of which the parts are kept: where parts of the stage are computed again, what was gathered is, too."""
        if not self._segments:
            return frozenset()
        writes = MemoryWrites(self._prices.graph, self._labels.ops)
        gathered = (bridge for bridge in self._kept if bridge.forward == "all-gather" and not self._enters(bridge))
        return frozenset(bridge for bridge in gathered if self._is_activation(bridge) and not writes.is_written_later(bridge.tensor))

    def _is_activation(self, bridge: Bridge) -> bool:
        return self._prices.graph.by_name[bridge.tensor].kind == "call"
