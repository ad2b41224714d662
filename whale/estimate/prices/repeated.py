"""What a split stage exchanges again because of recomputation, and which forms of tensors it keeps for that.

[ norm -> gather -> up -> gelu -> down -> sum ]    recomputed as a segment, with its exchanges
  norm -> gather -> up                             in no segment: the shard is kept, and gathered again
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from whale.axes.labels import Labels
from whale.estimate.costs.line import Line
from whale.estimate.memory.memory import keeps_read
from whale.estimate.memory.passes import BridgedTensor, as_bytes
from whale.estimate.prices.part import Segment
from whale.estimate.prices.prices import Prices
from whale.ir.graph import Op
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
    """The bridges of a stage with recomputed segments.

    made in parts -> gather -> whole        an op that reads it whole keeps the whole, though it reads a view of it;
                                            the part stays only for those that keep it themselves
    handed on whole                         from F to the end of B, and so does its gradient
    """

    def __init__(
        self, prices: Prices, labels: Labels, bridges: Iterable[Bridge], segments: Sequence[Segment], crossing: Collection[str]
    ) -> None:
        self._prices, self._labels, self._segments = prices, labels, segments
        self._runs = RepeatedRuns(prices, segments)
        self._bridges, self._crossing = tuple(bridges), frozenset(prices.graph.storage[name] for name in crossing)
        self._forms: dict[int, tuple[BridgedTensor, ...]] = {}

    def exchanged(self) -> Iterator[Bridge]:
        """What moves forward again: inside segments, and inputs of which only shards are kept."""
        return (bridge for bridge in self._bridges if self._is_inside(bridge) or bridge in self._kept_in_parts)

    def _is_inside(self, bridge: Bridge) -> bool:
        """A sum moves where it is made; anything else before its first user, which is outside if that starts a segment."""
        return bridge.tensor in self._runs.ops if bridge.is_sum else self._runs.makes(next(iter(bridge.users), ""))

    def copies(self, position: int) -> Line:
        """Bytes, by rows, that are kept beside the parts that ops keep, at a position of the split group."""
        found = sum((form.num_bytes for form in self.forms(position) if form.is_kept), 0j)
        return Line(found.real, found.imag)

    def forms(self, position: int) -> tuple[BridgedTensor, ...]:
        """The forms that bridges make on the device at a position; their bytes are by the rows of its group."""
        if position not in self._forms:
            moving = (self._form(bridge, position) for bridge in self._moving if bridge.is_sum or bridge.users)
            leaving = (self._handed_on(bridge, position) for bridge in self._leaving)
            self._forms[position] = (*moving, *leaving, *self._not_kept(position))
        return self._forms[position]

    def _form(self, bridge: Bridge, position: int) -> BridgedTensor:
        users = (bridge.tensor,) if bridge.is_sum else bridge.users
        is_kept = bridge in self._kept and bridge not in self._kept_in_parts
        return BridgedTensor(users, self._keepers(bridge), as_bytes(self._size(bridge, position)), is_kept, bool(bridge.backward))

    def _handed_on(self, bridge: Bridge, position: int) -> BridgedTensor:
        """What another stage gets, in place of the part that would stay for it."""
        calls, size = self._labels.calls, self._size(bridge, position)
        if self._prices.graph.storage[bridge.tensor] not in self._kept_as_made[0]:
            size = size + self._share(bridge.tensor, bridge.source, position) * -1
        return BridgedTensor((calls[0].name, calls[-1].name), (), as_bytes(size), is_kept=True, has_gradient=bridge.has_gradient)

    def _not_kept(self, position: int) -> Iterator[BridgedTensor]:
        """Parts, counted negative, all of whose keepers keep other forms."""
        parts, elsewhere = self._kept_as_made
        for root, keepers in elsewhere.items():
            if root not in parts and root not in self._crossing and root in self._labels.ops:
                size = self._share(root, self._labels.held(root), position)
                yield BridgedTensor(tuple(keepers), (), -as_bytes(size), is_kept=True, has_gradient=False)

    def _size(self, bridge: Bridge, position: int) -> Line:
        """Bytes of a bridge's result, by rows; of a sum, of each term."""
        return self._share(bridge.tensor, None if bridge.is_sum else bridge.target, position)

    def _share(self, tensor: str, axis: str | None, position: int) -> Line:
        """Bytes of a tensor that is cut along an axis, by rows."""
        if axis is None:
            return self._prices.outputs[tensor]
        sizes = next(shard.sizes for shard in self._labels.shards if shard.axis == axis)
        return self._prices.outputs[tensor] * (sizes[position] / sum(sizes))

    def _keepers(self, bridge: Bridge) -> tuple[str, ...]:
        """The ops that keep the form that a bridge makes."""
        if self._is_activation(bridge):
            return tuple(self._keeping.get(bridge, ()))
        return tuple(user for user in bridge.users if self._runs.keeps(user, bridge.tensor))

    @cached_property
    def _keeping(self) -> Mapping[Bridge, Sequence[str]]:
        """Per form of an activation, the ops that keep it."""
        found = dict[Bridge, list[str]]()
        for op in self._labels.calls:
            for root in self._prices.kept.get(op.name, ()):
                for bridge in self._forms_of(op, root):
                    if bridge is not None:
                        found.setdefault(bridge, []).append(op.name)
        return found

    @cached_property
    def _kept_as_made(self) -> tuple[Collection[str], Mapping[str, Sequence[str]]]:
        """Storages that some op or segment keeps as they were made; and those of which some keep another form, with these ops."""
        graph, as_made, elsewhere = self._prices.graph, set[str](), dict[str, list[str]]()
        segment_of = {name: segment for segment in self._segments for name in segment}
        for op in self._labels.calls:
            inside = segment_of.get(op.name)
            read = (graph.storage[name] for name in op.inputs if inside is not None and name not in inside)
            for root in self._prices.kept.get(op.name, ()) if inside is None else dict.fromkeys(read):
                for bridge in self._forms_of(op, root) or [None]:
                    if bridge is None or bridge in self._kept_in_parts:
                        as_made.add(root)
                    else:
                        elsewhere.setdefault(root, []).append(op.name)
        return as_made, elsewhere

    def _forms_of(self, op: Op, root: str) -> Sequence[Bridge | None]:
        """The forms in which an op reads a storage, through views: None for the part as its maker made it; nothing if it does not."""
        return [*dict.fromkeys(self._form_of(op, name) for name in op.inputs if self._prices.graph.storage[name] == root)]

    def _form_of(self, reader: Op, name: str) -> Bridge | None:
        graph = self._prices.graph
        if (reader.name, name) in self._read or graph.storage[name] == name:
            return self._read.get((reader.name, name))
        view, root = graph.by_name[name], graph.storage[name]
        return next((self._form_of(view, source) for source in view.inputs if graph.storage[source] == root), None)

    @cached_property
    def _read(self) -> Mapping[tuple[str, str], Bridge]:
        """By reader and tensor, the bridge between them."""
        return {(user, own.tensor): own for own in self._moving if not own.is_sum for user in own.users}

    @cached_property
    def _leaving(self) -> tuple[Bridge, ...]:
        """What is handed on in another form than it is made in."""
        graph, labels = self._prices.graph, self._labels
        own = (each for each in self._moving if not each.is_sum and graph.storage[each.tensor] in self._crossing.intersection(labels.ops))
        return tuple(each for each in own if not each.users and labels.returned(each.tensor).axis == each.target)

    @cached_property
    def _kept(self) -> tuple[Bridge, ...]:
        """The bridges whose form ops outside segments keep, or whose form enters a segment."""
        runs, moving = self._runs, (bridge for bridge in self._moving if not bridge.is_sum)
        return tuple(own for own in moving if runs.is_entered(own.users) or not runs.ops.issuperset(self._keepers(own)))

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
