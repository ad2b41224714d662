"""One capture of the user's model (train, eval or predict) and its program for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import fx, nn

from whale.capture import BatchDims, BatchStructure, Program, capture
from whale.errors import BatchError, CaptureError
from whale.ir.graph import ModelGraph

ModeName = Literal["train", "eval", "predict"]


class CapturedMode:
    """A capture that can be repeated for other row counts where one does not serve all.

    Args:
        model: the user's model.
        batch: the example.
        loss: the user's loss.
        name: which mode.
        batch_dims: which tensors of the batch have rows, where that is not plain from their sizes.

    Attributes:
        graph: the captured model as a value.
        program: what runs.
        example: the batch.
    """

    def __init__(
        self, model: nn.Module, batch: Any, loss: Callable[..., Any] | None, name: ModeName, batch_dims: BatchDims | None = None
    ) -> None:
        self._model, self.example, self._loss, self._name, self._batch_dims = model, batch, loss, name, batch_dims
        self.graph: ModelGraph
        self.program: Program
        self.graph, self.program = capture(model, batch, loss, mode=name, batch_dims=batch_dims)
        self._by_rows: dict[int, fx.Graph] = {self.graph.num_rows: self.program.graph}

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Tensors that the model's code made, by op name."""
        return {op.name: self.program.tensors[op.name] for op in self.graph.ops if op.kind == "constant"}

    def graph_for(self, num_rows: int) -> fx.Graph:
        """The program for pieces of this many rows.

        Raises:
            CaptureError: the model computes something else at another number of rows.
        """
        if self.graph.dynamic:
            return self.program.graph
        if num_rows not in self._by_rows:
            self._by_rows[num_rows] = self._capture_at(num_rows)
        return self._by_rows[num_rows]

    def _capture_at(self, num_rows: int) -> fx.Graph:
        example = self.graph.num_rows
        resized = self.program.batch.at_rows(self.example, num_rows)
        _, program = capture(self._model, resized, self._loss, mode=self._name, static=True, batch_dims=self._batch_dims)
        ours = [node.name for node in self.program.graph.nodes]
        theirs = [node.name for node in program.graph.nodes]
        if ours != theirs:
            odd = next((a for a, b in zip(ours, theirs, strict=False) if a != b), "the number of ops")
            raise CaptureError(
                f"the model must run the same ops for any number of rows ({example} and {num_rows} rows differ from %{odd} on)",
                hint="a Python loop or a condition in forward depends on the batch size",
            )
        return program.graph


def example_like(batch: Any, known: Any, batch_dims: BatchDims | None = None) -> Any:
    """An example of a batch's form: what is known already where it fits, else the batch.

    The known example is the same on every rank, and has rows enough; a rank's own rows may be one, or none.

    Args:
        batch: the batch to come; None where this rank has no rows of it.
        known: the training's example, which may have parts that the batch lacks.
        batch_dims: which tensors have rows, where that is stated.
    """
    if batch is None:
        return known
    if isinstance(batch, Mapping) and isinstance(known, Mapping):
        known = {key: value for key, value in known.items() if key in batch}
    try:
        BatchStructure.of(known, batch_dims=batch_dims).leaves(batch)
    except BatchError:
        return batch
    return known
