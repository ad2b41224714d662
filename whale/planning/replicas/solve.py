"""Prices one placement: cuts the stages, gives out the rows, and repeats while the one changes the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from whale.errors import BatchError
from whale.ir.graph import ModelGraph
from whale.planning.pipeline.balance import Curve, MemoryShortage, divide_units, shortage
from whale.planning.pipeline.cut_points import CutPoints
from whale.planning.pipeline.partition import Partition, cut_into_stages, wishes_of
from whale.planning.pipeline.placement import Placed, Placement
from whale.planning.pipeline.recompute import KEEP_ALL, Chooser, Policy
from whale.planning.pipeline.scheduling import PipelineShape
from whale.planning.pricing.pricing import Pricing
from whale.planning.replicas.end_of_step import EndOfStep, end_of_step
from whale.planning.replicas.replica import ReplicaModel, model_replica
from whale.planning.structure.stages import Assignment, assign
from whale.planning.structure.structure import Structure
from whale.units import format_bytes

MAX_ROUNDS = 5
MARGIN_STEP = 0.93
"""Each round in which a cut turns out not to fit plans for this much less memory."""


@dataclass(frozen=True)
class Solution:
    """A priced placement.

    Attributes:
        placement: where.
        replicas: their models; `rows` has the rows of a step of each.
        end: what follows the last backward pass.
        step_seconds: predicted.
        partitions: per replica its cut; None where scopes say it.
        rounds: how often cut and rows were weighed against each other.
    """

    placement: Placement
    replicas: tuple[ReplicaModel, ...]
    rows: tuple[int, ...]
    end: EndOfStep
    step_seconds: float
    partitions: tuple[Partition | None, ...]
    rounds: int


def _nearest_rows(num_rows: int, curves: Sequence[Curve]) -> tuple[int, ...]:
    """The division of the rows of a micro-batch that fits, or comes nearest to it."""
    try:
        return divide_units(num_rows, curves)
    except MemoryShortage as error:
        return error.sizes


@dataclass(eq=False)
class Solver:
    """Prices placements of one graph in one pipeline shape; equal replicas are solved once.

    Args:
        points: where the graph may be cut; None where `fixed`, the assignment by scopes, says the stages.
        policy: what recomputes inside stages.
    """

    graph: ModelGraph
    structure: Structure
    pricing: Pricing
    pipeline: PipelineShape
    num_rows: int
    points: CutPoints | None = None
    fixed: Assignment | None = None
    policy: Policy = KEEP_ALL
    _cuts: dict[Hashable, Partition] = field(default_factory=dict, init=False)
    _assignments: dict[tuple[int, ...], Assignment] = field(default_factory=dict, init=False)
    _models: dict[Hashable, ReplicaModel] = field(default_factory=dict, init=False)

    def solve(self, placement: Placement) -> Solution:
        """The best division of the rows, and with it of the ops, for a placement.

        Raises:
            BatchError: there are too few rows.
            MemoryShortage: nothing fits.
        """
        num_replicas = len(placement.replicas)
        self._check_rows(num_replicas)
        rows = tuple(int(size) for size in np.full(num_replicas, -(-self.num_rows // num_replicas)))
        best: Solution | None = None
        lack: MemoryShortage | None = None
        margin = 1.0
        for round_number in range(1, MAX_ROUNDS + 1):
            is_last_resort = best is None and round_number == MAX_ROUNDS
            models, partitions = self._models_of(placement, rows, margin, keeping=0.0 if is_last_resort else margin)
            try:
                divided = divide_units(self.num_rows, [model.curve for model in models])
            except MemoryShortage as error:
                lack = self._name_shortages(models, error) if lack is None or self.policy.kind == "auto" else lack
                margin *= MARGIN_STEP
                rows = error.sizes
                if self.fixed is not None and self.policy.kind != "auto":
                    break
                continue
            found = self._solution(placement, models, divided, partitions, round_number)
            if best is None or found.step_seconds < best.step_seconds:
                best = found
            if divided == rows:
                break
            rows = divided
        if best is None:
            assert lack is not None
            raise lack
        return best

    def _check_rows(self, num_replicas: int) -> None:
        width, m = max(map(self.pipeline.num_groups, range(self.pipeline.num_stages))), self.pipeline.num_micro_batch
        if self.num_rows < num_replicas * m * width:
            per_device = f" x {width} devices of a stage" if width > 1 else ""
            raise BatchError(
                f"every device needs a row of every micro-batch: {num_replicas} replica(s) x {m} micro-batch(es){per_device} "
                f"need {num_replicas * m * width} rows (the batch has {self.num_rows})",
                hint="a larger batch, fewer micro-batches (pipeline.num_micro_batch), or fewer devices",
            )

    def _models_of(
        self, placement: Placement, rows: Sequence[int], margin: float, keeping: float
    ) -> tuple[tuple[ReplicaModel, ...], tuple[Partition | None, ...]]:
        """The replicas with these rows of a step each.

        Args:
            margin: share of the devices' memory that stages are cut for.
            keeping: share of it that recomputation leaves filled; 0 recomputes all that can be.
        """
        models, partitions = [], []
        for placed, share in zip(placement.replicas, rows, strict=True):
            largest = max(1, -(-share // self.pipeline.num_micro_batch))
            partition = self._cut(placed, largest, margin)
            assignment = self.fixed if partition is None else self._assignment(partition)
            assert assignment is not None
            key = (self._likeness(placed), id(assignment), largest, keeping)
            if key not in self._models:
                recomputes = Chooser(self.pricing, self.pipeline, self.policy).choose(placed, assignment, largest, keeping)
                self._models[key] = model_replica(self.pricing, self.pipeline, placed, assignment, recomputes, self.num_rows, largest)
            like = self._models[key]
            models.append(dataclasses.replace(like, placed=placed, assignment=assignment))
            partitions.append(partition)
        return tuple(models), tuple(partitions)

    def _cut(self, placed: Placed, num_rows: int, margin: float) -> Partition | None:
        if self.points is None:
            return None
        key = (self._likeness(placed), num_rows, margin)
        if key not in self._cuts:
            devices = [names[0] for names in placed]
            self._cuts[key] = cut_into_stages(self.points, self.pricing, self.pipeline, self.policy, devices, num_rows, margin)
        return self._cuts[key]

    def _assignment(self, partition: Partition) -> Assignment:
        if partition.bounds not in self._assignments:
            assert self.points is not None
            wishes = wishes_of(self.points, partition)
            self._assignments[partition.bounds], _ = assign(self.graph, self.structure, wishes, self.pipeline.num_stages)
        return self._assignments[partition.bounds]

    def _likeness(self, placed: Placed) -> Hashable:
        """Equal for replicas on equal devices with equal links between them."""
        devices = [self.pricing.cluster.by_name[name] for names in placed for name in names]
        hosts = {host: self.pricing.cluster.link(a, b) for host, (a, b) in self._host_pairs(placed).items()}
        local = {host: number for number, host in enumerate(dict.fromkeys(device.host for device in devices))}
        links = tuple((local[a], local[b], link) for (a, b), link in hosts.items())
        return tuple((device.kind, local[device.host]) for device in devices), links

    def _host_pairs(self, placed: Placed) -> dict[tuple[str, str], tuple[str, str]]:
        one_of = {self.pricing.cluster.by_name[name].host: name for names in placed for name in names}
        return {(a, b): (one_of[a], one_of[b]) for a in one_of for b in one_of}

    def _name_shortages(self, models: Sequence[ReplicaModel], error: MemoryShortage) -> MemoryShortage:
        """Which devices lack memory, and how much; devices that lack the same are named together."""
        lacking: dict[tuple[int, int, int], list[str]] = {}
        for model, share in zip(models, error.sizes, strict=True):
            largest = -(-share // self.pipeline.num_micro_batch)
            for lane, curves in model.lanes.items():
                devices = model.placed[self.pipeline.stage_rank[self.pipeline.lanes[lane][0]]]
                width = len(devices) // len(curves)
                for index, (num_rows, curve) in enumerate(zip(_nearest_rows(largest, curves), curves, strict=True)):
                    short = int(np.ceil(curve.excess[num_rows]))
                    if short > 0:
                        name = devices[index] if width == 1 else curve.place.partition(" ")[0]
                        lacking.setdefault((lane, num_rows, short), []).append(name)
        lines = []
        for (lane, num_rows, short), names in lacking.items():
            has = self.pricing.capacity(names[0])
            others = f" and {len(names) - 1} like it" if len(names) > 1 else ""
            stages = ", ".join(str(stage) for stage in self.pipeline.lanes[lane])
            lines.append(
                f"stage {stages} on {names[0]}{others} needs {format_bytes(has + short)} for {num_rows} row(s) and may use "
                f"{format_bytes(has)}: {format_bytes(short)} ({short} bytes) short"
            )
        return shortage("a plan fits in memory: " + "; ".join(lines), error.num_bytes, error.sizes) if lines else error

    def _solution(
        self,
        placement: Placement,
        models: tuple[ReplicaModel, ...],
        rows: tuple[int, ...],
        partitions: tuple[Partition | None, ...],
        round_number: int,
    ) -> Solution:
        end = end_of_step(self.pricing, self.pipeline, models, rows)
        slowest = max(float(model.curve.seconds[share]) for model, share in zip(models, rows, strict=True))
        return Solution(placement, models, rows, end, slowest + end.exposed + end.optimizer, partitions, round_number)
