"""Writes the lowered graph: copies nodes, and puts in what turns whole tensors into parts and back.

`enter` is written before the first cut consumer of a whole tensor and shared by all of them; an in-place write to the
tensor in between ends the sharing, since the next consumer must see what was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from whale.runtime.cutting.communication import enter, gather, part
from whale.runtime.cutting.layout import CutLayout

GROUP = "split_group"
"""The placeholder of the split group, first in every lowered graph."""

_BETWEEN = frozenset({"enter", "gather"})
"""Steps that stand between ops, where the first consumer needs them, and so belong to none."""


class Writer:
    """The new graph while it is written.

    Args:
        layout: the cuts.
        roots: per node of the old graph, the node whose memory it shares.
        written: those of them that some op of the stage writes in place.
        synchronized: parameters whose partial gradients are summed once per step, so that they need no `enter`.
    """

    def __init__(self, layout: CutLayout, roots: Mapping[str, str], written: frozenset[str], synchronized: frozenset[str]) -> None:
        self.layout = layout
        self.graph = fx.Graph()
        self.group = self.graph.placeholder(GROUP)
        self.added: dict[str, int] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self._roots, self._written = roots, written
        self._synchronized = synchronized
        self._writes: dict[str, int] = {}
        self._entered: dict[tuple[fx.Node, int], fx.Node] = {}

    def copy(self, node: fx.Node) -> fx.Node:
        """The same node on the values of the new graph."""
        copied = self.graph.node_copy(node, lambda argument: self.copies[argument])
        self.copies[node] = copied
        return copied

    def mapped(self, argument: Any, *, entering: bool) -> Any:
        """An argument with the new graph's values; whole tensors that need a gradient are entered where asked for."""
        return fx.node.map_arg(argument, self._enter if entering else lambda node: self.copies[node])

    def emit(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str = "") -> fx.Node:
        """A new call; it is named after an old node and, if it computes that op, carries its marks."""
        made = self.graph.create_node("call_function", target, args, kwargs, name=f"{node.name}__{what}" if what else node.name)
        made.meta = {} if what in _BETWEEN else {key: value for key, value in node.meta.items() if key != "val"}
        if made.name != node.name and node.name in self.layout.axes.ops:
            self.added[made.name] = len(self.layout.dimensions(node.name))
        return made

    def is_written(self, node: fx.Node) -> bool:
        """Whether an op of the stage writes to the memory of an old node."""
        return self._roots[node.name] in self._written

    def wrote(self, node: fx.Node) -> None:
        """Notes that an old node changed the memory of its first argument."""
        root = self._roots[node.name]
        self._writes[root] = self._writes.get(root, 0) + 1

    def _enter(self, node: fx.Node) -> fx.Node:
        copied = self.copies[node]
        op = self.layout.model.by_name[node.name]
        if not op.requires_grad or not op.outputs or self.layout.holds(node.name) or node.name in self._synchronized:
            return copied
        key = (node, self._writes.get(self._roots[node.name], 0))
        if key not in self._entered:
            self._entered[key] = self.emit(node, enter, (copied, self.group), {}, "enter")
        return self._entered[key]

    def part_of_whole(self, node: fx.Node) -> None:
        """Replaces a whole tensor that the stage is given by the own part of it."""
        op = self.layout.model.by_name[node.name]
        value = self.copies[node]
        if op.requires_grad:
            value = self.emit(node, enter, (value, self.group), {}, "enter")
        self.copies[node] = self.part(node, value)

    def part(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """The own part of a whole value of an old node."""
        for dim, dimension in enumerate(self.layout.dimensions(node.name)):
            if self.layout.is_cut(dimension):
                held = self.layout.held(dimension)
                value = self.emit(node, part, (value, dim, held.units, held.rows_outside, held.runs), {}, "part")
        return value

    def whole(self, node: fx.Node) -> fx.Node:
        """The whole value of an old node, for what the stage returns."""
        value = self.copies[node]
        if not self.layout.holds(node.name):
            return value
        for dim, dimension in enumerate(self.layout.dimensions(node.name)):
            if self.layout.is_cut(dimension):
                held = self.layout.held(dimension)
                arguments = (value, dim, held.units, held.rows_outside, held.parts, held.position, self.group)
                value = self.emit(node, gather, arguments, {}, "gather")
        return value
