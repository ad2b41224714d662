"""Global batches on their way through the captures of a model: recognised, divided, and run without backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar
from warnings import catch_warnings, simplefilter

import torch

from whale.api.guards import Guards
from whale.api.loader import DataPosition
from whale.api.mode import CapturedMode, ModeName, view_of
from whale.api.modes import Modes, warn_where_apart
from whale.api.rank_batch import RankBatch
from whale.capture import BatchStructure
from whale.errors import WhaleError
from whale.ir.graph import NUM_ROWS
from whale.ir.plan import BatchAxis, Plan
from whale.planning import carry_plan, retarget_plan
from whale.runtime.execute.batch import BatchView
from whale.runtime.execute.call_check import Call
from whale.runtime.execute.executor import StepState
from whale.runtime.runtime import Runtime
from whale.runtime.state.engine_state import EngineState
from whale.runtime.weights.gathering import gather_outputs, own_outputs
from whale.schedules import forward_schedules_of, short_schedules_of

Found = TypeVar("Found")


@dataclass(frozen=True)
class ForwardPass:
    step: StepState  # this rank's part
    captured: CapturedMode
    view: BatchView
    runtime: Runtime

    @cached_property
    def loss(self) -> torch.Tensor:
        """Of the global batch; all ranks ask for it."""
        return self.step.account.loss(self.runtime.totals(self.step))

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """Of the global batch; all ranks ask for them."""
        return self.step.account.metrics(self.runtime.totals(self.step))

    @property
    def output(self) -> Any:
        """Of the model, for the whole batch; all ranks ask for it."""
        graph = self.captured.graph
        return self.captured.program.output(self._whole(self._brought(gather_outputs, graph.outputs)), self._loss)

    @property
    def own_output(self) -> tuple[Any, torch.Tensor]:
        """Of the model, for rows that no other rank has, and their numbers in the batch; outputs without rows are whole. All ranks ask."""
        graph, whole = self.captured.graph, self.captured.program.whole
        names = graph.outputs if whole is None else tuple(whole.in_rows.values())
        found, rows = self._brought(own_outputs, names)
        if whole is not None:
            own = dict(zip(whole.in_rows, found, strict=True))
            values = dict(enumerate(self._whole(self._brought(gather_outputs, graph.outputs))))
            own |= {at: _rows_of(value, whole.places[at], rows) for at, value in values.items() if at in whole.places}
            found = [own.get(at, value) for at, value in values.items()]
        return self.captured.program.output(found, self._loss), rows

    def _whole(self, gathered: list[torch.Tensor]) -> list[torch.Tensor]:
        """The model's outputs from the values of the graph's for the whole batch."""
        num_rows = self.view.num_rows
        if self.captured.program.whole is None:
            return gathered
        device = self.runtime.roster.world.device
        module, program = self.captured.last_ops(num_rows, device)
        assert program.whole is not None, "it has last ops"
        values: dict[str, Any] = {NUM_ROWS: num_rows, **dict(zip(self.captured.graph.outputs, gathered, strict=True))}
        given = (values[name] if name in values else program.tensors[name].to(device) for name in program.whole.read)
        with torch.no_grad():
            return list(module(*given))

    @property
    def _loss(self) -> torch.Tensor | None:
        return self.loss if self.captured.graph.loss else None

    def _brought(self, bring: Callable[..., Found], names: tuple[str, ...]) -> Found:
        roster, plan = self.runtime.roster, self.runtime.plan_of(self.captured.key)
        assert plan is not None, "it has run"
        graph, axes = replace(self.captured.graph, outputs=names), self.captured.batch_axes
        half_type = self.captured.half_type
        return bring(graph, axes, plan, roster.world_ranks, roster.world, self.step.outputs, self.view.num_rows, half_type)


def _rows_of(value: torch.Tensor, axis: BatchAxis, rows: torch.Tensor) -> torch.Tensor:
    apart = value.reshape(*value.shape[: axis.dim], axis.outer, -1, axis.inner, *value.shape[axis.dim + 1 :])
    return apart.index_select(axis.dim + 1, rows).flatten(axis.dim, axis.dim + 2)


class BatchPasses:
    """Of one engine: its captures, the checks before each pass, and its loaders."""

    state: EngineState
    runtime: Runtime

    def __init__(self, modes: Modes, guards: Guards, data: DataPosition) -> None:
        self._modes, self._guards, self._data = modes, guards, data

    def take_up(self, state: EngineState, runtime: Runtime) -> None:
        """Goes on with a state, and a plan at work on it."""
        self.state, self.runtime = state, runtime

    def forward(self, name: Literal["eval", "predict", "eval_predict"], batch: Any) -> ForwardPass:
        """Runs a mode without backward; all ranks of the world call it."""
        modes, runtime = self._modes, self.runtime
        runtime.losses.settle()
        runtime.merge_statistics(self.state)
        batch = self._data.recognized(batch)
        like = self._like_elsewhere(name, batch)
        base = modes.ensure(name, batch, like)
        if runtime.plan_of(name) is None:
            self._prepare_forward(base, base.graph.num_rows)
        runtime.lend(name)
        key, captured, view = self.view(name, batch, like=like)
        return ForwardPass(runtime.forward(key, view, self.state.step_number), captured, view, runtime)

    def view(
        self, name: ModeName, batch: Any, call: Call | None = None, like: BatchStructure | None = None
    ) -> tuple[str, CapturedMode, BatchView]:
        """The key of the prepared program, its capture, and the batch in parts; where this fails on one rank, it fails on all.

        Args:
            name: of the mode.
            batch: as `DataPosition.recognized` gives it.
            call: of the engine.
            like: the structure of a batch where this rank has no rows of it.
        """
        with self.runtime.status.reporting():
            try:
                self._guards.check()
                self.runtime.check_unwritten()
                if isinstance(batch, RankBatch):
                    batch.check(self.runtime.roster.plan, self.runtime.roster.rank)
                captured = self._modes.fitting(name, batch, self._forget, like, self.runtime.num_affordable)
                self.runtime.report_affordable(self._modes.budget.num_affordable)
                view = view_of(captured.program.batch, batch)
                if not isinstance(batch, RankBatch):
                    view = replace(view, beside=self._data.in_hand)
                prepare = self._prepare_training if name == "train" else self._prepare_forward
                key = prepare(captured, view.num_rows)
            except WhaleError as refusal:
                self.runtime.refuse(name, refusal, call)
                raise
            return key, captured, view

    def _prepare_forward(self, captured: CapturedMode, num_rows: int) -> str:
        """Prepares a mode without backward for global batches of so many rows, under a plan made from the training's; its name."""
        runtime, name = self.runtime, captured.key
        fitting = runtime.roster.plan.with_micro_batches_for(num_rows)
        if self._lacks(name, fitting.with_idle_replicas_for(num_rows)):
            plan = retarget_plan(fitting, self._modes.train.graph, captured.graph).with_idle_replicas_for(num_rows)
            if name == captured.graph.mode:  # at other sizes the warning would come again
                warn_where_apart(plan, captured.graph, runtime.roster.world)
            runtime.prepare(name, captured, plan, forward_schedules_of(plan))
        return name

    def _prepare_training(self, captured: CapturedMode, num_rows: int) -> str:
        """Prepares training on global batches of so many rows, in fewer micro-batches or replicas where these are too few; its name."""
        train, whole = self._modes.train, self.runtime.roster.plan
        fitting = whole.with_micro_batches_for(num_rows)
        name = captured.key if fitting is whole else _in_fewer(captured.key)
        if self._lacks(name, fitting.with_idle_replicas_for(num_rows)):
            plan = fitting
            if captured is not train:
                has_idle = len(whole.devices) < self.runtime.roster.world.size
                plan = carry_plan(fitting, train.graph, captured.graph, same_loss=has_idle)
            plan = plan.with_idle_replicas_for(num_rows)
            self.runtime.prepare(name, captured, plan, short_schedules_of(plan, whole))
        return name

    def _lacks(self, name: str, plan: Plan) -> bool:
        prepared = self.runtime.plan_of(name)
        return prepared is None or prepared.pipelines != plan.pipelines

    def _forget(self, key: str) -> None:
        self.runtime.forget(key)
        self.runtime.forget(_in_fewer(key))

    def _like_elsewhere(self, name: ModeName, batch: Any) -> BatchStructure | None:
        """The structure of a batch from a rank with rows of it, where ranks outside the plan have none of a loader's; all ranks ask."""
        roster = self.runtime.roster
        if len(roster.plan.devices) == roster.world.size:
            return None
        own: BatchStructure | None = None
        if not (isinstance(batch, RankBatch) and batch.data is None):
            with suppress(WhaleError):  # is raised where the batch is read
                own = self._modes.structure(name, batch)
        with catch_warnings():
            simplefilter("ignore", FutureWarning)  # of torch, of its own trees
            found = roster.world.gather_objects(own)
        return next((each for each in found if isinstance(each, BatchStructure)), None)


def _in_fewer(key: str) -> str:
    return f"{key}, in fewer micro-batches"
