"""Makes plans of strategies with named devices: finds their cuts, rows and recomputation."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale.config import Config
from whale.config.keys import Recomputation
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.planning.cutting.cuts import Cuts
from whale.planning.cutting.pieces import Pieces
from whale.planning.pipeline.cut_points import CutPoints
from whale.planning.pipeline.placement import SEARCHED, Placement
from whale.planning.pipeline.recompute import KEEP_ALL, at_depth
from whale.planning.pipeline.scheduling import PipelineShape, Split, shape_pipeline
from whale.planning.plan import EstimatedPlan, decided_in_memory, estimated_plan
from whale.planning.replicas.group_size import ChosenPlacement
from whale.planning.replicas.solve import Solver, check_room, solve_together
from whale.planning.shard.stage_price import StagePricing
from whale.planning.strategy import ReplicaSpec, Strategy


@dataclass(eq=False)
class Realizer:
    """Makes plans of one graph on one cluster by the passes of `plan_and_estimate`, with shared caches; scopes are ignored."""

    prices: Prices
    config: Config
    num_rows: int
    _solvers: dict[Hashable, Solver] = field(default_factory=dict, init=False)
    _shapes: dict[Hashable, PipelineShape] = field(default_factory=dict, init=False)

    @property
    def graph(self) -> ModelGraph:
        return self.prices.graph

    @property
    def cluster(self) -> Cluster:
        return self.prices.cluster

    @cached_property
    def cuts(self) -> Cuts:
        return Cuts(self.prices, self.num_rows)

    @cached_property
    def points(self) -> CutPoints:
        """Where the model can be cut, without recomputation."""
        return self.cuts.points()

    @cached_property
    def pieces(self) -> Pieces:
        """The same, with times and bytes."""
        return self.cuts.pieces()

    def realize(self, strategy: Strategy) -> EstimatedPlan:
        """The plan, estimated; made again with less memory if the estimate finds too little.

        Raises:
            MemoryShortage: it does not fit.
            WhaleError: the model cannot be cut, or its rows divided, in this way.
        """
        replicas = strategy.replicas

        asked = replicas[0].recompute or self.config.recompute.policy
        first = KEEP_ALL.kind if asked == "auto" else asked
        pipelines, kept = [self.solver(replica, first).pipeline for replica in replicas], self.pricing_for(replicas, first)

        def planned(lacking: Mapping[Device, int], depth: str | None = None) -> EstimatedPlan:
            return self._planned(replicas, asked if depth is None else depth, kept.reserving(lacking), keeps=depth == KEEP_ALL.kind)

        return decided_in_memory(self.pricing, [asked], [pipeline.schedule for pipeline in pipelines], planned)

    def _planned(self, replicas: Sequence[ReplicaSpec], policy: Recomputation, pricing: StagePricing, *, keeps: bool) -> EstimatedPlan:
        placed = [replica.names or () for replica in replicas]
        used = {name for each in placed for names in each for name in names}
        idle = tuple(device.name for device in self.cluster.devices if device.name not in used)
        placement = Placement(SEARCHED, tuple(placed), idle)
        solvers = [self.solver(replica, policy, pricing) for replica in replicas]
        if keeps:
            check_room(placement, solvers, self.num_rows)
        chosen = ChosenPlacement(solvers[0], solve_together(placement, solvers, self.num_rows), {})
        return estimated_plan([None] * len(replicas), chosen, gather_rows=self.config.communication.gather_rows)

    def pricing_for(self, replicas: Sequence[ReplicaSpec], policy: Recomputation) -> StagePricing:
        """The prices where these replicas hold all parameters, and keep sharded state."""
        if not self.prices.costs.zero and sum(replica.count for replica in replicas) > 1:
            return self.pricing
        return self.pricing.kept_by([self.solver(replica, policy).pipeline for replica in replicas for _ in range(replica.count)])

    def solver(self, replica: ReplicaSpec, policy: Recomputation, pricing: StagePricing | None = None) -> Solver:
        """The solver of a pipeline of this shape, on any devices; `pricing`: None for all memory."""
        pricing = self.pricing if pricing is None else pricing
        ranks = replica.ranks or ()
        widths = tuple(rank.width for rank in ranks)
        shape = replica.schedule, replica.num_chunks, replica.num_micro_batch, widths
        key = shape, policy, pricing.budget
        if key not in self._solvers:
            if shape not in self._shapes:
                self._shapes[shape] = self._shape(replica, widths)
            pipeline, read = at_depth(policy, self._shapes[shape], pricing.prices.graph)
            points, pieces = self.cuts.points(read, pricing.budget), self.cuts.pieces(pricing.budget)
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

    @cached_property
    def pricing(self) -> StagePricing:
        return StagePricing.of(self.prices, self.config.communication.overlap)
