"""Prices one placement: cuts the stages and divides the rows in turn, until neither changes the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from whale.errors import BatchError, first_few
from whale.estimate import Line
from whale.estimate.prices.budget import ALL, Budget
from whale.estimate.prices.prices import Prices
from whale.ir.division import divide
from whale.planning.cutting.partition import Partition, cut_into_stages, wishes_of
from whale.planning.cutting.pieces import Pieces
from whale.planning.cutting.stage_tables import StageTables
from whale.planning.pipeline.balance import Curve, MemoryShortage, divide_units, shortage
from whale.planning.pipeline.cut_points import CutPoints
from whale.planning.pipeline.placement import Likeness, Placement, likeness_of
from whale.planning.pipeline.recompute import KEEP_ALL, Chooser, Policy
from whale.planning.pipeline.scheduling import PipelineShape
from whale.planning.replicas.end_of_step import EndOfStep, end_of_step, handled_sums
from whale.planning.replicas.replica import ReplicaModel, model_replica
from whale.planning.shard.stage_price import StagePricing
from whale.planning.strategy import Placed
from whale.planning.structure.stages import Assignment, assign
from whale.units import counted, format_bytes

SLACK = 1.01  # tolerance of the bound: parts of a split are rounded to whole units; 1.005 or 1.02: none of 8 plans differs


def most_rows(prices: Prices, pipeline: PipelineShape, placed: Placed, budget: Budget = ALL) -> int:
    """An upper bound of the rows of a step that a replica can hold without recomputation, however it is cut.

    Every parameter, and what every op keeps for backward, is held at least once; each kept byte of a rank exists once per
    micro-batch in flight. Gradients arrive as activations go and are not counted. With parameters where most is in flight,
    most is left for activations:

        sum over ranks of (memory - parameters there) / in flight  >=  bytes kept per row x rows of a micro-batch
    """
    held_bytes = (prices.held(own.name, budget) for own in prices.graph.parameters)
    parameters = sum(own.compute + own.optimizer for own in held_bytes)
    in_flight = [min(pipeline.in_flight[stage] for stage in pipeline.stages_of(rank)) for rank in range(pipeline.num_ranks)]
    room = 0.0
    for rank in sorted(range(pipeline.num_ranks), key=lambda rank: -in_flight[rank]):
        memory = sum(prices.capacity(name, budget) for name in placed[rank])
        held = min(memory, parameters)
        parameters -= held
        room += (memory - held) / in_flight[rank]
    if parameters > 0:
        return 0
    kept = Line(*prices.kept_by_maker.sum(axis=1))
    if kept.per_row <= 0:
        return int(1e18)
    return pipeline.num_micro_batch * max(0, int(SLACK * (room - kept.fixed) / kept.per_row))


MAX_ROUNDS = 5  # of cuts and rows in turn; 3 or 10: none of 8 plans differs

ROWS_TOLERANCE = 0.02  # relative change of rows that leaves the cuts as they are; halved or doubled: none of 8 plans differs

MARGIN_STEP = 0.93
"""Factor of the memory planned for after each round in which a cut does not fit; halved: no step of the questions of
examples/benchmarks/constants.py differs, with 2 % fewer estimates.
"""


@dataclass(frozen=True)
class PricedPlacement:
    """A priced placement."""

    placement: Placement
    replicas: tuple[ReplicaModel, ...]  # their models
    rows: tuple[int, ...]  # of a step, per replica
    end: EndOfStep  # what follows the last backward pass
    step_seconds: float  # predicted
    partitions: tuple[Partition | None, ...]  # per replica its cut; None where scopes fix it


def _nearest_rows(num_rows: int, curves: Sequence[Curve]) -> tuple[int, ...]:
    """The division of the rows of a micro-batch that fits, or comes nearest."""
    try:
        return divide_units(num_rows, curves)
    except MemoryShortage as error:
        return error.sizes


@dataclass(eq=False)
class Solver:
    """Prices placements of one graph in one pipeline shape; equal replicas are solved once."""

    pricing: StagePricing
    pipeline: PipelineShape
    num_rows: int
    points: CutPoints | None = None  # where the graph may be cut; None with `fixed`
    pieces: Pieces | None = None  # costs of its pieces; None with `fixed`
    fixed: Assignment | None = None  # an assignment by scopes
    policy: Policy = KEEP_ALL  # what recomputes inside stages
    _looks: dict[Placed, Likeness] = field(default_factory=dict, init=False)
    _cuts: dict[tuple[Likeness, int, float], Partition] = field(default_factory=dict, init=False)
    _assignments: dict[tuple[int, ...], Assignment] = field(default_factory=dict, init=False)
    _models: dict[tuple[Likeness, tuple[int, ...] | None, int, float], ReplicaModel] = field(default_factory=dict, init=False)

    @cached_property
    def tables(self) -> StageTables:
        assert self.points is not None and self.pieces is not None, "the stages are still to be cut"
        return StageTables(self.points, self.pieces, self.prices, self.pipeline, self.policy, self.pricing.budget)

    @property
    def prices(self) -> Prices:
        return self.pricing.prices

    def solve(self, placement: Placement, start: PricedPlacement | None = None) -> PricedPlacement:
        """`solve_together` with this pipeline shape for every replica."""
        return solve_together(placement, [self] * len(placement.replicas), self.num_rows, start=start)

    def solve_if_it_may_fit(self, placement: Placement, start: PricedPlacement | None = None) -> PricedPlacement:
        """`solve` without recomputation; raises MemoryShortage at once where `check_room` does."""
        check_room(placement, [self] * len(placement.replicas), self.num_rows)
        return self.solve(placement, start)

    def model(self, placed: Placed, share: int, margin: float, keeping: float) -> tuple[ReplicaModel, Partition | None]:
        """A replica with its cut.

        Args:
            share: its rows of a step.
            margin: share of the devices' memory that stages are cut for.
            keeping: share of it that recomputation may leave filled; 0 recomputes all that can be.
        """
        largest = max(1, -(-share // self.pipeline.num_micro_batch))
        partition = None if self.points is None else self.cut(placed, largest, margin)
        assignment = self.fixed if partition is None else self._assignment(partition)
        assert assignment is not None
        key = (self.likeness(placed), partition.bounds if partition else None, largest, keeping)
        if key not in self._models:
            chooser = Chooser(self.prices, self.pipeline, self.policy, partial(self.pricing.parts, self.pipeline), self.pricing.budget)
            recomputes = chooser.choose(placed, assignment, largest, keeping)
            pipeline = self.pipeline
            if self.policy.kind == "auto" and pipeline.recomputes_by_itself:
                pipeline = pipeline.recomputing([stage for stage, own in enumerate(recomputes) if own.num_alive])
            self._models[key] = model_replica(self.pricing, pipeline, placed, assignment, recomputes, self.num_rows, largest)
        return dataclasses.replace(self._models[key], placed=placed, assignment=assignment), partition

    def cut(self, placed: Placed, num_rows: int, margin: float = 1.0) -> Partition:
        """The cut of a replica; `num_rows` of a micro-batch, `margin` the share of memory that stages are cut for."""
        key = (self.likeness(placed), num_rows, margin)
        if key not in self._cuts:
            self._cuts[key] = cut_into_stages(self.tables, placed, num_rows, margin, key[0])
        return self._cuts[key]

    def freely(self, placed: Placed, num_rows: int) -> Curve:
        """The curve of a replica with unlimited memory if the model could be cut anywhere, exact about `num_rows` of a step."""
        assert self.pieces is not None, "the stages are still to be cut"
        m = self.pipeline.num_micro_batch
        rows, speeds = np.arange(self.num_rows + 1) / m, np.zeros(self.num_rows + 1)
        for rank, names in enumerate(placed):
            kind, width = self.prices.kinds[names[0]], self.pipeline.width(self.pipeline.stages_of(rank)[0])
            parts = width if self.pieces.can_split(kind, width) else 1
            sums = self.pieces.sums(kind, parts, max(1.0, num_rows / m))
            fixed, per_row = (sums.forward + sums.backward)[:, -1]
            speeds += len(names) / parts / np.maximum(fixed + per_row * rows, sums.started_forward[-1] + sums.started_backward[-1])
        return Curve((m + len(placed) - 1) / speeds, np.zeros(self.num_rows + 1), m)

    def _assignment(self, partition: Partition) -> Assignment:
        if partition.bounds not in self._assignments:
            assert self.points is not None
            wishes = wishes_of(self.points, partition)
            self._assignments[partition.bounds], _ = assign(self.prices.graph, self.points.structure, wishes, self.pipeline.num_stages)
        return self._assignments[partition.bounds]

    def likeness(self, placed: Placed) -> Likeness:
        """Equal for replicas that take equally long."""
        known = self._looks if self.pieces is None else self.pieces.looks
        if placed not in known:
            known[placed] = likeness_of(placed, self.prices.cluster)
        return known[placed]


def check_room(placement: Placement, solvers: Sequence[Solver], num_rows: int) -> None:
    """Raises MemoryShortage where, by `most_rows`, the rows surely do not fit without recomputation."""
    known: dict[tuple[Solver, tuple[int, ...]], int] = {}
    most = 0
    for solver, placed in zip(solvers, placement.replicas, strict=True):
        assert solver.policy is KEEP_ALL, "the bound holds where nothing is recomputed"
        key = solver, tuple(sum(map(solver.pricing.capacity, names)) for names in placed)
        if key not in known:
            known[key] = most_rows(solver.prices, solver.pipeline, placed, solver.pricing.budget)
        most += known[key]
    if most < num_rows:
        raise shortage(f"out of memory: without recomputation {most} rows fit at most, the batch has {num_rows}", 0, ())


def solve_together(
    placement: Placement,
    solvers: Sequence[Solver],
    num_rows: int,
    weights: Sequence[int] | None = None,
    start: PricedPlacement | None = None,
) -> PricedPlacement:
    """The best division of the rows, and with it of the ops, for a placement.

    Args:
        solvers: of each replica.
        num_rows: of the batch.
        weights: per replica its weight in the rows; None balances by time and memory.
        start: a solution whose rows are tried first if its replicas have the same devices; None: equal rows.

    Raises:
        BatchError: there are too few rows.
        MemoryShortage: nothing fits.
    """
    _check_rows(solvers, num_rows)
    rows = _first_rows(placement, solvers, num_rows, start)
    best: PricedPlacement | None = None
    lack: MemoryShortage | None = None
    margin = 1.0
    for round_number in range(1, MAX_ROUNDS + 1):
        keeping = 0.0 if best is None and round_number == MAX_ROUNDS else margin
        found = [
            solver.model(placed, share, margin, keeping) for solver, placed, share in zip(solvers, placement.replicas, rows, strict=True)
        ]
        models = tuple(model for model, _ in found)
        handled = handled_sums(solvers[0].prices, models)
        try:
            divided = _divide(num_rows, models, weights, handled)
        except MemoryShortage as error:
            recomputes = any(solver.policy.kind == "auto" for solver in solvers)
            lack = _name_shortages(solvers[0].pricing, models, error) if lack is None or recomputes else lack
            margin *= MARGIN_STEP
            if error.sizes == rows and all(solver.fixed is not None for solver in solvers) and not recomputes:
                break
            rows = error.sizes
            continue
        solution = _solution(solvers[0].pricing, placement, models, divided, tuple(partition for _, partition in found), handled)
        if best is None or solution.step_seconds < best.step_seconds:
            best = solution
        if all(abs(own - share) <= ROWS_TOLERANCE * share for own, share in zip(divided, rows, strict=True)):
            break
        rows = divided
    if best is None and start is not None:
        return solve_together(placement, solvers, num_rows, weights)
    if best is None:
        assert lack is not None
        raise lack
    return best


def _first_rows(placement: Placement, solvers: Sequence[Solver], num_rows: int, start: PricedPlacement | None) -> tuple[int, ...]:
    """Initial rows of each replica: equal, or in proportion to speed, where the model is not cut yet."""
    if start is not None:
        known = {_devices(placed): share for placed, share in zip(start.placement.replicas, start.rows, strict=True)}
        own = [_devices(placed) for placed in placement.replicas]
        if set(own) == set(known):
            return tuple(known[devices] for devices in own)
    rows = (-(-num_rows // len(placement.replicas)),) * len(placement.replicas)
    if any(solver.pieces is None for solver in solvers) or sum(solver.pipeline.num_micro_batch for solver in solvers) > num_rows:
        return rows
    for _ in range(2):  # the second time about their own rows
        known_curves: dict[tuple[Solver, Likeness, int], Curve] = {}
        curves = []
        for solver, placed, share in zip(solvers, placement.replicas, rows, strict=True):
            key = solver, solver.likeness(placed), share
            if key not in known_curves:
                known_curves[key] = solver.freely(placed, share)
            curves.append(known_curves[key])
        if len(known_curves) == 1:
            break
        rows = divide_units(num_rows, curves)
    return rows


def _devices(placed: Placed) -> frozenset[str]:
    return frozenset(device for rank in placed for device in rank)


def _check_rows(solvers: Sequence[Solver], num_rows: int) -> None:
    kinds: dict[tuple[int, int], int] = {}
    for solver in solvers:
        pipeline = solver.pipeline
        kind = pipeline.num_micro_batch, max(map(pipeline.num_groups, range(pipeline.num_stages)))
        kinds[kind] = kinds.get(kind, 0) + 1
    needed = sum(count * m * width for (m, width), count in kinds.items())
    if num_rows < needed:
        terms = [
            f"{counted(count, 'replica')} x {counted(m, 'micro-batch')}" + (f" x {width} devices of a stage" if width > 1 else "")
            for (m, width), count in kinds.items()
        ]
        raise BatchError(
            f"too few rows: the batch has {num_rows}, and {' + '.join(terms)} need {needed}",
            hint="a larger batch, fewer micro-batches (pipeline.num_micro_batch), or fewer devices",
        )


def _divide(num_rows: int, models: Sequence[ReplicaModel], weights: Sequence[int] | None, handled: Sequence[float]) -> tuple[int, ...]:
    """The rows of each replica, by time and memory or by weights; `handled` seconds of gradient sums count as work."""
    curves = [dataclasses.replace(model.curve, seconds=model.curve.seconds + own) for model, own in zip(models, handled, strict=True)]
    if weights is None:
        return divide_units(num_rows, curves)
    sizes = divide(num_rows, weights, [curve.minimum for curve in curves])
    short, place = max((float(curve.excess[size]), curve.place) for curve, size in zip(curves, sizes, strict=True))
    if short > 0:
        raise shortage(
            f"out of memory: rows divided by weight leave {place} {format_bytes(int(np.ceil(short)))} short", int(np.ceil(short)), sizes
        )
    return sizes


def _name_shortages(pricing: StagePricing, models: Sequence[ReplicaModel], error: MemoryShortage) -> MemoryShortage:
    """Adds which devices lack how much memory; equal ones are listed together."""
    lacking: dict[tuple[tuple[int, ...], int, int], list[str]] = {}
    for model, share in zip(models, error.sizes, strict=True):
        pipeline = model.pipeline
        largest = -(-share // pipeline.num_micro_batch)
        for lane, curves in model.lanes.items():
            stages = pipeline.lanes[lane]
            devices = model.placed[pipeline.stage_rank[stages[0]]]
            width = len(devices) // len(curves)
            for index, (num_rows, curve) in enumerate(zip(_nearest_rows(largest, curves), curves, strict=True)):
                short = int(np.ceil(curve.excess[num_rows]))
                if short > 0:
                    name = devices[index] if width == 1 else curve.place.partition(" ")[0]
                    lacking.setdefault((stages, num_rows, short), []).append(name)
    lines = []
    for (stages, num_rows, short), names in lacking.items():
        has = pricing.capacity(names[0])
        place = f"stage {', '.join(map(str, stages))} on {first_few(names, 2)}"
        lines.append(
            f"{place} needs {format_bytes(has + short)} for {counted(num_rows, 'row')}, {format_bytes(has)} usable: "
            f"{format_bytes(short)} ({short} bytes) short"
        )
    return shortage("out of memory: " + "; ".join(lines), error.num_bytes, error.sizes) if lines else error


def _solution(
    pricing: StagePricing,
    placement: Placement,
    models: tuple[ReplicaModel, ...],
    rows: tuple[int, ...],
    partitions: tuple[Partition | None, ...],
    handled: Sequence[float],
) -> PricedPlacement:
    end = end_of_step(pricing.prices, pricing.budget, models, rows, max(handled))
    slowest = max(float(model.curve.seconds[share]) + own for model, share, own in zip(models, rows, handled, strict=True))
    return PricedPlacement(placement, models, rows, end, slowest + end.exposed + end.optimizer, partitions)
