"""One capture of the user's model in a mode (train, eval, predict ...), its program, and what it reads of a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from whale.api.rank_batch import RankBatch
from whale.axes import batch_axes, discover
from whale.capture import AS_LARGE_AS_THE_BATCH, BatchDims, BatchStructure, CapturedProgram, capture
from whale.capture.comparing import are_same, difference, reader
from whale.capture.exporting.near_values import Snapshot
from whale.errors import BatchError, CaptureError, warn
from whale.ir.graph import LossTerm, ModelGraph
from whale.ir.plan import BatchAxis
from whale.ir.precision import Precision
from whale.runtime.execute.batch import BatchView
from whale.runtime.program.lowering import place

ModeName = Literal["train", "eval", "predict", "eval_predict"]


class CapturedMode:
    """A capture, repeated for other row counts where one does not serve all.

    Args:
        model, loss: the user's.
        batch: the example, or its structure.
        name: of the mode.
        batch_dims: which tensors of the batch have rows, where sizes do not show it.
        device: the device type that it runs on, whose autocast counts; None for any.
        precision: the types of ops there; None for those of the model.
        key: tells this capture from others of the mode; its name by default.
        read_as: the types in which the first capture reads parameters that are cast once per step; None for the first.

    Attributes:
        then: the values near the model when it was captured, where those of now may be others; they hold for other row counts too.
        key: as given.
        graph: the captured model as a value.
        program: what runs.
        structure: of the example.
        half_type: the half-precision dtype of the program, where each device has its own; else None.
        differs: whether the model computed something else when it was last traced again.
        is_untraceable: whether it could not be traced again.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Callable[..., Any] | None,
        name: ModeName,
        batch_dims: BatchDims | None = None,
        device: str | None = None,
        key: str = "",
        precision: Precision | None = None,
        read_as: Mapping[str, str] | None = None,
    ) -> None:
        self._capture = partial(capture, device=device, precision=precision, read_as=read_as)
        self._model, self._loss, self._name = model, loss, name
        self.key = key or name
        self.half_type = precision.dtype if precision is not None and precision.by_device else None
        self.then: Snapshot | None = None
        self.structure = batch if isinstance(batch, BatchStructure) else BatchStructure.of(batch, batch_dims=batch_dims)
        self.graph: ModelGraph
        self.program: CapturedProgram
        self.graph, self.program = self._capture(model, self.structure, loss, mode=name)
        self.differs = self.is_untraceable = False
        self._capture = partial(self._capture, read_as=self.graph.read_as)
        self._by_rows: dict[int, CapturedProgram] = {self.graph.num_rows: self.program}
        self._last_ops: dict[int, fx.GraphModule] = {}

    @cached_property
    def batch_axes(self) -> Mapping[str, BatchAxis]:
        """Where the batch is in each result of an op that has one."""
        return batch_axes(self.graph, discover(self.graph))

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Tensors that the model's code made, by op name."""
        return {op.name: self.program.tensors[op.name] for op in self.graph.ops if op.kind == "constant"}

    def check_again(self, when: str) -> None:
        """Traces the model once more and compares; ``when`` names the time in words.

        Raises:
            CaptureError: it computes something else than was captured.

        Warns:
            UserWarning: it cannot be traced any more.
        """
        try:
            again = self._capture(self._model, self.structure, self._loss, mode=self._name)
        except CaptureError as error:
            self.is_untraceable = True
            warn(
                f"the model could not be traced again before {when}, so changes of what it computes are no longer found; training goes on "
                f"with the capture ({error})"
            )
            return
        found = difference((self.graph, self.program), again)
        self.differs = found is not None
        if found is not None:
            what = f"the model changed since it was captured (traced again before {when}: {found.what})"
            raise CaptureError(what, where=found.where, hint=_FAR)

    def prepare(self, row_counts: Collection[int]) -> None:
        for num_rows in sorted(row_counts):
            self.graph_for(num_rows)

    def graph_for(self, num_rows: int) -> fx.Graph:
        """The program for pieces of this many rows.

        Raises:
            CaptureError: the model computes something else at another number of rows.
        """
        return self.program_for(num_rows).graph

    def program_for(self, num_rows: int) -> CapturedProgram:
        """As `graph_for`, with what runs after it."""
        if self.graph.dynamic:
            return self.program
        if num_rows not in self._by_rows:
            self._by_rows[num_rows] = self._capture_at(num_rows)
        return self._by_rows[num_rows]

    def last_ops(self, num_rows: int, device: torch.device) -> tuple[fx.GraphModule, CapturedProgram]:
        """What computes the model's outputs from the values of the graph's for a whole batch, and the program that it is of."""
        program = self.program_for(num_rows)
        assert program.whole is not None, "the same ops for any number of rows"
        if id(program) not in self._last_ops:
            module = self._last_ops[id(program)] = fx.GraphModule(nn.Module(), program.whole.graph)
            for node in module.graph.nodes:
                place(node, device)
            module.recompile()
        return self._last_ops[id(program)], program

    def _capture_at(self, num_rows: int) -> CapturedProgram:
        try:
            structure = self.structure.with_rows(num_rows)
            with nullcontext() if self.then is None else self.then.in_place():
                graph, program = self._capture(self._model, structure, self._loss, mode=self._name, static=True)
        except CaptureError as error:
            raise CaptureError(
                f"the model cannot be captured for {num_rows} rows, a device's share of {self.graph.num_rows}: {error.message}",
                where=error.where,
                hint="; or ".join(hint for hint in (error.hint, AS_LARGE_AS_THE_BATCH) if hint),
            ) from error
        ours = {op.name: op for op in self.graph.ops}
        odd = next((op for op in graph.ops if op.name not in ours or ours[op.name].target != op.target), None)
        if odd is not None or len(graph.ops) != len(self.graph.ops):
            raise CaptureError(
                f"the model runs other ops for {num_rows} rows than for {self.graph.num_rows}, from "
                f"%{'the end' if odd is None else odd.name} on",
                where=None if odd is None else odd.where,
                hint="a Python loop or a condition in forward depends on the batch size: write it with tensor operations over all rows",
            )
        self._check_loss(graph)
        self._check_constants(program, num_rows)
        return program

    def _check_loss(self, other: ModelGraph) -> None:
        """The terms of the loss are those of all rows: what is divided once must be divided by the same in every piece."""
        for ours, theirs in zip(self.graph.loss, other.loss, strict=True):
            if replace(ours, reason="", where=None) != replace(theirs, reason="", where=None):
                raise CaptureError(
                    f"the loss has other terms for {other.num_rows} rows than for {self.graph.num_rows}: {_term_text(theirs)}, not "
                    f"{_term_text(ours)}",
                    where=ours.where,
                    hint="divide by the number of rows itself, or return a (sum, weight) pair",
                )

    def _check_constants(self, other: CapturedProgram, num_rows: int) -> None:
        for name, ours in self.constants.items():
            if not are_same(ours, other.tensors[name]):
                raise CaptureError(
                    f"the constant tensor %{name} that the model's code makes differs for {self.graph.num_rows} and {num_rows} rows",
                    where=self.graph.by_name[name].where or reader(self.graph, name),
                    hint="make it from the tensors of the batch: x.new_full((), x.shape[0])",
                )


_FAR = (
    "something that this line reads has changed and is not watched (an iterator, an item of a global list, x.item() of a tensor that is "
    "written): keep it in an attribute of the model or the loss, which is followed by a new capture, or in a tensor of the batch; "
    "runtime.retrace: off keeps the first capture"
)


def _term_text(term: LossTerm) -> str:
    return f"{term.coefficient:g} x %{term.sum}" + ("" if term.weight is None else f" / %{term.weight}")


def structure_for(batch: Any, known: Any, batch_dims: BatchDims | None = None) -> BatchStructure:
    """The structure of the example for batches like this one: parts of the known example where they fit.

    The known example is the same on every rank and has enough rows; a rank's own rows may be one, or none.

    Args:
        batch: the batch to come; None where this rank has no rows of it.
        known: the training's example, which may have parts that the batch lacks.
        batch_dims: which tensors have rows, where that is stated.
    """
    if batch is None or batch is known:
        return BatchStructure.of(known, batch_dims=batch_dims)
    shared = known
    if isinstance(batch, Mapping) and isinstance(known, Mapping):
        shared = {key: value for key, value in known.items() if key in batch}
    try:
        structure = BatchStructure.of(shared, batch_dims=batch_dims)
        structure.like(batch)
    except BatchError:
        rows = BatchStructure.of(known, batch_dims=batch_dims).example_rows
        return BatchStructure.of(batch, least_rows=1, batch_dims=batch_dims).with_rows(rows)
    return structure


def view_of(structure: BatchStructure, batch: Any) -> BatchView:
    """The tensors of a batch, by the input ops that read them.

    Args:
        structure: of the captured mode.
        batch: the global batch in the user's form, or a `RankBatch` of a loader.

    Raises:
        BatchError: it has not the example's form, or not the rows that the loader gave.
    """
    with_rows = frozenset(part.name for part in structure.inputs if part.has_rows and part.name is not None)
    if isinstance(batch, RankBatch):
        leaves, origin = {}, batch.origin
        if batch.data is not None:
            leaves = _leaves(structure, batch.data)
            batch.check_rows(len(leaves[next(iter(with_rows))]))
        return BatchView(leaves, with_rows, origin.num_rows, origin.rows, origin.place)
    leaves = _leaves(structure, batch)
    num_rows = leaves[next(iter(with_rows))].shape[0]
    return BatchView(leaves, with_rows, num_rows, ((0, num_rows),))


def _leaves(structure: BatchStructure, batch: Any) -> dict[str, Tensor]:
    """Tensors that autograd may keep: copies of those that were made in inference mode."""
    return {name: leaf.clone() if leaf.is_inference() else leaf for name, leaf in structure.leaves(batch).items()}
