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


@dataclass(frozen=True)
class OutputStructure:
    """How the model's output is put together from the tensors that the graph returns.

    Attributes:
        spec: the tree.
        parts: per leaf, the position among the returned tensors, or an object that holds some, or a constant.
    """

    spec: pytree.TreeSpec
    parts: tuple[tuple[int | None, object], ...]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output with these tensors in it."""
        return pytree.tree_unflatten([_rebuilt(position, other, tensors) for position, other in self.parts], self.spec)


@dataclass(frozen=True)
class ObjectStructure:
    """An object that holds tensors in attributes: a dataclass, a namespace.

    Attributes:
        example: what the model returned when it was captured.
        attributes: of it, by name.
    """

    example: object
    attributes: OutputStructure

    def rebuild(self, tensors: Sequence[Tensor]) -> object:
        """Another such object with these tensors in it."""
        found = copy.copy(self.example)
        for name, value in self.attributes.rebuild(tensors).items():
            object.__setattr__(found, name, value)
        return found


def _rebuilt(position: int | None, other: object, tensors: Sequence[Tensor]) -> object:
    if position is not None:
        return tensors[position]
    return other.rebuild(tensors) if isinstance(other, ObjectStructure) else other


@dataclass(frozen=True)
class CapturedProgram:
    """A captured model, executable.

    Attributes:
        graph: its nodes are named as the ops of the `ModelGraph`. Batch inputs, parameters, buffers and lifted
            constants are placeholders; so is the number of rows, ``num_rows``, where something reads it.
            It returns the tuple (sum_0, weight_0, sum_1, ...) of the loss terms, without the weights that
            are None, followed by the outputs.
        tensors: the user's own tensors: parameters and buffers by canonical name, constants by op name.
            They may be on the meta device.
        batch: how a batch is taken apart.
        sources: per parameter, buffer or constant placeholder, the key of its tensor in `tensors`.
        outputs: how the output is put together; None where the graph returns a loss alone.
        own_loss: which tensor of the output is the loss, whose terms the graph returns in its place; None where none is.
        warnings: of what goes on from call to call in a plain loop, and is lost in the graph.
        reads: the places near the model whose values count (`whale.capture.exporting.near_values`).
    """

    graph: fx.Graph
    tensors: Mapping[str, Tensor]
    batch: BatchStructure
    sources: Mapping[str, str]
    outputs: OutputStructure | None = None
    own_loss: int | None = None
    warnings: tuple[str, ...] = ()
    reads: frozenset[str] = frozenset()

    def output(self, tensors: Sequence[Tensor], loss: Tensor | None) -> Any:
        """The model's output.

        Args:
            tensors: that the graph returned for it.
            loss: of the batch, which the output may have.
        """
        assert self.outputs is not None, "a graph that returns an output"
        found = list(tensors)
        if self.own_loss is not None:
            assert loss is not None, "the graph has its terms"
            found.insert(self.own_loss, loss)
        return self.outputs.rebuild(found)

    def module(self) -> fx.GraphModule:
        """The graph as a module without state: it takes its placeholders' values in order."""
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def values(self, batch: object) -> dict[str, Any]:
        """The values of the placeholders by name, in order, for a whole batch in one process.

        Raises:
            BatchError: the batch does not match the example.
        """
        leaves = self.batch.leaves(batch)
        values: dict[str, Any] = {**leaves, NUM_ROWS: self.batch.rows(batch)}
        for node in self.graph.find_nodes(op="placeholder"):
            if node.name in self.sources:
                values[node.name] = self.tensors[self.sources[node.name]].to(node.meta["val"].dtype)
        return {node.name: values[node.name] for node in self.graph.find_nodes(op="placeholder")}
