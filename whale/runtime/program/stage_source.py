"""A captured mode of the model, and a stage's program for any number of rows: lowered once per captured graph.

Where rows are cut it is lowered once per number of rows. A stage that runs in halves has a second program for a single row, a compiled one
another of static shapes for the first number of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import fx

from whale.axes.batch import MIN_ROWS, halve_stage
from whale.ir.graph import ModelGraph
from whale.ir.plan import Replica, Stage
from whale.ir.writes import SILENT_WRITERS, Reads
from whale.runtime.program.lowering import StageProgram, StageShards, lower
from whale.runtime.program.segments import Rewrite
from whale.runtime.program.watch import NOBODY, Watch
from whale.runtime.program.weight_gathers import Numbers

if TYPE_CHECKING:
    from whale.runtime.program.compiled import Compilation


class Captured(Protocol):
    """A captured mode."""

    @property
    def graph(self) -> ModelGraph:
        pass

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Tensors that the model's code made, by op name."""

    def graph_for(self, num_rows: int) -> fx.Graph:
        """The program for pieces of `num_rows` rows."""


class StageSource:
    """A stage's program, lowered on demand.

    Attributes:
        outputs: names that the program returns.
    """

    def __init__(
        self,
        captured: Captured,
        replica: Replica,  # holds the edges
        stage: Stage,
        known: set[int],  # loss terms whose weights are known in advance and need not be returned
        device: torch.device,
        splits_backward: bool,  # whether its schedule has separate passes for weight gradients
        shards: StageShards | None = None,  # of a split stage
        transient: Mapping[str, Numbers] | None = None,  # see `lower`
        awaited: Mapping[str, Numbers] | None = None,
        watch: Watch = NOBODY,  # called when segments are computed
        compilation: Compilation | None = None,  # compiles runs of ops; None for none
    ) -> None:
        self._shards, self._transient, self._awaited, self._watch = shards, transient, awaited, watch
        self._compilation, self._first = compilation, dict[fx.Graph, int]()
        self._splits_backward = splits_backward
        self._captured, self._stage, self._device, model = captured, stage, device, captured.graph
        self._received = {name for edge in replica.edges if edge.target == stage.index for name in edge.tensors}
        sent = {name for edge in replica.edges if edge.source == stage.index for name in edge.tensors}
        ops = set(stage.ops)
        terms = {term.sum for term in model.loss if term.sum in ops}
        weights = {t.weight for i, t in enumerate(model.loss) if t.weight is not None and i not in known and t.sum in ops}
        own_outputs = {name for name in model.outputs if name in ops}
        wanted = sent | terms | weights | own_outputs
        self.outputs = tuple(op.name for op in model.ops if op.name in wanted)
        self._halving = halve_stage(model, shards.axes, replica.edges, stage) if shards is not None and stage.overlap else None
        # halves are joined op by op
        self._ops = (
            ops if self._halving is not None else ops - _only_for(model, ops, {t.weight for t in model.loss if t.weight} - weights, wanted)
        )
        self._lowered: dict[tuple[fx.Graph, int, bool, bool], StageProgram] = {}

    def __call__(self, num_rows: int) -> StageProgram:
        graph = self._captured.graph_for(num_rows)
        rows = num_rows if self._shards is not None and self._shards.divides_rows else 0
        halving = self._halving if num_rows >= MIN_ROWS else None
        compilation = self._compilation
        is_dynamic = compilation is not None and not rows and self._first.setdefault(graph, num_rows) != num_rows
        key = graph, rows, halving is not None, is_dynamic
        program = self._lowered.get(key)
        if program is None:
            program = lower(
                graph,
                self._captured.graph,
                self._ops,
                self._received,
                self.outputs,
                self._device,
                splits_backward=self._splits_backward,
                shards=self._shards,
                segments=self._stage.recomputed,
                num_rows=rows,
                halving=halving,
                transient=self._transient,
                awaited=self._awaited,
                watch=self._watch,
                rewrite=None if compilation is None else _compiling(compilation, is_dynamic=is_dynamic),
            )
            self._lowered[key] = program
        return program


def _compiling(compilation: Compilation, *, is_dynamic: bool) -> Rewrite:
    from whale.runtime.program.compiled import compile_runs  # needed here alone

    return partial(compile_runs, compilation=compilation, is_dynamic=is_dynamic)


def _only_for(model: ModelGraph, ops: Collection[str], weights: Collection[str], wanted: Collection[str]) -> set[str]:
    """The ops of a stage that nothing reads but weights of the loss, which are known without them."""
    made_of, found = Reads(model).ancestors(name for name in weights if name in ops), set[str]()
    for op in reversed(model.ops):
        is_idle = op.name in ops and op.name in made_of and op.name not in wanted and op.kind == "call" and not op.tags & _LASTING
        if is_idle and op.operator not in SILENT_WRITERS and found.issuperset(model.users[op.name]):
            found.add(op.name)
    return found


_LASTING = frozenset({"in_place", "random", "checks"})
"""Tags of ops that do more than give a result."""
