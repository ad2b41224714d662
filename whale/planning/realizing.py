"""Makes plans of strategies with named devices: finds their cuts, rows and recomputation."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from whale.config import Config
from whale.config.keys import Shares
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
    _points: dict[str, CutPoints] = field(default_factory=dict, init=False)

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
        return self._cut_points(KEEP_ALL.kind)

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces(self.prices, self.points, self.num_rows)

    def realize(self, strategy: Strategy) -> EstimatedPlan:
        """The plan, estimated; made again with less memory if the estimate finds too little.

        Raises:
            MemoryShortage: it does not fit.
            WhaleError: the model cannot be cut, or its rows divided, in this way.
        """
        replicas = strategy.replicas

        def planned(lacking: Mapping[Device, int], policy: str | Shares) -> EstimatedPlan:
            pricing = self.pricing.reserving(lacking).kept_by(pipelines)
            return self._planned(replicas, policy, pricing, keeps=is_open and policy == KEEP_ALL.kind)

        asked = replicas[0].recompute or self.config.recompute.policy
        first = KEEP_ALL.kind if asked == "auto" else asked
        pipelines = [self.solver(replica, first).pipeline for replica in replicas]
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

    def solver(self, replica: ReplicaSpec, policy: str | Shares, pricing: StagePricing | None = None) -> Solver:
        """The solver of a pipeline of this shape, on any devices; `pricing`: None for all memory."""
        pricing = self.pricing if pricing is None else pricing
        ranks = replica.ranks or ()
        widths = tuple(rank.width for rank in ranks)
        key = replica.schedule, replica.num_chunks, replica.num_micro_batch, widths, policy, pricing.budget
        if key not in self._solvers:
            pipeline = self._shape(replica, widths)
            read = read_policy(policy, pipeline)
            points = self._cut_points(read.kind)
            self._solvers[key] = Solver(pricing, pipeline, self.num_rows, points=points, pieces=self.pieces, policy=read)
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

    def _cut_points(self, policy: str) -> CutPoints:
        if policy not in self._points:
            kept = kept_under(self.prices, dataclasses.replace(KEEP_ALL, kind=policy))
            self._points[policy] = find_cut_points(self.structure, self.prices, kept)
        return self._points[policy]

    @cached_property
    def pricing(self) -> StagePricing:
        return StagePricing.of(self.prices, self.config.communication.overlap)
