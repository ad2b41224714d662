"""A plan at work on this rank: process groups, the programs of each mode, the order of actions, gradient synchronisation.

It works on an `EngineState` and keeps nothing of it: it may be closed, and another made for the same state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import fx

from whale.comm import Channels, Groups, close_at_exit
from whale.config import Config
from whale.errors import BatchError, RuntimeFault
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.schedule import Schedule
from whale.runtime.execute.batch_view import BatchView
from whale.runtime.execute.boundary import planned_lanes
from whale.runtime.execute.everyone import Everyone
from whale.runtime.execute.executor import StepState
from whale.runtime.execute.roster import Roster
from whale.runtime.execute.status import StatusBoard
from whale.runtime.execute.worker import Worker
from whale.runtime.program.lowering import mutated_buffers
from whale.runtime.program.reach import reached_parameters
from whale.runtime.state.buffers import merge_buffers
from whale.runtime.state.clipping import Clipping
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.gradient_sync import BucketPlan, GradientSync, plan_buckets
from whale.runtime.state.holdings import Holdings, discover_if_sharded


class Captured(Protocol):
    """What a runtime needs of a captured mode (train, eval or predict) of the model."""

    @property
    def graph(self) -> ModelGraph:
        """The captured model as a value."""

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Tensors that the model's code made, by op name."""

    def graph_for(self, num_rows: int) -> fx.Graph:
        """The program for pieces of this many rows."""


class Runtime:
    """Runs the steps of a plan on this rank.

    Args:
        roster: the plan, and its ranks in the world.
        schedules: per replica, the order of actions, with communication.
        holdings: who holds which part of what.
        captured: the model in training.
        state: what the programs read and write.
        config: settings.

    Attributes:
        roster, schedules, holdings, config: as given.
        status: where the current action is kept for others to read.
        clipping: of the gradients; None where the settings name no limit.
    """

    def __init__(
        self,
        *,
        roster: Roster,
        schedules: tuple[Schedule, ...],
        holdings: Holdings,
        captured: Captured,
        state: EngineState,
        config: Config,
    ) -> None:
        world, graph = roster.world, captured.graph
        self.roster, self.schedules, self.holdings = roster, schedules, holdings
        self.config, self._captured, self._tensors = config, captured, state.tensors
        self.status = StatusBoard.open(world.rank)
        buckets = plan_buckets(holdings, graph, reached_parameters(graph), config.communication.bucket_bytes)
        self._groups = Groups(world, [roster.everyone, *_rank_sets(roster, buckets)])
        self._channels = Channels(world, planned_lanes(roster.plan, graph, roster.world_ranks, holdings.shardings.axes))
        self._everyone = Everyone(world, self._groups, self.status)
        self._sync = self._make_sync(buckets, state)
        self._workers: dict[str, Worker] = {}
        self.prepare("train", captured, roster.plan, schedules)
        limit = config.gradient.clip_norm
        self.clipping: Clipping | None = None
        if limit is not None:
            self.clipping = Clipping(holdings, roster.rank, state.parameters, limit, self._everyone.add, world.device)
        close_at_exit(self)

    def prepare(self, mode: str, captured: Captured, plan: Plan, schedules: Sequence[Schedule]) -> None:
        """Makes ready to run a mode, in place of an earlier preparation.

        Args:
            mode: its name.
            captured: the model in it.
            plan: for it; on the same devices.
            schedules: per replica, with communication.
        """
        if mode in self._workers:
            self._workers.pop(mode).close()
        device, seat = self.roster.world.device, self.roster.seat
        constants = {name: value.to(device) for name, value in captured.constants.items()}
        trains = captured is self._captured
        self._workers[mode] = Worker(
            plan=plan,
            schedule=None if seat is None else schedules[seat.replica],
            model=captured.graph,
            graphs=captured.graph_for,
            tensors={**self._tensors, **constants},
            seat=seat,
            world_ranks=self.roster.world_ranks,
            world=self.roster.world,
            groups=self._groups,
            everyone=self._everyone,
            channels=self._channels,
            axes=self.holdings.shardings.axes if trains else discover_if_sharded(plan, captured.graph),
            sync=self._sync if trains else None,
            status=self.status,
        )

    def plan_of(self, mode: str) -> Plan | None:
        """The plan that a mode was prepared for; None where it was not."""
        worker = self._workers.get(mode)
        return None if worker is None else worker.plan

    def train(self, batch: BatchView, step_number: int) -> StepState:
        """Runs the actions of a training step; the parameters' gradients are then sums over their owners.

        Raises:
            BatchError: the batch cannot be divided as the plan says, or its rows differ between ranks.
            RuntimeFault: a peer died or a wait outlasted its limit.
        """
        worker, sync = self._workers["train"], self._sync
        with self.status.reporting():
            if sync is None:
                return worker.run(batch, (self.config.runtime.seed, step_number), with_gradients=True)
            sync.begin()
            try:
                step = worker.run(batch, (self.config.runtime.seed, step_number), with_gradients=True)
            except BatchError:
                sync.abandon()
                raise
            sync.wait()
            return step

    def forward(self, mode: str, batch: BatchView, step_number: int) -> StepState:
        """Runs a mode without backward.

        Raises:
            BatchError, RuntimeFault: as `train`.
        """
        with self.status.reporting():
            return self._workers[mode].run(batch, (self.config.runtime.seed, step_number), with_gradients=False)

    def refuse(self, mode: str) -> None:
        """Tells the other ranks, which are about to run a step, that this rank's batch is bad."""
        if mode in self._workers:
            self._workers[mode].refuse()

    def totals(self, step: StepState) -> torch.Tensor:
        """The loss's sums and weights over all ranks; the first time, they are waited for."""
        assert step.reduction is not None
        vector, work = step.reduction
        with self.status.reporting():
            self._everyone.finish(work, "summing the loss")
        step.reduction = vector, None
        return vector

    def merge_statistics(self, state: EngineState) -> None:
        """Makes running statistics equal on their owners, if steps have moved them since; all ranks of the world call it."""
        if not state.has_moved_statistics:
            return
        state.has_moved_statistics = False
        graph = self._captured.graph
        names = mutated_buffers(graph, self._captured.graph_for(graph.num_rows).nodes)
        device = self.roster.world.device
        merge_buffers(self.holdings, self.roster.rank, graph, state.tensors, names, self._everyone.add, device)

    @property
    def peak_in_flight(self) -> int:
        """The most micro-batches, over this rank's stages, whose activations the last step held at once: from F to B or W."""
        executor = self._workers["train"].executor if self._workers else None
        return 0 if executor is None else executor.peak_in_flight

    def check_open(self) -> None:
        """Fails where it has been closed.

        Raises:
            RuntimeFault: it has.
        """
        if not self._workers:
            raise RuntimeFault("an engine steps, evaluates and predicts until it is closed (close() was called)")

    def close(self) -> None:
        """Gives back process groups and lets go of the state; no step can follow. Other runtimes are not touched."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        if self._sync is not None:
            self._sync.close()
        self._channels.close()
        self._groups.close()
        self.status.finish()

    def _make_sync(self, buckets: Sequence[BucketPlan], state: EngineState) -> GradientSync | None:
        seat, roster = self.roster.seat, self.roster
        if seat is None:
            return None
        stages = {(seat.replica, stage) for stage in roster.plan.pipelines[seat.replica].stages_of(seat.pipeline_rank)}
        return GradientSync(
            buckets, self.holdings, seat.rank, stages, roster.world_ranks, state.parameters, self._groups, roster.world.timeout
        )


def _rank_sets(roster: Roster, buckets: Sequence[BucketPlan]) -> Iterator[tuple[int, ...]]:
    """World ranks that sum together: the owners of each bucket, and each split group."""
    for bucket in buckets:
        yield roster.in_world(bucket.owners)
    for replica in roster.plan.replicas:
        for stage in replica.stages:
            for group in stage.groups:
                yield roster.in_world(roster.plan.rank_of[device] for device in group)
