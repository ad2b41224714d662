"""What the ops of a captured graph are run on alone: tensors of the right shapes at any number of rows."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from whale.deferred import defer_weights
from whale.ir.graph import ModelGraph, Op, TensorSpec

WEIGHT = 0.02
"""Of weights without values (of a model on the meta device): about as large as they start."""


@dataclass(eq=False)
class Inputs:
    """The inputs of ops, and of the whole graph.

    Args:
        graph: the captured model.
        nodes: its executable form; nodes are named as the ops.
        values: per placeholder, its value for the whole example batch.
        device: where the tensors lie.
    """

    graph: ModelGraph
    nodes: fx.Graph
    values: Mapping[str, Any]
    device: torch.device
    _held: dict[str, Any] = field(default_factory=dict, init=False)

    @cached_property
    def node_of(self) -> dict[str, fx.Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes.nodes}

    @cached_property
    def waiting(self) -> fx.GraphModule | None:
        """The whole graph with weight gradients that wait in a queue, which it takes first; None where none can."""
        nodes = fx.Graph()
        queue = nodes.placeholder("weight_queue")
        nodes.output(nodes.graph_copy(self.nodes, {}))
        parameters = {op.name for op in self.graph.ops if op.kind == "parameter" and op.requires_grad}
        found = defer_weights(nodes, parameters, queue, self._num_dims)
        return fx.GraphModule(nn.Module(), nodes) if found else None

    def _num_dims(self, node: fx.Node) -> int:
        return len(self.graph.by_name[node.name].outputs[0].shape)

    def of_op(self, op: Op, num_rows: int) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Arguments to call an op with, and those among them that have a gradient; their numbers mean nothing."""
        leaves: list[Tensor] = []
        made: dict[str, Any] = {}

        def value(source: fx.Node) -> Any:
            if source.name not in made:
                made[source.name] = self._alone(source, num_rows, leaves)
            return made[source.name]

        node = self.node_of[op.name]
        return fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value), leaves

    def _alone(self, node: fx.Node, num_rows: int, leaves: list[Tensor]) -> Any:
        op = self.graph.by_name[node.name]
        if not op.outputs:
            return self._number(node, num_rows)
        tensors = [self._tensor(spec, num_rows) for spec in op.outputs]
        for tensor in tensors:
            if op.requires_grad and tensor.is_floating_point():
                leaves.append(tensor.requires_grad_())
        return tensors[0] if len(tensors) == 1 and not _reads_items(node) else tuple(tensors)

    def _number(self, node: fx.Node, num_rows: int) -> Any:
        """A size of a tensor, or what is computed of sizes."""
        if node.op == "placeholder":
            return num_rows

        def value(source: fx.Node) -> Any:
            outputs = self.graph.by_name[source.name].outputs
            return torch.empty(outputs[0].shape_at(num_rows), device="meta") if outputs else self._number(source, num_rows)

        return node.target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))  # type: ignore[operator]

    def _tensor(self, spec: TensorSpec, num_rows: int) -> Tensor:
        shape, dtype = spec.shape_at(num_rows), getattr(torch, spec.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            return torch.rand(shape, device=self.device).to(dtype)
        return torch.full(shape, dtype is torch.bool, dtype=dtype, device=self.device)  # 0 is a valid index anywhere

    def of_graph(self, num_rows: int) -> tuple[list[Any], list[Tensor]]:
        """The placeholders' values for so many rows of the example, and the parameters among them."""
        arguments = [self._whole(node.name, num_rows) for node in self.nodes.find_nodes(op="placeholder")]
        return arguments, [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]

    def _whole(self, name: str, num_rows: int) -> Any:
        op = self.graph.by_name[name]
        if not op.outputs:
            return num_rows
        (spec,) = op.outputs
        if op.kind == "input":
            value = self.values[name].to(self.device)
            for dimension, factor in enumerate(spec.row_factors):
                value = value.narrow(dimension, 0, factor * num_rows) if factor > 0 else value
            return value
        if name not in self._held:
            self._held[name] = self._weight(self.values[name], spec).requires_grad_(op.requires_grad)
        return self._held[name]

    def _weight(self, value: Tensor, spec: TensorSpec) -> Tensor:
        if value.is_meta:
            made = self._tensor(spec, self.graph.num_rows)
            return made * WEIGHT if made.is_floating_point() else made
        return value.detach().to(self.device, copy=True)


def _reads_items(node: fx.Node) -> bool:
    """Whether the node makes a tuple, of which others read items."""
    return any(user.target is operator.getitem for user in node.users)
