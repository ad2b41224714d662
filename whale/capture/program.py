"""What the runtime executes: the captured graph, the user's own tensors, and the batch's structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from whale.capture.batch import BatchStructure


@dataclass(frozen=True)
class OutputStructure:
    """How the model's output is put together from the tensors that the graph returns.

    Attributes:
        spec: the tree.
        parts: per leaf, the position among the returned tensors, or a constant.
    """

    spec: pytree.TreeSpec
    parts: tuple[tuple[int | None, object], ...]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output with these tensors in it."""
        leaves = [constant if position is None else tensors[position] for position, constant in self.parts]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Program:
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
        outputs: how the output is put together; None where the graph returns a loss.
        warnings: of what goes on from call to call in a plain loop, and is lost in the graph.
    """

    graph: fx.Graph
    tensors: Mapping[str, Tensor]
    batch: BatchStructure
    sources: Mapping[str, str]
    outputs: OutputStructure | None = None
    warnings: tuple[str, ...] = ()

    def module(self) -> fx.GraphModule:
        """The graph as a module without state: it takes its placeholders' values in order."""
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def values(self, batch: object) -> dict[str, Any]:
        """The values of the placeholders by name, in order, for a whole batch in one process.

        Raises:
            BatchError: the batch does not match the example.
        """
        leaves = self.batch.leaves(batch)
        values: dict[str, Any] = {**leaves, "num_rows": self.batch.rows(batch)}
        names = [node.name for node in self.graph.find_nodes(op="placeholder")]
        return {name: self.tensors[self.sources[name]] if name in self.sources else values[name] for name in names}
