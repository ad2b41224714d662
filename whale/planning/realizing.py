"""Makes plans of strategies with named devices: finds their cuts, rows and recomputation."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from whale.config import Config
from whale.config.keys import Shares
from whale.estimate.prices.budget import ALL, Budget
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.planning.cutting.pieces import Pieces
from whale.planning.pipeline.cut_points import CutPoints, find_cut_points
from whale.planning.pipeline.placement import SEARCHED, Placement
from whale.planning.pipeline.recompute import KEEP_ALL, OPEN_DEPTHS, kept_under, read_policy
from whale.planning.pipeline.scheduling import PipelineShape, Split, shape_pipeline
from whale.planning.plan import EstimatedPlan, estimated_plan
from whale.planning.replicas.group_size import ChosenPlacement
from whale.planning.replicas.solve import Solver, check_room, solve_together
from whale.planning.shard.sharding import Sharder
from whale.planning.shard.stage_price import StagePricing
from whale.planning.strategy import ReplicaSpec, Strategy
from whale.planning.structure.structure import Structure, analyse
from whale.planning.verify.refused import decide_in_memory


@dataclass(eq=False)
class Realizer:
    """Makes plans of one graph on one cluster by the passes of `plan_and_estimate`, with shared caches; scopes are ignored."""

    prices: Prices
    config: Config
    num_rows: int
    _solvers: dict[Hashable, Solver] = field(default_factory=dict, init=False)
    _shapes: dict[Hashable, PipelineShape] = field(default_factory=dict, init=False)
    _points: dict[tuple[str, Budget], CutPoints] = field(default_factory=dict, init=False)
    _pieces: dict[Budget, Pieces] = field(default_factory=dict, init=False)

    @property
    def graph(self) -> ModelGraph:
        return self.prices.graph

    @property
    def cluster(self) -> Cluster:
        return self.prices.cluster

    @cached_property
    def structure(self) -> Structure:
        """What stays together in any cut."""
        return analyse(self.graph)

    @cached_property
    def points(self) -> CutPoints:
        """Where the model can be cut, without recomputation."""
        return self._cut_points(KEEP_ALL.kind, ALL)

    @cached_property
    def pieces(self) -> Pieces:
        """The same, with times and bytes."""
        return self._pieces_within(ALL)

    @cached_property
    def _sharder(self) -> Sharder:
        return Sharder(self.prices)

    def realize(self, strategy: Strategy) -> EstimatedPlan:
        """The plan, estimated; made again with less memory if the estimate finds too little.

        Raises:
            MemoryShortage: it does not fit.
            WhaleError: the model cannot be cut, or its rows divided, in this way.
        """
        replicas = strategy.replicas

        def planned(lacking: Mapping[Device, int], policy: str | Shares) -> EstimatedPlan:
            return self._planned(replicas, policy, kept.reserving(lacking), keeps=is_open and policy == KEEP_ALL.kind)

        asked = replicas[0].recompute or self.config.recompute.policy
        first = KEEP_ALL.kind if asked == "auto" else asked
        pipelines, kept = [self.solver(replica, first).pipeline for replica in replicas], self.pricing_for(replicas, first)
        is_open = asked == "auto" and not any(any(pipeline.recomputed) for pipeline in pipelines)
        others = [partial(planned, policy=policy) for policy in OPEN_DEPTHS] if is_open else []
        return decide_in_memory(self.pricing.rooms, partial(planned, policy=asked), *others)

    def _planned(self, replicas: Sequence[ReplicaSpec], policy: str | Shares, pricing: StagePricing, *, keeps: bool) -> EstimatedPlan:
        placed = [replica.names or () for replica in replicas]
        used = {name for each in placed for names in each for name in names}
        idle = tuple(device.name for device in self.cluster.devices if device.name not in used)
        placement = Placement(SEARCHED, tuple(placed), idle)
        solvers = [self.solver(replica, policy, pricing) for replica in replicas]
        if keeps:
            check_room(placement, solvers, self.num_rows)
        chosen = ChosenPlacement(solvers[0], solve_together(placement, solvers, self.num_rows), {})
        return estimated_plan([None] * len(replicas), chosen, gather_rows=self.config.communication.gather_rows)

    def pricing_for(self, replicas: Sequence[ReplicaSpec], policy: str | Shares) -> StagePricing:
        """The prices where these replicas hold all parameters, and keep sharded state."""
        if not self.prices.costs.zero and sum(replica.count for replica in replicas) > 1:
            return self.pricing
        return self.pricing.kept_by([self.solver(replica, policy).pipeline for replica in replicas for _ in range(replica.count)])

    def solver(self, replica: ReplicaSpec, policy: str | Shares, pricing: StagePricing | None = None) -> Solver:
        """The solver of a pipeline of this shape, on any devices; `pricing`: None for all memory."""
        pricing = self.pricing if pricing is None else pricing
        ranks = replica.ranks or ()
        widths = tuple(rank.width for rank in ranks)
        shape = replica.schedule, replica.num_chunks, replica.num_micro_batch, widths
        key = shape, policy, pricing.budget
        if key not in self._solvers:
            if shape not in self._shapes:
                self._shapes[shape] = self._shape(replica, widths)
            pipeline = self._shapes[shape]
            read = read_policy(policy, pipeline)
            kept_by = dataclasses.replace(pricing.budget, reserved=frozenset(), is_alone=False)  # pieces are shared by all
            points, pieces = self._cut_points(read.kind, kept_by), self._pieces_within(kept_by)
            self._solvers[key] = Solver(pricing, pipeline, self.num_rows, points=points, pieces=pieces, policy=read)
        return self._solvers[key]

    def _shape(self, replica: ReplicaSpec, widths: tuple[int, ...]) -> PipelineShape:
        settings = {"schedule": replica.schedule, "num_chunks": replica.num_chunks, "num_micro_batch": replica.num_micro_batch}
        config = self.config.with_values(
            {f"pipeline.{name}": value for name, value in settings.items() if value is not None} | {"pipeline.num_stages": len(widths)}
        )
        pipeline = shape_pipeline(config, None, len(widths))
        if max(widths) == 1:
            return pipeline
        splits = tuple(Split(widths[rank]) for rank in pipeline.stage_rank)
        return dataclasses.replace(pipeline, devices=widths, splits=splits)

    def _cut_points(self, policy: str, budget: Budget) -> CutPoints:
        if (policy, budget) not in self._points:
            kept = kept_under(self.prices, dataclasses.replace(KEEP_ALL, kind=policy))
            self._points[policy, budget] = find_cut_points(self.structure, self.prices, kept, budget)
        return self._points[policy, budget]

    def _pieces_within(self, budget: Budget) -> Pieces:
        if budget not in self._pieces:
            self._pieces[budget] = Pieces(self.prices, self._cut_points(KEEP_ALL.kind, budget), self.num_rows, budget, self._sharder)
        return self._pieces[budget]

    @cached_property
    def pricing(self) -> StagePricing:
        return StagePricing.of(self.prices, self.config.communication.overlap)
