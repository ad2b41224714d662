"""From a graph, a cluster and a configuration to the plan: runs the passes in order and keeps the best placement."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Protocol

from whale.config import Config, ReplicaBlock
from whale.config.keys import Recomputation
from whale.errors import PlanError, WhaleError, raise_faults
from whale.estimate import Costs, StepEstimate
from whale.estimate.prices.part import NOTHING
from whale.estimate.prices.prices import Prices
from whale.ir.cluster import Cluster, Device
from whale.ir.graph import ModelGraph
from whale.ir.plan import Choice, Plan, Replica
from whale.planning.annotations.taskgraphs import Annotations, assign_by_scopes, check_enough_devices, read_scopes, task_graphs
from whale.planning.cutting.cuts import Cuts
from whale.planning.explain.choices import explain_choices, explain_half_types, explain_step
from whale.planning.explain.mixing import explain_joining, explain_mixing, explain_not_joined, keeps_apart, mixed_apart
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.pipeline.placement import DevicePool, Placement
from whale.planning.pipeline.recompute import KEEP_ALL, MOST, at_depth, open_depths, read_policy
from whale.planning.pipeline.scheduling import PipelineShape, shape_pipeline
from whale.planning.pricing import bare_plan, with_estimate
from whale.planning.replicas.blocks import Block, assign_by_blocks, check_written_axes, count_by_rows, read_replicas
from whale.planning.replicas.group_size import ChosenPlacement, choose_group
from whale.planning.replicas.joining import join_replicas, needs_joining, why_not_joined, with_one_program
from whale.planning.replicas.replica import make_replicas
from whale.planning.replicas.solve import PricedPlacement, Solver, solve_together
from whale.planning.shard.scattering import scatter_all
from whale.planning.shard.space import check_axes
from whale.planning.shard.stage_price import StagePricing, make_scene
from whale.planning.structure.stages import crossing_faults
from whale.planning.verify.refused import WORTH_KEEPING, decide_in_memory, refuse_overfull
from whale.planning.verify.verify import needs_axes, verify
from whale.planning.written import state_plan
from whale.progress import without_collecting
from whale.units import format_seconds

Solve = Callable[[Placement, PricedPlacement | None], PricedPlacement]
"""Solves a placement, optionally starting with the rows of another solution."""


def make_plan(graph: ModelGraph, cluster: Cluster, config: Config, *, rows: int | None = None) -> Plan:
    """The plan; arguments and errors as of `plan_and_estimate`."""
    return plan_and_estimate(graph, cluster, config, rows=rows)[0]


@without_collecting()
def plan_and_estimate(graph: ModelGraph, cluster: Cluster, config: Config, *, rows: int | None = None) -> tuple[Plan, StepEstimate]:
    """Decides which devices run which ops on how many rows, and estimates a step of that plan.

    Args:
        graph: the captured model.
        cluster: the devices.
        config: the user's settings.
        rows: of the global batch; None for the example's.

    Raises:
        AnnotationError: scopes that cannot be honoured.
        ConfigError: settings that do not fit the model or one another.
        BatchError: fewer rows than devices and micro-batches need.
        PlanError: no plan fits, or a tensor cannot be sent between stages.
    """
    return planned_as_set(graph, cluster, config, rows).finished()


def planned_as_set(graph: ModelGraph, cluster: Cluster, config: Config, rows: int | None) -> EstimatedPlan | StatedPlan:
    """The plan of `plan_and_estimate` before it is finished; arguments and errors as there."""
    if any(block.stages for block in config.replicas):
        return StatedPlan(*state_plan(graph, cluster, config, rows))
    num_rows = graph.num_rows if rows is None else rows
    prices = Prices(graph, cluster, Costs.for_model(config, graph, cluster))
    return plan_as_set(StagePricing.of(prices, config.communication.overlap), config, Cuts(prices, num_rows))


def plan_as_set(pricing: StagePricing, config: Config, cuts: Cuts, pool: DevicePool | None = None) -> EstimatedPlan:
    """The plan that scopes and settings describe, estimated but not explained; errors as of `plan_and_estimate`.

    Args:
        pricing: prices of stages.
        config: the settings.
        cuts: of the model, where nothing says what its stages are; with the rows of the batch.
        pool: where to place a model with scopes; None for all devices. Written replicas have devices of their own.
    """
    cluster = pricing.prices.cluster
    own = DevicePool(cluster, cluster) if pool is None else pool

    def planned(lacking: Mapping[Device, int], depth: str | None = None) -> EstimatedPlan:
        return _planned(pricing.reserving(lacking), config, cuts, own, depth)

    policies = [config.recompute.policy if block.recompute is None else block.recompute for block in config.replicas]
    schedules = [dict(block.pipeline).get("schedule", config.pipeline.schedule) for block in config.replicas] or [config.pipeline.schedule]
    return decided_in_memory(pricing, policies or [config.recompute.policy], list(map(str, schedules)), planned)


class PlannedAt(Protocol):
    """Makes a plan, estimated."""

    def __call__(self, lacking: Mapping[Device, int], depth: str | None = None) -> EstimatedPlan:
        """The plan with so many bytes left free on each device type.

        `depth`: the recomputation policy where that is left to memory; None recomputes as much as memory demands.
        """


def decided_in_memory(
    pricing: StagePricing, policies: Collection[Recomputation], schedules: Sequence[str], planned: PlannedAt
) -> EstimatedPlan:
    """The plan that fits; `policies` and `schedules` are those of the replicas. Raises MemoryShortage where nothing fits."""
    depths = open_depths(schedules) if "auto" in policies else ()  # memory decides what some replica computes again
    found = decide_in_memory(pricing.rooms, planned, *([partial(planned, depth=depth) for depth in each] for each in depths))
    if depths and found.is_cut_for_memory:
        with contextlib.suppress(PlanError):  # what is computed again leaves room for a faster cut
            again = decide_in_memory(pricing.rooms, partial(planned, depth=MOST))
            found = min(found, again, key=lambda each: each.step.step_seconds)
    return found


def _planned(pricing: StagePricing, config: Config, cuts: Cuts, pool: DevicePool, depth: str | None) -> EstimatedPlan:
    """One run of the passes; `depth` as of `PlannedAt`."""
    graph, num_devices = pricing.prices.graph, len(pool.taken.devices)
    gather_rows = config.communication.gather_rows
    if config.replicas:
        return estimated_plan(*_plan_blocks(pricing, config, cuts, depth=depth), gather_rows=gather_rows)
    annotations = read_scopes(graph, config, num_devices)
    pipeline = shape_pipeline(config, annotations, num_devices)
    if annotations is not None:
        check_enough_devices(annotations, pipeline.num_devices, num_devices)
    pricing = pricing.kept_by([pipeline], num_devices // pipeline.num_devices)
    solver = _solver(pricing, config, pipeline, annotations, cuts)
    prefers_intra_node = config.cluster.device_place_prefer_intra_node
    chosen = choose_group(
        pipeline,
        config,
        lambda size: _choose_as_needed(
            dataclasses.replace(solver, pipeline=shape_pipeline(config, annotations, num_devices, size)),
            pool,
            prefers_intra_node=prefers_intra_node,
            depth=depth,
        ),
    )
    return estimated_plan([annotations] * len(chosen.best.replicas), chosen, gather_rows=gather_rows)


def _solver(
    pricing: StagePricing,
    config: Config,
    pipeline: PipelineShape,
    annotations: Annotations | None,
    cuts: Cuts,
    asked: ReplicaBlock | None = None,
) -> Solver:
    """The solver of replicas of one shape; `asked` is the block that describes them."""
    prices, graph, num_rows = pricing.prices, pricing.prices.graph, cuts.num_rows
    with contextlib.nullcontext() if asked is None else asked.placed_here():
        policy = read_policy(config.recompute.policy, pipeline, graph)
    if asked is not None:
        check_written_axes(asked, prices)
    if asked is not None and asked.blocks is not None:
        assignment = assign_by_blocks(graph, asked, pipeline.num_stages, annotations)
        return Solver(pricing, pipeline, num_rows, fixed=assignment, policy=policy)
    if annotations is None:
        points, pieces = cuts.points(policy, pricing.budget), cuts.pieces(pricing.budget)
        return Solver(pricing, pipeline, num_rows, points=points, pieces=pieces, policy=policy)
    assignment = assign_by_scopes(graph, annotations)
    for index, (scope, stage) in enumerate(zip(annotations.scopes, annotations.stages, strict=True)):
        if scope.axis is not None and annotations.widths[stage] == 1:
            own = tuple(name for name in assignment.parts[stage].ops if annotations.task_graph_of.get(name) == index)
            check_axes(dataclasses.replace(make_scene(prices, assignment, stage, pipeline), ops=own), (scope,))
    return Solver(pricing, pipeline, num_rows, fixed=assignment, policy=policy)


def _plan_blocks(pricing: StagePricing, config: Config, cuts: Cuts, depth: str | None) -> tuple[list[Annotations | None], ChosenPlacement]:
    """Replicas as configured in blocks; `depth` as of `PlannedAt`."""
    graph, num_rows = pricing.prices.graph, cuts.num_rows
    blocks, idle = read_replicas(graph, pricing.prices.cluster, config, num_rows)
    pricing = pricing.kept_by([block.shape.pipeline for block in blocks])
    weights = [block.asked.rows for block in blocks if block.asked.rows is not None]
    found = _solve_blocks(pricing, blocks, idle, cuts, weights, depth=depth)
    if not weights and any(block.asked.micro_batch_rows for block in blocks):
        shapes = [block.shape for block in blocks]
        counted, rows = count_by_rows(graph, config, [block.asked for block in blocks], shapes, found.best.rows)
        if rows != found.best.rows or any(new.pipeline != old.pipeline for new, old in zip(counted, shapes, strict=True)):
            blocks = tuple(dataclasses.replace(block, shape=shape) for block, shape in zip(blocks, counted, strict=True))
            found = _solve_blocks(pricing, blocks, idle, cuts, rows, depth=depth)
    return [block.shape.annotations for block in blocks], found


def _solve_blocks(
    pricing: StagePricing, blocks: Sequence[Block], idle: tuple[str, ...], cuts: Cuts, weights: Sequence[int], depth: str | None
) -> ChosenPlacement:
    """The best placement of blocks; equal ones share a solver. `weights` of the rows, empty to balance them; `depth` as of `PlannedAt`."""
    made: dict[Hashable, Solver] = {}
    solvers = []
    for block in blocks:
        shape = block.shape
        key = shape.config.pipeline, shape.config.recompute, shape.pipeline.devices, shape.pipeline.splits, block.asked.blocks
        if key not in made:
            made[key] = _solver(pricing, shape.config, shape.pipeline, shape.annotations, cuts, block.asked)
        solvers.append(made[key])
    found = [block.placements(*_demand(solver.pipeline, solver)) for block, solver in zip(blocks, solvers, strict=True)]
    candidates = [_together([own[min(index, len(own) - 1)] for own in found], idle) for index in range(max(map(len, found)))]

    own = {solver: _at_depth(solver, depth) for solver in made.values()}
    asked = [own[solver] for solver in solvers]
    best = _best(lambda placement, start: solve_together(placement, asked, cuts.num_rows, weights or None, start), candidates)
    return ChosenPlacement(solvers[0], *best)


def _at_depth(solver: Solver, depth: str | None) -> Solver:
    """The solver with this policy, where memory decides about recomputation."""
    if depth is None or solver.policy.kind != "auto":
        return solver
    pipeline, policy = at_depth(depth, solver.pipeline, solver.prices.graph)
    return dataclasses.replace(solver, pipeline=pipeline, policy=policy)


def _together(placed: Sequence[Placement], idle: tuple[str, ...]) -> Placement:
    """One placement from those of each replica."""
    rule = "; ".join(dict.fromkeys(own.rule for own in placed))
    return Placement(rule, tuple(replica for own in placed for replica in own.replicas), idle)


def _demand(pipeline: PipelineShape, solver: Solver) -> tuple[list[float], list[float] | None]:
    """Per rank, what one of its devices holds and computes; before the stages are cut, micro-batches in flight, and None."""
    ranks = range(pipeline.num_ranks)
    if solver.fixed is None:
        return [float(sum(pipeline.in_flight[stage] for stage in pipeline.stages_of(rank))) for rank in ranks], None
    rows = solver.num_rows / pipeline.num_micro_batch
    memory, work = [], []
    for rank, width in enumerate(pipeline.devices):
        parts = [(stage, solver.fixed.parts[stage]) for stage in pipeline.stages_of(rank)]
        held = (solver.prices.part(part, rows / width, budget=solver.pricing.budget).held(pipeline.alive(stage)) for stage, part in parts)
        memory.append(sum(line.at(rows / width) for line in held))
        ops = [solver.prices.graph.by_name[name] for _, part in parts for name in part.ops]
        work.append(sum(op.forward_flops + op.backward_flops for op in ops) / width)
    return memory, work


def _choose_as_needed(solver: Solver, pool: DevicePool, *, prefers_intra_node: bool, depth: str | None) -> ChosenPlacement:
    """The best placement; `depth` as of `PlannedAt`."""
    own = _at_depth(solver, depth)
    keeps_all = own.policy is KEEP_ALL and own is not solver and not any(own.pipeline.recomputed)
    solve = own.solve_if_it_may_fit if keeps_all else own.solve
    best, others = _choose(own, solve, pool, prefers_intra_node=prefers_intra_node)
    return ChosenPlacement(solver, best, others)


def _choose(solver: Solver, solve: Solve, pool: DevicePool, *, prefers_intra_node: bool) -> tuple[PricedPlacement, dict[str, str]]:
    """The fastest placement of replicas grouped as preferred; grouped the other way where only that fits."""
    memory, work = _demand(solver.pipeline, solver)
    preferred = pool.placements(solver.pipeline, memory, work, prefer_intra_node=prefers_intra_node)
    other = pool.placements(solver.pipeline, memory, work, prefer_intra_node=not prefers_intra_node)
    try:
        best, remarks = _best(solve, preferred)
    except MemoryShortage as error:
        try:
            best, remarks = _best(solve, other)
        except MemoryShortage:
            raise error from None
        return best, remarks | {f"replicas grouped by {_grouping(prefers_intra_node)}": error.message}
    groups = [{frozenset(device for rank in placed for device in rank) for placed in each.replicas} for each in (best.placement, other[0])]
    if groups[0] != groups[1]:
        remarks[f"replicas grouped by {_grouping(not prefers_intra_node)}"] = _price(solve, other[0])
    return best, remarks


def _grouping(prefers_intra_node: bool) -> str:
    setting = "true" if prefers_intra_node else "false"
    return f"{'host' if prefers_intra_node else 'device type'} (with cluster.device_place_prefer_intra_node: {setting})"


def _price(solve: Solve, placement: Placement) -> str:
    try:
        return format_seconds(solve(placement, None).step_seconds)
    except WhaleError as error:
        return error.message


def _best(solve: Solve, candidates: Sequence[Placement]) -> tuple[PricedPlacement, dict[str, str]]:
    """The placement with the fastest step, and remarks on the others; each starts with the rows of the one before."""
    solutions: list[PricedPlacement] = []
    remarks: dict[str, str] = {}
    first_error: MemoryShortage | None = None
    for candidate in candidates:
        try:
            solutions.append(solve(candidate, solutions[-1] if solutions else None))
            remarks[candidate.rule] = format_seconds(solutions[-1].step_seconds)
        except MemoryShortage as error:
            first_error = first_error or error
            remarks[candidate.rule] = error.message
    if not solutions:
        assert first_error is not None
        raise first_error
    best = min(solutions, key=lambda solution: solution.step_seconds)
    del remarks[best.placement.rule]
    return best, remarks


def estimated_plan(annotations: Sequence[Annotations | None], chosen: ChosenPlacement, *, gather_rows: bool) -> EstimatedPlan:
    """The plan of a placement, estimated but not explained; `annotations` are those of each replica.

    Raises:
        PlanError: it does not fit in memory, or a tensor cannot be sent.
    """
    prices, best = chosen.solver.prices, chosen.best
    names = [
        [("model",) if own is None else own.names_of(stage) for stage in range(model.pipeline.num_stages)]
        for model, own in zip(best.replicas, annotations, strict=True)
    ]
    replicas = make_replicas(prices, best.replicas, names, best.rows)
    borders: tuple[Choice, ...] = ()
    if any(model.pipeline.splits for model in best.replicas):
        replicas, borders = scatter_all(replicas, prices)
    estimated = partial(_estimated, annotations[0], chosen)
    if not needs_joining(replicas, prices):
        return estimated(replicas, borders)
    alike = with_one_program(replicas)
    reason = why_not_joined(alike) if gather_rows else "communication.gather_rows is false"
    if not reason:
        try:
            return estimated(join_replicas(alike, prices), borders, joined=alike)
        except PlanError as error:  # what is gathered may not fit in memory
            reason = error.message
    return estimated(replicas, borders, not_joined=(explain_not_joined(reason),))


def _estimated(
    annotations: Annotations | None,
    chosen: ChosenPlacement,
    replicas: tuple[Replica, ...],
    borders: tuple[Choice, ...],
    *,
    joined: tuple[Replica, ...] = (),
    not_joined: tuple[Choice, ...] = (),
) -> EstimatedPlan:
    prices, best = chosen.solver.prices, chosen.best
    graphs = task_graphs(prices.graph, annotations, best.replicas[0].assignment.stage_of)
    plan = bare_plan(prices, replicas, graphs, chosen.solver.num_rows, best.placement.idle)
    raise_faults(crossing_faults(prices.graph, replicas, dict(plan.batch_axes)))
    plan, step = with_estimate(plan, prices)
    refuse_overfull(step, prices.cluster)
    return EstimatedPlan(annotations, chosen, plan, step, borders, joined, not_joined)


@dataclasses.dataclass(frozen=True)
class EstimatedPlan:
    """A plan without reasons."""

    annotations: Annotations | None  # the scopes of its first replica
    chosen: ChosenPlacement  # its placement
    plan: Plan  # with the figures of its estimate
    step: StepEstimate  # the estimate
    borders: tuple[Choice, ...]  # choices about what crosses stages
    joined: tuple[Replica, ...]  # the separate replicas that were joined; empty where none were
    not_joined: tuple[Choice, ...]  # why they were not, where needed

    @property
    def is_cut_for_memory(self) -> bool:
        """Whether memory makes a split stage slower, by what it chose to cut, that computes nothing again."""
        stages = (each for model in self.chosen.best.replicas for each in zip(model.shardings, model.recomputes, strict=False))
        return any(cut is not None and cut.free_seconds < WORTH_KEEPING * cut.seconds and again == NOTHING for cut, again in stages)

    def finished(self) -> tuple[Plan, StepEstimate]:
        """The plan with its choices, verified, and the estimate of its step."""
        plan, prices = self.plan, self.chosen.solver.prices
        choices = explain_choices(self.annotations, self.chosen, self.joined or plan.replicas)
        joining = explain_joining(self.joined, plan, prices) if self.joined else ()
        mixed = mixed_apart(plan, prices.graph, prices.axes) if keeps_apart(plan) else ()
        types = (explain_half_types(plan),) if plan.half_types else ()
        rows = (*types, *joining, *self.not_joined, *self.borders, *explain_mixing(mixed))
        plan = dataclasses.replace(plan, choices=(*choices, *rows, *plan.choices, *explain_step(self.step)))
        axes = prices.axes if needs_axes(plan) else None
        verify(plan, prices.graph, prices.cluster, axes, costs=prices.costs, step=self.step)
        return plan, self.step


@dataclasses.dataclass(frozen=True)
class StatedPlan:
    """A plan that is written down in full, verified, with its estimate."""

    plan: Plan
    step: StepEstimate
    not_joined: tuple[Choice, ...] = ()  # as of `EstimatedPlan`

    def finished(self) -> tuple[Plan, StepEstimate]:
        return self.plan, self.step
