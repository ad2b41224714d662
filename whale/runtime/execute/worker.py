"""One captured mode of the model (train, eval or predict) on this rank: everything that a step needs, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from whale.axes import Axes
from whale.comm import Channels, Groups, World
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, Replica, Stage
from whale.ir.schedule import Action, Kind, Schedule
from whale.runtime.execute.agreement import Agreement
from whale.runtime.execute.batch_view import BatchView
from whale.runtime.execute.boundary import Boundary
from whale.runtime.execute.everyone import Everyone
from whale.runtime.execute.exchange import Exchange
from whale.runtime.execute.executor import Executor, StepState
from whale.runtime.execute.loss import LossAccount, weight_program
from whale.runtime.execute.seat import Seat
from whale.runtime.execute.stage import StageRunner
from whale.runtime.execute.status import StatusBoard
from whale.runtime.program.lowering import StageShards
from whale.runtime.program.shard import Group
from whale.runtime.program.stage_source import GraphSource, StageSource
from whale.runtime.state.gradient_sync import GradientSync
from whale.schedules import Edges, edge_pairs, releases
from whale.sharding.parameters import shared_parameters


class Worker:
    """Runs steps of one mode on this rank.

    Args:
        plan: the decision, for this mode.
        schedule: of this rank's replica, with communication; None if idle.
        model: the captured model, for this mode.
        graphs: its program.
        tensors: what this rank owns, and the constants.
        seat: of this rank; None if idle.
        world_ranks: per rank of the plan, the rank in the world.
        world: this process among its peers.
        groups: process groups.
        everyone: sums over all ranks.
        channels: between ranks.
        axes: of the model; None where no stage is cut.
        sync: gradient synchronisation; None where nothing is trained.
        status: where the current action is kept.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        schedule: Schedule | None,
        model: ModelGraph,
        graphs: GraphSource,
        tensors: Mapping[str, torch.Tensor],
        seat: Seat | None,
        world_ranks: tuple[int, ...],
        world: World,
        groups: Groups,
        everyone: Everyone,
        channels: Channels,
        axes: Axes | None,
        sync: GradientSync | None,
        status: StatusBoard,
    ) -> None:
        self.plan, self.model, self.seat, self.world = plan, model, seat, world
        self._groups, self._everyone = groups, everyone
        self._tensors = tensors
        self._weights = weight_program(model, graphs(model.num_rows), world.device)
        self.executor: Executor | None = None
        self._actions: tuple[Action, ...] = ()
        self.stages: dict[int, StageSource] = {}
        self._counted: frozenset[int] = frozenset()
        if seat is not None and schedule is not None:
            replica = plan.replicas[seat.replica]
            self._actions = schedule.ranks[seat.pipeline_rank]
            mine = schedule.stages_of(seat.pipeline_rank)
            self._counted = frozenset(index for index in mine if seat.position % replica.stages[index].split == 0)
            known = set(self._weights.by_rows) | set(self._weights.measured)
            for index in mine:
                shards = _shards(replica, replica.stages[index], axes, seat.position)
                splits = _splits_backward(self._actions, index)
                self.stages[index] = StageSource(model, graphs, replica, replica.stages[index], known, world.device, splits, shards)
            runners = {
                index: StageRunner(
                    source,
                    tensors,
                    world.device,
                    row_group=seat.position // replica.stages[index].split,
                    split_group=self._split_group(replica.stages[index], seat.position, world_ranks),
                )
                for index, source in self.stages.items()
            }
            edges = Edges.of(schedule, edge_pairs(replica))
            done = releases(schedule, edges, seat.pipeline_rank)
            boundary = Boundary(plan, replica, model, world_ranks, axes)
            exchange = Exchange(world.rank, seat.position, boundary, model, channels, world.device, world.timeout, done)
            self.executor = Executor(runners, exchange, model, self._counted, sync, status, world.device)

        self._agreement = Agreement(plan, model, self._weights, seat, self._loss_stages(), self._held_terms(), tensors, world, everyone)

    def _split_group(self, stage: Stage, position: int, world_ranks: Sequence[int]) -> Group | None:
        if stage.split == 1:
            return None
        devices = stage.groups[position // stage.split]
        ranks = tuple(world_ranks[self.plan.rank_of[device]] for device in devices)
        return Group(self._groups[tuple(sorted(ranks))], ranks, self.world.device, self.world.timeout)

    def _held_terms(self) -> frozenset[int]:
        outputs = {name for source in self.stages.values() for name in source.outputs}
        return frozenset(index for index, term in enumerate(self.model.loss) if term.sum in outputs)

    def _loss_stages(self) -> dict[int, tuple[int, ...]]:
        """Per loss term, the stages in which this rank counts it."""
        counted = sorted(self._counted)
        return {
            index: tuple(stage for stage in counted if term.sum in self.stages[stage].outputs) for index, term in enumerate(self.model.loss)
        }

    def run(self, batch: BatchView, seed: tuple[int, ...], *, with_gradients: bool) -> StepState:
        """Runs this rank's actions of one step.

        Args:
            batch: the rows in hand.
            seed: place that random numbers depend on.
            with_gradients: whether the schedule holds a backward.

        Raises:
            BatchError: the batch cannot be divided as the plan says, or its rows differ between ranks.
            RuntimeFault: a peer died or a wait outlasted its limit.
        """
        pending = self._agreement.begin(batch)
        account = LossAccount(self.model.loss, batch.num_rows, self._weights.at(batch.num_rows), self.world.device)
        place = (*seed, -1 if self.seat is None else self.seat.replica)
        state = StepState(place, batch, self._agreement.micro_batches(batch.num_rows), account, with_gradients, pending.weights is None)
        if pending.weights is not None:
            self._know(account, pending.weights)

        def agree() -> None:
            weights = pending.finish()
            if pending.weights is None:
                self._know(account, weights)

        def reduce() -> None:
            if not self.model.loss:
                return
            vector = account.vector()
            state.reduction = vector, self._everyone.start(vector)

        if self.executor is None:
            agree()
            reduce()
        else:
            self.executor.run(self._actions, state, agree, reduce)
        return state

    def refuse(self) -> None:
        """Tells the other ranks, which are about to run a step, that this rank's batch is bad."""
        self._agreement.refuse()

    def _know(self, account: LossAccount, weights: Sequence[torch.Tensor]) -> None:
        for index, weight in zip(self._weights.measured, weights, strict=True):
            account.know(index, weight, tells=self._agreement.answers_for(index))

    def close(self) -> None:
        """Lets go of the groups of split stages; no step can follow."""
        self.executor = None
        self.stages.clear()


def _shards(replica: Replica, stage: Stage, axes: Axes | None, position: int) -> StageShards | None:
    if not stage.shards:
        return None
    assert axes is not None, "a cut stage needs the axes of the model"
    return StageShards(axes, stage.shards, position % stage.split, shared_parameters(replica, stage))


def _splits_backward(actions: tuple[Action, ...], stage: int) -> bool:
    return any(action.kind is Kind.BACKWARD_WEIGHT and action.stage == stage for action in actions)
