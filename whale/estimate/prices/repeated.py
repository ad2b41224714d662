"""What a split stage exchanges again because of recomputation, and which forms of tensors it keeps for that.

[ norm -> gather -> up -> gelu -> down -> sum ]    recomputed as a segment, with its exchanges
  norm -> gather -> up                             in no segment: the shard is kept, and gathered again
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from whale.axes.labels import Labels
from whale.estimate.costs.line import Line
from whale.estimate.memory.memory import keeps_read
from whale.estimate.memory.passes import BridgedTensor, as_bytes
from whale.estimate.prices.part import Segment
from whale.estimate.prices.prices import Prices
from whale.ir.writes import MemoryWrites
from whale.sharding.bridges import Bridge


class RepeatedRuns:
    """The recomputed runs of a stage's ops, and which forms of tensors are kept beside them."""

    def __init__(self, prices: Prices, runs: Iterable[Sequence[str]]) -> None:
        own = tuple(runs)
        self._prices, self.ops = prices, frozenset(name for run in own for name in run)
        self._firsts = frozenset(run[0] for run in own)

    def makes(self, reader: str) -> bool:
        """Whether what is made just before an op reads it is made in a run: not if the op begins one."""
        return reader in self.ops and reader not in self._firsts

    def is_entered(self, readers: Sequence[str]) -> bool:
        """Whether a form that these ops read, in order, is made outside a run of one of them, and so kept."""
        return not (readers and self.makes(readers[0])) and not self.ops.isdisjoint(readers)

    def are_keeping(self, tensor: str, readers: Iterable[str]) -> bool:
        """Whether one of these ops keeps a form of a tensor for backward outside runs."""
        return any(reader not in self.ops and self.keeps(reader, tensor) for reader in readers)

    def keeps(self, reader: str, tensor: str) -> bool:
        """Whether an op keeps the form that it reads of a tensor."""
        return keeps_read(self._prices.graph, self._prices.kept, reader, tensor)


class RepeatedBridges:
    """The bridges of a stage with recomputed segments."""

    def __init__(self, prices: Prices, labels: Labels, bridges: Iterable[Bridge], segments: Sequence[Segment]) -> None:
        self._prices, self._labels, self._segments = prices, labels, segments
        self._runs = RepeatedRuns(prices, segments)
        self._bridges = tuple(bridges)

    def exchanged(self) -> Iterator[Bridge]:
        """What moves forward again: inside segments, and inputs of which only shards are kept."""
        return (bridge for bridge in self._bridges if self._is_inside(bridge) or bridge in self._kept_in_parts)

    def _is_inside(self, bridge: Bridge) -> bool:
        """A sum moves where it is made; anything else before its first user, which is outside if that starts a segment."""
        return bridge.tensor in self._runs.ops if bridge.is_sum else self._runs.makes(next(iter(bridge.users), ""))

    def copies(self, position: int) -> Line:
        """Bytes, by rows, of the forms that bridges make and their users keep, at a position of the split group."""
        return Line.sum(self._size(bridge, position) for bridge in self._kept if bridge not in self._kept_in_parts)

    def forms(self, position: int) -> tuple[BridgedTensor, ...]:
        """The forms that bridges make on the device at a position; their bytes are by the rows of its group."""
        return tuple(self._form(bridge, position) for bridge in self._moving if bridge.is_sum or bridge.users)

    def _form(self, bridge: Bridge, position: int) -> BridgedTensor:
        users = (bridge.tensor,) if bridge.is_sum else bridge.users
        keepers = tuple(user for user in bridge.users if self._runs.keeps(user, bridge.tensor))
        is_kept = bridge in self._kept and bridge not in self._kept_in_parts
        return BridgedTensor(users, keepers, as_bytes(self._size(bridge, position)), is_kept, bool(bridge.backward))

    def _size(self, bridge: Bridge, position: int) -> Line:
        """Bytes of a bridge's result, by rows; of a sum, of each term."""
        share = 1.0
        if bridge.target and not bridge.is_sum:
            sizes = next(shard.sizes for shard in self._labels.shards if shard.axis == bridge.target)
            share = sizes[position] / sum(sizes)
        return self._prices.outputs[bridge.tensor] * share

    @cached_property
    def _kept(self) -> tuple[Bridge, ...]:
        """The bridges whose form ops outside segments keep, or whose form enters a segment."""
        runs, moving = self._runs, (bridge for bridge in self._moving if not bridge.is_sum)
        return tuple(own for own in moving if runs.is_entered(own.users) or runs.are_keeping(own.tensor, own.users))

    @cached_property
    def _moving(self) -> tuple[Bridge, ...]:
        return tuple(bridge for bridge in self._bridges if bridge.forward)

    @cached_property
    def _kept_in_parts(self) -> frozenset[Bridge]:
        """Of these, the ones of which only the shard is kept: with recomputation, gathers are repeated too."""
        if not self._segments:
            return frozenset()
        writes = MemoryWrites(self._prices.graph, self._labels.ops)
        gathered = (bridge for bridge in self._kept if bridge.forward == "all-gather" and not self._runs.is_entered(bridge.users))
        return frozenset(bridge for bridge in gathered if self._is_activation(bridge) and not writes.is_written_later(bridge.tensor))

    def _is_activation(self, bridge: Bridge) -> bool:
        return self._prices.graph.by_name[bridge.tensor].kind == "call"
