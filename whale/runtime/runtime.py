"""A plan running on this rank: process groups, the programs of each mode, the order of actions, gradient synchronisation.

It changes an `EngineState` and owns none of it: it may be closed, and another made for the same state.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from whale.axes.updates import buffer_updates
from whale.config import Config
from whale.errors import BatchError, PlanError, RuntimeFault, WhaleError, warn
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.schedule import Schedule
from whale.ir.writes import reached_parameters
from whale.runtime.execute.batch import BatchView
from whale.runtime.execute.call_check import Call, call_together
from whale.runtime.execute.connections import Connections
from whale.runtime.execute.equal_copies import EqualCopies
from whale.runtime.execute.executor import StepState
from whale.runtime.execute.finite import LossWatch
from whale.runtime.execute.loss import Scale, Totals
from whale.runtime.execute.roster import Roster
from whale.runtime.execute.status import StatusBoard
from whale.runtime.execute.worker import Worker
from whale.runtime.program.stage_source import Captured
from whale.runtime.program.watch import NOBODY, Watch
from whale.runtime.state.engine_state import EngineState
from whale.runtime.state.gathered import GatheredWeights
from whale.runtime.state.gradient_sync import GradientSync
from whale.runtime.state.holdings import Holdings, RankLinks, discover_if_sharded
from whale.runtime.state.host_copies import HostCopies
from whale.runtime.state.publishing import Publishing
from whale.runtime.state.scaling import Clipping, unscale
from whale.runtime.state.updates import KeptBuffers, SharedBuffers, merge_buffers
from whale.runtime.weights.gathering import lend_tensors
from whale.schedules import alike_schedules
from whale.sharding import Region
from whale.sharding.buckets import Bucket, Buckets, plan_buckets
from whale.sharding.communicators import channels_of, groups_of, ways_of

if TYPE_CHECKING:
    from whale.runtime.program.compiled import Compilation
    from whale.runtime.state.local_steps import LocalSteps


class Runtime:
    """Runs the steps of a plan on this rank.

    Attributes:
        clipping: of the gradients, or their norm alone; None where no setting needs it.
        losses: checks the loss of each step.
        local_steps: of groups that step on their own; None where gradients are summed over all ranks.
        compilation: compiles runs of ops; None without `runtime.compile`.
    """

    def __init__(
        self,
        *,
        roster: Roster,  # the plan, and its ranks in the world
        schedules: tuple[Schedule, ...],  # per replica, the order of actions, with communication
        holdings: Holdings,
        captured: Captured,
        state: EngineState,  # what the programs read and write
        config: Config,
        watch: Watch = NOBODY,  # called when each action, message, bucket and segment of a step begins and ends
    ) -> None:
        graph = captured.graph
        self.watch = watch
        self.roster, self.schedules, self.holdings = roster, schedules, holdings
        self.config, self._captured, self._tensors = config, captured, state.tensors
        buckets = self._buckets_of(graph)
        groups = groups_of(roster.plan, graph, holdings.shardings)
        channels = channels_of(ways_of(roster.plan, graph), roster.plan, schedules)
        self._connections = Connections.open(roster, groups, channels, watch)
        self._host_copies = HostCopies(roster.world.device)
        self._state = state
        self._syncs = {reached_parameters(graph): self._make_sync(buckets.summed)}
        self._weights = self._make_weights(buckets.gathered, state)
        self._publishing = self._make_publishing(buckets.published, state)
        self.local_steps = self._make_local_steps(buckets.outer, state)
        self._lasting = state.lasting
        self._copies = EqualCopies(holdings, roster, state, self.arrive)
        self._buffers = SharedBuffers(holdings, roster.rank, state.tensors, self._connections.world_sums.add, roster.world.device)
        self._workers: dict[str, Worker] = {}
        self._lent: dict[str, torch.Tensor] = {}
        self._borrowers: dict[str, dict[str, tuple[int, ...]]] = {}  # of each mode
        self._kept: dict[str, KeptBuffers] = {}
        self._last_training: Worker | None = None
        self.compilation = _compilation(graph, config)
        self.prepare("train", captured, roster.plan, schedules)
        self.losses = LossWatch(roster.world, state.scaling)
        self.clipping: Clipping | None = None
        self._by_hand: Clipping | None = None
        if config.gradient.clip_norm is not None or config.gradient.skip_nonfinite:
            self.clipping = self._make_clipping(state, config.gradient.clip_norm)
        self._masks = self._agree_to_mask(state)

    def _agree_to_mask(self, state: EngineState) -> bool:
        """Whether all ranks compute on other devices than CPUs, where nobody waits, and their optimizers there `masks`. A collective."""
        world = self.roster.world
        masks = world.device.type != "cpu" and state.masks and all(each.device.type == world.device.type for each in state.kept.values())
        if not world.can_compare:
            return masks
        others = torch.tensor(float(not masks), dtype=torch.float64)
        self._connections.world_sums.add(others, "comparing how optimizers leave out a step")
        return others.item() == 0

    def masks_steps(self, state: EngineState) -> bool:
        """Whether the device leaves out an update by itself, and the host learns of it later: equal on all ranks.

        The host has to know where it warns of steps that are left out, averages weights, or keeps the rounding errors of gradients.
        """
        gradient = self.config.gradient
        return self._masks and state.decay is None and not (gradient.skip_nonfinite or gradient.error_feedback)

    def prepare(self, mode: str, captured: Captured, plan: Plan, schedules: Sequence[Schedule]) -> None:
        """Prepares a mode, in place of an earlier preparation.

        Args:
            schedules: per replica, with communication.

        Raises:
            PlanError: batches of other sizes or parts than the first would borrow more parameters.
        """
        self.forget(mode)
        device = self.roster.world.device
        constants = {name: value.to(device) for name, value in captured.constants.items()}
        trains = captured.graph.mode == "train"
        borrowers = self.holdings.borrowers(plan)
        if mode != captured.graph.mode and not trains and not borrowers.items() <= self._borrowers[captured.graph.mode].items():
            raise PlanError(f"{captured.graph.mode} reads more tensors from this batch than from the first")
        for name in (name for name, ranks in borrowers.items() if self.roster.rank in ranks and name not in self._lent):
            assert self.roster.rank is not None, "an idle rank borrows nothing"
            whole = self.holdings.whole(captured.graph, name, self.holdings.read_type(name, self.roster.rank))
            self._lent[name] = whole.empty(Region(), device)
        self._workers[mode] = Worker(
            plan=plan,
            schedules=schedules,
            captured=captured,
            tensors={**self._tensors, **constants},
            axes=self.holdings.shardings.axes if captured is self._captured else discover_if_sharded(self.roster.plan, captured.graph),
            holdings=self.holdings,
            lent=self._lent,
            connections=self._connections,
            sync=self._sync_for(captured.graph) if trains else None,
            copies=self._copies if trains else None,
            weights=self._weights,
            publishing=self._publishing if trains else None,
            compilation=self.compilation,
        )
        self._borrowers[mode] = borrowers
        if trains:
            self._kept[mode] = KeptBuffers(self._tensors[name] for name in self._workers[mode].written if name in self._tensors)

    def forget(self, mode: str) -> None:
        """Closes a mode, if it was prepared."""
        if mode in self._workers:
            self._workers.pop(mode).close()
            self._kept.pop(mode, None)
            self._borrowers.pop(mode)

    def plan_of(self, mode: str) -> Plan | None:
        """The plan that a mode was prepared for, if it was."""
        worker = self._workers.get(mode)
        return None if worker is None else worker.plan

    def kept_buffers(self, mode: str) -> KeptBuffers:
        """The buffers that a training mode writes on this rank, with their earlier values."""
        return self._kept[mode]

    def leaves_out_steps(self, state: EngineState) -> bool:
        """Whether an update with non-finite loss or gradients is skipped; otherwise such a loss is an error."""
        return self.config.gradient.skip_nonfinite or state.scaling is not None

    def train(self, batch: BatchView, place: tuple[int, ...], mode: str = "train", scale: Scale = 1.0, call: Call = "step") -> StepState:
        """Runs the actions of a training step; the gradients are then sums over their owners, times a scale.

        Args:
            place: number of the step, and of the batch in it except for the first: random numbers depend on it and the seed.
            mode: name of the prepared training.
            scale: factor on the gradients.

        Raises:
            BatchError: the batch cannot be divided as the plan says, or its rows differ between ranks.
            RuntimeFault: a peer died or a wait timed out.
        """
        worker = self._workers[mode]
        sync = worker.sync
        self._last_training = worker
        with self.status.reporting():
            for other in self._all_syncs:
                if other is not sync:
                    other.rest()
            if sync is not None:
                sync.begin(scale if isinstance(scale, float) else 1.0)  # without rounding errors to scale (`masks_steps`)
            is_typical = batch.num_rows == self.roster.plan.planned_rows
            if is_typical:
                self.watch.run_begins()
            try:
                step = worker.run(batch, (self.config.runtime.seed, *place), with_gradients=True, scale=scale, call=call)
            except BatchError:
                if sync is not None:
                    sync.abandon()
                raise
            if is_typical:
                self.watch.run_ends()
            self.arrive()
            with self.watch.waiting("gradients"):
                if sync is not None:
                    sync.wait()
            return step

    def settle(self, mode: str, num_rows: int) -> None:
        """Writes the buffer updates of a mode's last run, on a global batch of `num_rows` rows. A collective of the world."""
        worker = self._workers[mode]
        with self.status.reporting():
            self._buffers.settle(worker.model, worker.plan, worker.copied, worker.made, num_rows)
            worker.derive()

    def forget_lost(self) -> None:
        """Drops the rounding errors of gradients on this rank: their steps do not count, or the weights were replaced."""
        for sync in self._all_syncs:
            sync.forget_lost()

    def unscale(self, state: EngineState, factor: torch.Tensor) -> torch.Tensor:
        """Multiplies the gradients by a power of two; 1 if some gradient of any rank is not finite, else 0: 0-dim, equal on all ranks."""
        found = unscale(factor, state.kept.values(), self.roster.world.device)
        if self._connections.world_sums.is_alone:
            return found
        self._connections.world_sums.add(found, "looking for gradients that are not finite")
        return found.clamp_(max=1.0)

    def clip(self, state: EngineState, limit: float | None, factor: float = 1.0) -> torch.Tensor:
        """Clips the gradients to a norm, whatever is set, and returns the norm before; None only computes it."""
        if self._by_hand is None:
            self._by_hand = self._make_clipping(state, None)
        return self._by_hand.clip(limit, factor)

    def publish(self) -> None:
        """Updates what ops read from what the optimizer has stepped. A collective of the world.

        With ``communication.defer_weights`` it only starts this: the next step waits for each bucket where it reads it.
        """
        if self._publishing is not None:
            with self.status.reporting():
                self._publishing.publish()

    def arrive(self) -> None:
        """Waits for weights that others have published, before they are read outside of a step."""
        if self._publishing is not None:
            with self.status.reporting():
                self._publishing.arrive()

    def check_unwritten(self) -> None:
        """Raises as `Publishing.check`."""
        if self._publishing is not None:
            self._publishing.check()

    def lend(self, mode: Literal["eval", "predict", "eval_predict"]) -> None:
        """Sends this rank what its stages read in a mode and do not hold. A collective of the world, before `forward`."""
        roster = self.roster
        with self.status.reporting():
            lend_tensors(
                self._captured.graph,
                self.holdings,
                self._lasting,
                roster.world_ranks,
                roster.world,
                self._borrowers[mode],
                self._lent,
            )

    def forward(self, mode: str, batch: BatchView, step_number: int) -> StepState:
        """Runs a mode without backward; raises as `train`."""
        self.arrive()
        with self.status.reporting():
            step = self._workers[mode].run(batch, (self.config.runtime.seed, step_number), with_gradients=False)
        self.settle(mode, batch.num_rows)
        return step

    def call_together(self, call: Call, argument: float | None = None, *, asks: bool = False) -> bool:
        """Waits until all ranks of the world make the same call, and until published weights have arrived. No effect once closed.

        Args:
            call, argument: the same on all ranks.
            asks: whether this rank requests something.

        Returns:
            Whether any rank does.

        Raises:
            RuntimeFault: some rank calls something else, or with another argument, or has left.
        """
        if self._workers:
            self.arrive()
            with self.status.reporting():
                return call_together(call, argument, self.roster.world, self._connections.world_sums, asks=asks)
        return asks

    def take_busy(self) -> tuple[float, ...] | None:
        """Per rank of the plan, its compute time in a run, once all have reported a new one; else None."""
        told = self._connections.world_sums.take_busy()
        found = tuple(told[rank] for rank in self.roster.world_ranks)
        return found if all(found) else None

    @property
    def num_noticed(self) -> int:
        """Ranks that had received SIGTERM (`Notice`) at the last agreement: equal on all ranks."""
        return self._connections.world_sums.num_noticed

    @property
    def num_affordable(self) -> int:
        """Times that rank 0 could pay for tracing the model again, at the last agreement: equal on all ranks."""
        return self._connections.world_sums.num_affordable

    def report_affordable(self, num_affordable: int) -> None:
        """Reports, with the next agreement, what this rank can pay; that of rank 0 counts."""
        self._connections.world_sums.own_affordable = num_affordable

    def refuse(self, mode: str, reason: WhaleError, call: Call | None = None) -> None:
        """Tells the other ranks, which are about to run a step, that this rank does not, and why."""
        if mode in self._workers:
            self._workers[mode].refuse(reason, call)

    def totals(self, step: StepState) -> Totals:
        """The loss's sums and weights over all ranks; waits for them the first time."""
        assert step.reduction is not None
        totals, work = step.reduction
        if work is not None:
            with self.status.reporting():
                self._connections.world_sums.finish(work, "summing the loss")
            step.reduction = totals, None
        return totals

    def unmerged(self, state: EngineState) -> list[str]:
        """Running statistics that differ between owners, each updated by its own rows, until they are merged."""
        if not state.has_moved_statistics:
            return []
        moved = (name for name, update in buffer_updates(self._captured.graph).items() if update.kind == "statistics")
        return [name for name in moved if len(self.roster.holders.get(name, ())) > 1]

    def merge_statistics(self, state: EngineState) -> None:
        """Makes running statistics equal on their owners, if steps have changed them. A collective of the world."""
        if not state.has_moved_statistics:
            return
        state.has_moved_statistics = False
        graph = self._captured.graph
        names = tuple(name for name, update in buffer_updates(graph).items() if update.kind == "statistics")
        device, add = self.roster.world.device, self._connections.world_sums.add
        with self.status.reporting():
            merge_buffers(self.holdings, self.roster.rank, graph, state.tensors, names, add, device)

    @property
    def status(self) -> StatusBoard:
        return self._connections.status

    @property
    def peak_in_flight(self) -> int:
        """The most micro-batches whose activations this rank's stages held at once in the last step, from F to B or W."""
        return self._last_training.peak_in_flight if self._last_training is not None else 0

    def check_open(self) -> None:
        """Raises `RuntimeFault` if it is closed."""
        if not self._workers:
            raise RuntimeFault("the engine is closed")

    def close(self, *, waits: bool = True) -> None:
        """Releases process groups and state; no step can follow. Other runtimes are not touched.

        Args:
            waits: whether for weights that others have published; where an error is under way it does not.
        """
        try:
            if waits and sys.exception() is None:  # else the others may not come here
                self.arrive()
        finally:
            self._release()

    def _release(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._kept.clear()
        self._lent.clear()
        self._last_training = None
        for sync in self._all_syncs:
            sync.close()
        self._syncs, self._lasting = {}, {}
        self._publishing = self._weights = self.clipping = self._by_hand = self.local_steps = None
        self._connections.close()

    def _make_clipping(self, state: EngineState, limit: float | None) -> Clipping:
        return Clipping(self.holdings, self.roster.rank, state.kept, limit, self._connections.world_sums.add, self.roster.world.device)

    @property
    def _all_syncs(self) -> list[GradientSync]:
        return [sync for sync in self._syncs.values() if sync is not None]

    def _sync_for(self, graph: ModelGraph) -> GradientSync | None:
        """The gradient sums of what a capture trains: captures with other heads, losses or turns train other parameters."""
        reached = reached_parameters(graph)
        if reached not in self._syncs:
            self._syncs[reached] = self._make_sync(self._buckets_of(graph).summed)
        return self._syncs[reached]

    def _buckets_of(self, graph: ModelGraph) -> Buckets:
        plan = self.roster.plan
        return plan_buckets(plan, self.holdings.shardings, graph, alike_schedules(plan), self.config.communication.bucket_bytes)

    def _make_sync(self, buckets: Sequence[Bucket]) -> GradientSync | None:
        """None where the optimizer steps this rank's gradients as they are."""
        rank_place, roster = self.roster.rank_place, self.roster
        if rank_place is None:
            return None
        stages = {(rank_place.replica, stage) for stage in roster.plan.pipelines[rank_place.replica].stages_of(rank_place.pipeline_rank)}
        sync = GradientSync(buckets, self._links(rank_place.rank), stages, self._state.parameters, self._state.kept)
        return sync if sync.has_work else None

    def _make_publishing(self, buckets: Sequence[Bucket], state: EngineState) -> Publishing | None:
        """None where ops on this rank read what the optimizer steps, and no other rank steps a part of it."""
        rank = self.roster.rank
        is_copied = any(self.holdings.plan.state_of(name).is_copied for name in state.kept)
        parts = {} if self._weights is None else self._weights.parts
        if rank is None or not (is_copied or parts or any(rank in bucket.owners for bucket in buckets)):
            return None
        return Publishing(buckets, self._links(rank), state.tensors, state.kept, parts, defers=self.config.communication.defer_weights)

    def _make_local_steps(self, buckets: Sequence[Bucket], state: EngineState) -> LocalSteps | None:
        plan, rank = self.roster.plan, self.roster.rank
        state.keep_momenta(keeps=plan.rounds is not None and bool(plan.rounds.momentum))
        if plan.rounds is None:
            if self.config.communication.sync_steps > 1 and self.roster.world.rank == 0:
                warn(
                    f"communication.sync_steps: {self.config.communication.sync_steps} has no effect: the plan has no replicas on several "
                    "hosts, so gradients are summed over all of its devices in each step"
                )
            return None
        from whale.runtime.state.local_steps import LocalSteps  # needed here alone

        links = None if rank is None else self._links(rank)
        return LocalSteps(plan, buckets, links, state, self.roster.world.device)

    def _make_weights(self, buckets: Sequence[Bucket], state: EngineState) -> GatheredWeights | None:
        """None where this rank holds all that ops read."""
        rank = self.roster.rank
        if rank is None or not any(rank in bucket.owners for bucket in buckets):
            return None
        return GatheredWeights(buckets, self._links(rank), state.tensors, state.kept)

    def _links(self, rank: int) -> RankLinks:
        world_ranks, groups, waits = self.roster.world_ranks, self._connections.groups, self.roster.world.waits
        return RankLinks(self.holdings, rank, world_ranks, groups, waits, self._host_copies, self.watch)


def _compilation(graph: ModelGraph, config: Config) -> Compilation | None:
    if not config.runtime.compile:
        return None
    from whale.runtime.program.compiled import Compilation  # needed here alone

    return Compilation({op.name: op.where for op in graph.ops}, config.runtime.compile_mode)
