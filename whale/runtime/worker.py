"""One captured mode of the model (train, eval or predict) on this rank: everything that a step needs, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx

from whale.comm import Channels, Groups, World, wait
from whale.errors import BatchError
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, Replica, Stage
from whale.ir.schedule import Action, Kind, Schedule
from whale.runtime.batch_view import BatchView
from whale.runtime.boundary import Boundary
from whale.runtime.exchange import Exchange
from whale.runtime.executor import Executor, StepState
from whale.runtime.gradient_sync import GradientSync
from whale.runtime.loss import LossAccount, WeightProgram, weight_program, whole_divisor
from whale.runtime.lowering import StageProgram, lower
from whale.runtime.rank_batch import check_rows
from whale.runtime.stage import StageRunner
from whale.runtime.status import StatusBoard

GraphSource = Callable[[int], fx.Graph]
"""The captured graph for a number of rows of a piece."""


@dataclass(frozen=True)
class Seat:
    """Where this rank sits in the plan.

    Attributes:
        rank: of the plan.
        replica: the model replica it belongs to.
        pipeline_rank: which virtual device of the replica.
        position: of its device in that virtual device.
    """

    rank: int
    replica: int
    pipeline_rank: int
    position: int


def find_seat(plan: Plan, rank: int | None) -> Seat | None:
    """The seat of a rank of the plan; None for a rank that the plan leaves idle."""
    if rank is None:
        return None
    device = plan.devices[rank]
    for replica in plan.replicas:
        for stage in replica.stages:
            if device in stage.virtual_device.devices:
                return Seat(rank, replica.index, plan.stage_rank[stage.index], stage.virtual_device.devices.index(device))
    raise AssertionError(f"{device} is in the plan but in no stage")


class Worker:
    """Runs steps of one mode on this rank.

    Args:
        plan: the decision, for this mode.
        schedule: with communication.
        model: the captured model, for this mode.
        graphs: its program.
        tensors: what this rank owns, and the constants.
        seat: of this rank; None if idle.
        world_ranks: per rank of the plan, the rank in the world.
        world: this process among its peers.
        groups: process groups.
        sync: gradient synchronisation; None where nothing is trained.
        status: where the current action is kept.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        schedule: Schedule,
        model: ModelGraph,
        graphs: GraphSource,
        tensors: Mapping[str, torch.Tensor],
        seat: Seat | None,
        world_ranks: tuple[int, ...],
        world: World,
        groups: Groups,
        sync: GradientSync | None,
        status: StatusBoard,
    ) -> None:
        self.plan, self.model, self.seat, self.world = plan, model, seat, world
        self._groups, self._status = groups, status
        self._everyone = tuple(range(world.size))
        self._tensors = tensors
        self._weights = weight_program(model, graphs(model.num_rows), world.device)
        boundaries = [Boundary(plan, replica, model, world_ranks) for replica in plan.replicas]
        self.channels = Channels(world, [lane for boundary in boundaries for lane in boundary.lanes()])
        self.executor: Executor | None = None
        self._actions: tuple[Action, ...] = ()
        self.stages: dict[int, StageSource] = {}
        self._counted: frozenset[int] = frozenset()
        if seat is not None:
            replica = plan.replicas[seat.replica]
            self._actions = schedule.ranks[seat.pipeline_rank]
            mine = schedule.stages_of(seat.pipeline_rank)
            self._counted = frozenset(index for index in mine if seat.position % replica.stages[index].split == 0)
            known = set(self._weights.by_rows) | set(self._weights.measured)
            self.stages = {
                index: StageSource(
                    model, graphs, replica, replica.stages[index], known, world.device, _splits_backward(self._actions, index)
                )
                for index in mine
            }
            runners = {index: StageRunner(source, tensors, world.device) for index, source in self.stages.items()}
            exchange = Exchange(world.rank, seat.position, boundaries[seat.replica], model, self.channels, world.device, world.timeout)
            self.executor = Executor(runners, exchange, model, self._counted, sync, status, world.device)

    def run(self, batch: BatchView, seed: tuple[int, ...], *, with_gradients: bool) -> tuple[StepState, LossAccount]:
        """Runs this rank's actions of one step.

        Args:
            batch: the rows in hand.
            seed: place that random numbers depend on.
            with_gradients: whether the schedule holds a backward.

        Raises:
            BatchError: the batch cannot be divided as the plan says, or its rows differ between ranks.
            RuntimeFault: a peer died or a wait outlasted its limit.
        """
        agreement = self._agree(batch)
        known: dict[int, float | torch.Tensor] = {i: factor * batch.num_rows for i, factor in self._weights.by_rows.items()}
        account = LossAccount(self.model.loss, batch.num_rows, known, self.world.device)
        rows = () if self.seat is None else self.plan.micro_batch_rows(self.seat.replica, batch.num_rows)
        place = (*seed, -1, -1) if self.seat is None else (*seed, self.seat.replica, self.seat.position)
        state = StepState(place, batch, rows, account, with_gradients)

        def ready() -> None:
            for index, weight in zip(self._weights.measured, agreement(), strict=True):
                known[index] = whole_divisor(self.model.loss[index], weight)

        if self.executor is None:
            ready()
        else:
            self.executor.run(self._actions, state, ready)
        return state, account

    def reduce(self, account: LossAccount) -> tuple[torch.Tensor, dist.Work | None]:
        """Starts the sum of all ranks' loss accounts."""
        vector = account.vector()
        return vector, self._groups.all_reduce(vector, self._everyone)

    def finish(self, work: dist.Work | None, what: str) -> None:
        """Waits for something that all ranks take part in."""
        self._status.set(what, [rank for rank in self._everyone if rank != self.world.rank] if work is not None else ())
        wait(work, what, self._everyone, self.world.timeout)

    def close(self) -> None:
        """Gives back the channels."""
        self.channels.close()

    def _agree(self, batch: BatchView) -> Callable[[], list[torch.Tensor]]:
        """Starts the check that ranks hold the same number of rows, and the sum of the weights; returns how to end it."""
        refusal: BatchError | None = None
        measured = torch.zeros(len(self._weights.measured), dtype=torch.float64, device=self.world.device)
        try:
            check_rows(self.plan, batch.num_rows)
            measured = self._measure(batch)
        except BatchError as error:
            refusal = error
        rows = torch.tensor([batch.num_rows, batch.num_rows**2], dtype=torch.float64)
        vector = torch.cat([rows, measured]) if measured.device.type == "cpu" else rows  # never wait for a GPU here
        works = [self._groups.all_reduce(vector, self._everyone)]
        if vector is rows:
            works.append(self._groups.all_reduce(measured, self._everyone))

        def end() -> list[torch.Tensor]:
            for work in works:
                self.finish(work, "comparing the batch")
            count, squares = vector[:2].tolist()
            if not self.world.is_alone and abs(self.world.size * squares - count**2) > 0.5:
                raise BatchError(
                    f"the batch must have the same rows on every rank (here {batch.num_rows}, {count / self.world.size:g} on average)",
                    hint="give every rank the same global batch, or use engine.loader",
                )
            if refusal is not None:
                raise refusal
            return list(measured if vector is rows else vector[2:])

        if refusal is not None:
            end()
        return end

    def _measure(self, batch: BatchView) -> torch.Tensor:
        """This rank's part of the weights that the batch decides: over its own rows, in the stages that hold the terms."""
        weights, seat = self._weights, self.seat
        total = torch.zeros(len(weights.measured), dtype=torch.float64, device=self.world.device)
        for position, index in enumerate(weights.measured):
            for stage, source in self.stages.items():
                if seat is not None and stage in self._counted and self.model.loss[index].sum in source.outputs:
                    rows = self._own_rows(seat, stage, batch.num_rows)
                    total[position] += weights.measure(position, batch, rows, self._tensors, self.world.device)
        return total

    def _own_rows(self, seat: Seat, stage: int, num_rows: int) -> list[tuple[int, int]]:
        held = self.plan.replicas[seat.replica].stages[stage]
        pieces = self.plan.micro_batch_rows(seat.replica, num_rows)
        return [held.row_intervals(stop - start, start)[seat.position] for start, stop in pieces]


class StageSource:
    """A stage's program, lowered once per captured graph.

    Args:
        model: the captured model.
        graphs: its program per number of rows.
        replica: holds the edges.
        stage: what to lower.
        known: loss terms whose weights are known beforehand and need not be returned.
        device: where it computes.
        splits_backward: whether its schedule runs input and weight gradients apart.

    Attributes:
        outputs: names that the program returns.
    """

    def __init__(
        self,
        model: ModelGraph,
        graphs: GraphSource,
        replica: Replica,
        stage: Stage,
        known: set[int],
        device: torch.device,
        splits_backward: bool,
    ) -> None:
        self._splits_backward = splits_backward
        self._model, self._graphs, self._stage, self._device = model, graphs, stage, device
        self._received = {name for edge in replica.edges if edge.target == stage.index for name in edge.tensors}
        sent = {name for edge in replica.edges if edge.source == stage.index for name in edge.tensors}
        ops = set(stage.ops)
        terms = {term.sum for term in model.loss if term.sum in ops}
        weights = {t.weight for i, t in enumerate(model.loss) if t.weight is not None and i not in known and t.sum in ops}
        own_outputs = {name for name in model.outputs if name in ops}
        wanted = sent | terms | weights | own_outputs
        self.outputs = tuple(op.name for op in model.ops if op.name in wanted)
        self._lowered: dict[fx.Graph, StageProgram] = {}

    def __call__(self, num_rows: int) -> StageProgram:
        graph = self._graphs(num_rows)
        program = self._lowered.get(graph)
        if program is None:
            program = lower(
                graph, self._model, self._stage.ops, self._received, self.outputs, self._device, splits_backward=self._splits_backward
            )
            self._lowered[graph] = program
        return program


def _splits_backward(actions: tuple[Action, ...], stage: int) -> bool:
    return any(action.kind is Kind.BACKWARD_WEIGHT and action.stage == stage for action in actions)


__all__ = ["GraphSource", "Seat", "StageSource", "WeightProgram", "Worker", "find_seat"]
