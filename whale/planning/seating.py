"""Plans for replicas of which all is said but their cuts, their rows and what they recompute: what a search over plans asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial

from whale.config import Config
from whale.config.keys import Shares
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.planning.pipeline.cut_points import CutPoints, find_cut_points
from whale.planning.pipeline.placement import SEARCHED, Placed, Placement
from whale.planning.pipeline.recompute import KEEP_ALL, OPEN_DEPTHS, kept_under, read_policy
from whale.planning.pipeline.scheduling import PipelineShape, Split, shape_pipeline
from whale.planning.plan import Draft, draft_plan
from whale.planning.replicas.group_size import Outcome
from whale.planning.replicas.solve import Solver, check_room, solve_together
from whale.planning.shard.stage_price import StagePricing
from whale.planning.structure.structure import Structure, analyse
from whale.planning.verify.refused import decided_within


@dataclass(frozen=True)
class Seating:
    """One replica: how its pipeline runs, and on which devices.

    Attributes:
        schedule: name of the schedule kind.
        num_chunks: stages per rank.
        num_micro_batch: micro-batches of a step.
        placed: the devices of each rank, in the order of the pipeline; several are a split group.
    """

    schedule: str
    num_chunks: int
    num_micro_batch: int
    placed: Placed

    @property
    def widths(self) -> tuple[int, ...]:
        """Devices of each rank."""
        return tuple(map(len, self.placed))


@dataclass(eq=False)
class Seater:
    """Makes plans of one graph on one cluster, by the passes of `make_plan`; what several of them share is worked out once.

    Args:
        prices: of the graph on the cluster; the model's scopes are not looked at.
        config: settings; those of the pipeline are the seatings'.
        num_rows: of the global batch.
    """

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
        """Where the model can be cut, if nothing is recomputed."""
        return self._cut_points(KEEP_ALL.kind)

    def draft(self, seatings: Sequence[Seating], policy: str | Shares | None = None) -> Draft:
        """The plan with these replicas, estimated; where the estimate finds too little memory, made again with less.

        Args:
            policy: of recomputation, where it is another than the configuration's.

        Raises:
            MemoryShortage: it does not fit.
            WhaleError: the model cannot be cut, or its rows divided, in this way.
        """
        asked = self.config.recompute.policy if policy is None else policy

        def draft(prices: Prices, policy: str | Shares) -> Draft:
            return self._at(prices)._draft(seatings, policy, keeps=is_open and policy == KEEP_ALL.kind)

        is_open = asked == "auto" and not any(any(self._solver(seating, KEEP_ALL.kind).pipeline.recomputed) for seating in seatings)
        others = [partial(draft, policy=policy) for policy in OPEN_DEPTHS] if is_open else []
        return decided_within(self.prices, partial(draft, policy=asked), *others)

    def _draft(self, seatings: Sequence[Seating], policy: str | Shares, *, keeps: bool) -> Draft:
        used = {name for seating in seatings for names in seating.placed for name in names}
        idle = tuple(device.name for device in self.cluster.devices if device.name not in used)
        placement = Placement(SEARCHED, tuple(seating.placed for seating in seatings), idle)
        solvers = [self._solver(seating, policy) for seating in seatings]
        if keeps:
            check_room(placement, solvers, self.num_rows)
        found = Outcome(solvers[0], solve_together(placement, solvers, self.num_rows), {})
        return draft_plan(self.graph, self.cluster, [None] * len(seatings), found, gather_rows=self.config.communication.gather_rows)

    def _at(self, prices: Prices) -> Seater:
        """The same with other prices, which differ in the memory that is spared."""
        if prices is self.prices:
            return self
        other = copy(self)
        other.prices, other._solvers, other._pricing = prices, {}, StagePricing.of(prices, self.config.communication.overlap)
        return other

    def _solver(self, seating: Seating, policy: str | Shares) -> Solver:
        """The solver of a pipeline of this shape, whatever its devices are."""
        key = seating.schedule, seating.num_chunks, seating.num_micro_batch, seating.widths, policy
        if key not in self._solvers:
            pipeline = self._shape(seating)
            read = read_policy(policy, pipeline)
            points = self._cut_points(read.kind)
            self._solvers[key] = Solver(self.graph, self.structure, self._pricing, pipeline, self.num_rows, points=points, policy=read)
        return self._solvers[key]

    def _shape(self, seating: Seating) -> PipelineShape:
        num_ranks = len(seating.placed)
        config = self.config.with_values(
            {
                "pipeline.schedule": seating.schedule,
                "pipeline.num_chunks": seating.num_chunks,
                "pipeline.num_micro_batch": seating.num_micro_batch,
                "pipeline.num_stages": num_ranks,
            }
        )
        pipeline = shape_pipeline(config, None, num_ranks)
        if max(seating.widths) == 1:
            return pipeline
        splits = tuple(Split(seating.widths[rank]) for rank in pipeline.stage_rank)
        return dataclasses.replace(pipeline, devices=seating.widths, splits=splits)

    def _cut_points(self, policy: str) -> CutPoints:
        if policy not in self._points:
            kept = kept_under(self.prices, dataclasses.replace(KEEP_ALL, kind=policy))
            self._points[policy] = find_cut_points(self.graph, self.structure, self.prices, kept)
        return self._points[policy]

    @cached_property
    def _pricing(self) -> StagePricing:
        return StagePricing.of(self.prices, self.config.communication.overlap)
