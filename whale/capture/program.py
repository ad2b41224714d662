"""What the runtime executes: the captured graph, the user's own tensors, and the batch's structure."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from whale.capture.batch import BatchStructure
from whale.ir.graph import NUM_ROWS
from whale.ir.plan import BatchAxis


@dataclass(frozen=True)
class OutputStructure:
    """How the model's output is built from the tensors that the graph returns."""

    spec: pytree.TreeSpec
    # per leaf of `spec`, the position among the returned tensors; or None with an `ObjectStructure` or a constant
    parts: tuple[tuple[int | None, object], ...]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        return pytree.tree_unflatten([_rebuilt(position, other, tensors) for position, other in self.parts], self.spec)


@dataclass(frozen=True)
class ObjectStructure:
    """An object that holds tensors in attributes (a dataclass, a namespace): what the model returned, and its attributes by name."""

    example: object
    attributes: OutputStructure

    def rebuild(self, tensors: Sequence[Tensor]) -> object:
        found = copy.copy(self.example)
        for name, value in self.attributes.rebuild(tensors).items():
            object.__setattr__(found, name, value)
        return found


def _rebuilt(position: int | None, other: object, tensors: Sequence[Tensor]) -> object:
    if position is not None:
        return tensors[position]
    return other.rebuild(tensors) if isinstance(other, ObjectStructure) else other


@dataclass(frozen=True)
class WholeOutputs:
    """The last ops of outputs that need the batch whole.

    Attributes:
        graph: their ops, which return all outputs of the model.
        read: what it takes: results of the captured graph, constants, and ``num_rows``.
        in_rows: per position of an output that the captured graph returns itself, its name there.
        places: per position of another output with one part for each row, where these are.
    """

    graph: fx.Graph
    read: tuple[str, ...]
    in_rows: Mapping[int, str]
    places: Mapping[int, BatchAxis]

    def __str__(self) -> str:
        return str(self.graph)


@dataclass(frozen=True)
class CapturedProgram:
    """A captured model, executable."""

    # its nodes are named as the ops of the `ModelGraph`. Batch inputs, parameters, buffers, lifted constants and, where it is read,
    # ``num_rows`` are placeholders. Returns (sum_0, weight_0, sum_1, ...) of the loss terms, without weights that are None, then the
    # outputs.
    graph: fx.Graph
    # the user's own tensors, maybe on the meta device: parameters and buffers by canonical name, constants by op name
    tensors: Mapping[str, Tensor]
    batch: BatchStructure  # how a batch is flattened
    sources: Mapping[str, str]  # per placeholder of a parameter, buffer or constant, its key in `tensors`
    outputs: OutputStructure | None = None  # how the output is rebuilt; None if the graph returns a loss alone
    own_loss: int | None = None  # the index of the output tensor that is the loss, whose terms the graph returns instead; None if none is
    whole: WholeOutputs | None = None  # the last ops of outputs that need the batch whole; then the graph returns what they read
    warnings: tuple[str, ...] = ()  # of state that a plain loop carries from call to call, and the graph loses
    reads: frozenset[str] = frozenset()  # the places near the model whose values count (`whale.capture.exporting.near_values`)

    def output(self, tensors: Sequence[Tensor], loss: Tensor | None) -> Any:
        """The model's output from the tensors that the graph returned for it, and the loss of the batch if the output has one."""
        assert self.outputs is not None, "a graph that returns an output"
        found = list(tensors)
        if self.own_loss is not None:
            assert loss is not None, "the graph has its terms"
            found.insert(self.own_loss, loss)
        return self.outputs.rebuild(found)

    def module(self) -> fx.GraphModule:
        """The graph as a module without state; it takes the placeholders' values in order."""
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def values(self, batch: object) -> dict[str, Any]:
        """The values of the placeholders by name, in order, for a whole batch in one process."""
        leaves = self.batch.leaves(batch)
        values: dict[str, Any] = {**leaves, NUM_ROWS: self.batch.rows(batch)}
        for node in self.graph.find_nodes(op="placeholder"):
            if node.name in self.sources:
                values[node.name] = self.tensors[self.sources[node.name]].to(node.meta["val"].dtype)
        return {node.name: values[node.name] for node in self.graph.find_nodes(op="placeholder")}
