"""One captured mode of the model (train, eval or predict) on this rank: its stages, its order of actions, its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from whale.axes import Axes
from whale.axes.updates import Update, buffer_updates, num_parts
from whale.errors import BatchError, WhaleError
from whale.ir.plan import Plan
from whale.ir.schedule import Schedule
from whale.runtime.execute.agreement import Agreement, PendingAgreement
from whale.runtime.execute.batch import BatchView, InputPrefetch
from whale.runtime.execute.call_check import Call
from whale.runtime.execute.connections import Connections
from whale.runtime.execute.equal_copies import EqualCopies
from whale.runtime.execute.exchange import Boundary, Exchange
from whale.runtime.execute.executor import ActionOrder, Executor, StepState
from whale.runtime.execute.loss import LossAccount, Scale, Totals, weight_program
from whale.runtime.execute.rank_stages import RankStages, make_stages
from whale.runtime.program.lowering import StageProgram, lower
from whale.runtime.program.stage_source import Captured
from whale.runtime.state.gathered import GatheredWeights
from whale.runtime.state.gradient_sync import GradientSync
from whale.runtime.state.holdings import Holdings
from whale.runtime.state.publishing import Publishing
from whale.schedules import Edges, edge_pairs, releases
from whale.sharding.buckets import Visits, visits_of

if TYPE_CHECKING:
    from whale.runtime.program.compiled import Compilation


class Worker:
    """Runs steps of one mode on this rank.

    Attributes:
        written: the buffers that the model writes.
        copied: those that passes write into copies, and how.
        sync: of the gradients; None without training, or where none are summed.
        peak_in_flight: see `Executor`.
    """

    def __init__(
        self,
        *,
        plan: Plan,  # for this mode
        schedules: Sequence[Schedule],  # per replica, with communication
        captured: Captured,
        tensors: Mapping[str, torch.Tensor],  # what this rank owns, and the constants
        axes: Axes | None,  # of the model; None where no stage is cut
        holdings: Holdings,
        lent: Mapping[str, torch.Tensor],  # whole tensors that this rank's stages read in this mode and do not hold
        connections: Connections,
        sync: GradientSync | None,  # None without training
        copies: EqualCopies | None,  # None without training
        weights: GatheredWeights | None = None,
        publishing: Publishing | None = None,  # None unless some weights are waited for late
        compilation: Compilation | None = None,  # compiles runs of ops; None for none
    ) -> None:
        roster = connections.roster
        place = roster.rank_place
        is_idle = place is None or not plan.replicas[place.replica].pipeline.num_micro_batch
        self.plan, self.model, self._rank_place = plan, captured.graph, None if is_idle else place
        updates = buffer_updates(captured.graph)
        self.sync = sync
        self.written = tuple(updates)
        self.copied = {name: _in_parts(name, update, plan) for name, update in updates.items() if update.kind != "statistics"}
        self._tensors = tensors
        self._device, self._world_sums = roster.world.device, connections.world_sums
        self._weights = weight_program(captured.graph, captured.graph_for(captured.graph.num_rows), self._device)
        self._executor: Executor | None = None
        self._inputs = None if self._rank_place is None else InputPrefetch(plan, self._rank_place, captured.graph, self._device)
        self._prepared: set[int] = set()
        self._weights_of_rows: dict[int, Mapping[int, float]] = {}  # of terms that follow from the rows of a batch
        self._shares_of_rows: dict[int, float] = {}  # of a batch's rows, of the ranks that sum gradients with this one
        stages = RankStages()
        if self._rank_place is not None:
            replica, schedule = plan.replicas[self._rank_place.replica], schedules[self._rank_place.replica]
            order = ActionOrder(schedule.ranks[self._rank_place.pipeline_rank])
            if captured.graph.mode == "train" and len(plan.devices) == 1 and replica.pipeline.num_micro_batch == 1 and not order.recomputed:
                self.copied = {}  # one pass has all rows, and a training keeps what was there before
            known = {*self._weights.by_rows, *self._weights.measured}
            stages = make_stages(
                replica,
                self._rank_place,
                order.actions,
                captured,
                self.copied,
                known,
                tensors,
                axes,
                holdings,
                lent,
                connections,
                weights,
                publishing,
                compilation,
            )
            visits = {} if weights is None else visits_of(weights.buckets, captured.graph, plan, schedules)
            exchange = self._make_exchange(schedule, axes, connections)
            self._executor = Executor(
                order,
                stages.runners,
                exchange,
                self.model,
                stages.counted,
                sync,
                connections.status,
                connections.watch,
                self._device,
                weights,
                visits.get(self._rank_place.rank, Visits()),
            )
        self._runners = stages.runners
        self._derived = [] if roster.rank is None else self._deriving(captured)
        self._agreement = Agreement(plan, self.model, self._weights, stages, tensors, roster, connections.world_sums, copies)

    def _deriving(self, captured: Captured) -> list[tuple[StageProgram, Mapping[str, str]]]:
        """The programs of buffers that follow from others, in order, with the names of the others by what they are given as."""
        model = captured.graph
        own = [each.derivation for name, each in self.copied.items() if each.derivation is not None and name in self._tensors]
        if not own:
            return []
        own.sort(key=lambda each: model.position[each.result])
        graph = captured.graph_for(model.num_rows)
        return [(lower(graph, model, each.ops, each.given, [each.result], self._device), each.given) for each in own]

    def _make_exchange(self, schedule: Schedule, axes: Axes | None, connections: Connections) -> Exchange:
        rank_place, world, ranks = self._rank_place, connections.roster.world, connections.roster.world_ranks
        assert rank_place is not None, "an idle rank exchanges nothing"
        replica = self.plan.replicas[rank_place.replica]
        done = releases(schedule, Edges.of(schedule, edge_pairs(replica)), rank_place.pipeline_rank)
        boundary = Boundary(self.plan, replica, self.model, ranks, axes)
        return Exchange(world.rank, rank_place.position, boundary, connections.channels, world.device, world.waits, done, connections.watch)

    @property
    def peak_in_flight(self) -> int:
        return 0 if self._executor is None else self._executor.peak_in_flight

    def run(
        self, batch: BatchView, seed: tuple[int, ...], *, with_gradients: bool, scale: Scale = 1.0, call: Call | None = None
    ) -> StepState:
        """Runs this rank's actions of one step.

        Args:
            seed: place that random numbers depend on.
            with_gradients: whether the schedule has a backward.
            scale: factor on all gradients.
            call: of the engine, equal on all ranks; None for that of the mode.

        Raises:
            BatchError: the batch cannot be divided as the plan says, or its rows differ between ranks.
            CaptureError: the model cannot be captured for this number of rows.
            RuntimeFault: a peer died or a wait timed out.
        """
        self._prepare(batch.num_rows, call)
        pending = self._agreement.begin(batch, call)
        if batch.num_rows not in self._weights_of_rows:
            self._weights_of_rows[batch.num_rows] = self._weights.at(batch.num_rows)
            self._shares_of_rows[batch.num_rows] = self._share_of_group(batch.num_rows) if with_gradients else 1.0
        by_rows, share = self._weights_of_rows[batch.num_rows], self._shares_of_rows[batch.num_rows]
        account = LossAccount(self.model.loss, batch.num_rows, by_rows, self._device, scale, share)
        place = (*seed, -1 if self._rank_place is None else self._rank_place.replica)
        inputs = batch if self._inputs is None else self._inputs(batch)
        state = StepState(place, inputs, self._agreement.micro_batches(batch.num_rows), account, with_gradients, pending.weights is None)
        if pending.weights is not None:
            self._know(account, pending.weights)

        agree, reduce = partial(self._agree, account, pending), partial(self._reduce, state)
        if self._executor is None:
            agree()
            reduce()
            if with_gradients and self.sync is not None:  # it adds nothing to the gradients, and takes their sums
                self.sync.finish()
        else:
            self._executor.run(state, agree, reduce)
        return state

    def _share_of_group(self, num_rows: int) -> float:
        """The share of a batch's rows of the ranks with which this one sums gradients."""
        if not self.plan.sync_groups or self._rank_place is None:
            return 1.0
        return self.plan.sync_rows(num_rows)[self.plan.sync_group_of(self._rank_place.replica)] / num_rows

    def _prepare(self, num_rows: int, call: Call | None) -> None:
        """Makes the programs for a batch before anything is sent; if that fails, no other rank waits."""
        if num_rows in self._prepared or self._executor is None:
            return
        with suppress(BatchError):  # the batch is too small, which the agreement refuses
            pieces = self._agreement.micro_batches(num_rows)
            try:
                self._executor.prepare(pieces)
            except WhaleError as refusal:
                self.refuse(refusal, call)
                raise
            self._prepared.add(num_rows)

    @property
    def made(self) -> dict[str, torch.Tensor]:
        """Buffers, by name, that the micro-batches of the last run have written here."""
        return {name: value for runner in self._runners.values() for name, value in runner.buffers.made.items()}

    def derive(self) -> None:
        """Computes the buffers that follow from others, which have their new values."""
        for program, given in self._derived:
            program.module(*(self._tensors[given.get(key, key)].detach() for key in program.keys))

    def refuse(self, reason: WhaleError, call: Call | None = None) -> None:
        """Tells the other ranks, which are about to run a step, that this rank's batch is bad, and why."""
        self._agreement.refuse(reason, call)

    def _agree(self, account: LossAccount, pending: PendingAgreement) -> None:
        weights = pending.finish()
        if pending.weights is None:
            self._know(account, weights)

    def _know(self, account: LossAccount, weights: Sequence[torch.Tensor]) -> None:
        for index, weight in zip(self._weights.measured, weights, strict=True):
            account.know(index, weight, reports=self._agreement.answers_for(index))

    def _reduce(self, state: StepState) -> None:
        if self._world_sums.is_alone:
            state.reduction = state.account.own, None
        elif self.model.loss:
            vector = state.account.vector()
            work = self._world_sums.start(vector)
            state.reduction = Totals.of(vector), work

    def close(self) -> None:
        """Releases the groups of split stages; no step can follow."""
        self._executor = None


def _in_parts(name: str, update: Update, plan: Plan) -> Update:
    """How the parts of a batch combine; of an undivided one, what it writes is the new value."""
    is_whole = update.derivation is not None and num_parts(name, plan.replicas) == 1
    return replace(update, kind="once", derivation=None) if is_whole else update
