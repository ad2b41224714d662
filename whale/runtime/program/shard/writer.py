"""Writes the lowered graph: copies nodes, and inserts the bridges that give each user a tensor in the layout that it needs.

A bridge is written before the first user of its layout and shared by all; an in-place write to the tensor in between ends the
sharing, since the next user must see the new values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from torch import fx

from whale.axes.labels import Use
from whale.errors import PlanError
from whale.ir.writes import MemoryWrites
from whale.runtime.program.marks import OP
from whale.runtime.program.shard.communication import collect, enter, exchange, gather, leave, part, scatter
from whale.runtime.program.shard.layout import ShardLayout
from whale.runtime.program.shard.slots import Slots, own_part
from whale.sharding.bridges import Bridge, Transport

GROUP = "split_group"
"""The placeholder of the split group, first in a lowered graph."""

_OPERATIONS: Mapping[tuple[Transport, Transport], Callable[..., Any]] = {
    ("", "all-reduce"): enter,
    ("slice", ""): own_part,
    ("slice", "all-gather"): part,
    ("all-gather", ""): gather,
    ("all-gather", "slice"): gather,
    ("all-gather", "reduce-scatter"): collect,
    ("all-to-all", ""): exchange,
    ("all-to-all", "all-to-all"): exchange,
    ("all-reduce", ""): leave,
    ("reduce-scatter", "all-gather"): scatter,
}
"""The operation of a bridge, by its transports forward and backward."""

_BETWEEN = frozenset({"enter", "gather", "collect", "part", "exchange"})
"""Operations between ops, inserted before the first user; they belong to no op."""


class Writer:
    """Builds the new graph.

    Args:
        roots: per node of the old graph, the node whose memory it shares.
        writes: what the ops of the stage write in place.
        synchronized: parameters whose partial gradients are summed once per step, so that their bridges move none.
    """

    def __init__(self, layout: ShardLayout, roots: Mapping[str, str], writes: MemoryWrites, synchronized: frozenset[str]) -> None:
        self.layout = layout
        self.graph = fx.Graph()
        self.group = self.graph.placeholder(GROUP)
        self.copies: dict[fx.Node, fx.Node] = {}
        self._roots, self._memory = roots, writes
        self._synchronized = synchronized
        self._writes: dict[str, int] = {}
        self._forms: dict[tuple[fx.Node, Use, int], fx.Node] = {}

    def copy(self, node: fx.Node, *, raw: bool = False) -> fx.Node:
        """The same node on whole values of the new graph, or on values in the layout that they have."""
        copied = self.graph.node_copy(node, self.copies.__getitem__ if raw else lambda argument: self.form(argument, Use()))
        self.copies[node] = copied
        return copied

    def gather_whole(self, node: fx.Node, slots: Slots) -> None:
        """Gathers a node that is a part in the new graph; its users give it a whole gradient.
        Raises PlanError if it is written in place, which the part would not see.
        """
        if self.is_written_later(node):
            raise PlanError(
                f"{node.target} is written whole here, but was captured first in parts",
                hint="call parallelize again, with the weights of engine.state_dict()",
            )
        self.copies[node] = self.emit(node, gather, (self.copies[node], slots, self.group, f"%{node.name}"), {}, gather.__name__)

    def mapped(self, argument: Any, axis: str | None, gathered: Set[str] = frozenset()) -> Any:
        """An argument for an op that works along an axis: parts of tensors that have it, except of those gathered; all of the others."""
        return fx.node.map_arg(argument, lambda node: self.form(node, self.layout.labels.use_along(axis, node.name, gathered)))

    def raw(self, argument: Any) -> Any:
        """An argument in the layout that it has: numbers, and tensors of which only sizes are read."""
        return fx.node.map_arg(argument, self.copies.__getitem__)

    def emit(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str = "") -> fx.Node:
        """A new call with the name and marks of an old node; with its op's mark only if it takes part in computing that."""
        made = self.graph.create_node("call_function", target, args, kwargs, name=f"{node.name}__{what}" if what else node.name)
        dropped = ("val", OP) if what in _BETWEEN else ("val",)
        made.meta = {key: value for key, value in node.meta.items() if key not in dropped}
        return made

    def is_written_later(self, node: fx.Node) -> bool:
        """Whether an op of the stage writes to an old node's memory after it was made."""
        return self._memory.is_written_later(node.name)

    def wrote(self, node: fx.Node) -> None:
        """Notes that an old node changed the memory of its first argument."""
        root = self._roots[node.name]
        self._writes[root] = self._writes.get(root, 0) + 1

    def form(self, node: fx.Node, use: Use) -> fx.Node:
        """The value of an old node in the layout of a use."""
        op = self.layout.model.by_name.get(node.name)
        if op is None or len(op.outputs) != 1 or node.name not in self.layout.axes.ops:
            return self.copies[node]
        has_gradient = op.requires_grad and node.name not in self._synchronized
        bridge = Bridge(node.name, self.layout.labels.held(node.name), use.axis, use.entered, has_gradient=has_gradient)
        if not bridge.forward and not bridge.backward:
            return self.copies[node]
        key = (node, use, self._writes.get(self._roots[node.name], 0))
        if key not in self._forms:
            self._forms[key] = self.bridge(node, self.copies[node], bridge)
        return self._forms[key]

    def bridge(self, node: fx.Node, value: fx.Node, bridge: Bridge) -> fx.Node:
        """A value of an old node after a bridge: calls the operation with the bridge's transports forward and backward."""
        operation, name = _OPERATIONS[bridge.forward, bridge.backward], bridge.tensor
        places: tuple[Slots, ...] = ()
        if bridge.source is not None and bridge.target is not None:
            places = self.layout.exchange(name, bridge.source, bridge.target)
        elif bridge.source is not None or bridge.target is not None:
            places = (self.layout.slots(name, bridge.source or bridge.target or ""),)
        if operation is own_part:
            return self.emit(node, own_part, (value, *places), {}, "part")
        return self.emit(node, operation, (value, *places, self.group, f"%{name}"), {}, operation.__name__)

    def part(self, node: fx.Node, value: fx.Node, axis: str) -> fx.Node:
        """The own part of a whole value of an old node, without gradient."""
        return self.bridge(node, value, Bridge(node.name, None, axis, has_gradient=False))
