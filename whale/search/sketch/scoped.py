"""What a step roughly takes where scopes say which ops each rank of a replica has, in closed form.

Let T_r be the time in which a device would do alone, for all rows of the batch, what rank r of a replica does. The devices of a rank
share that, so a rank for whose devices 1 / T_r comes to R_r takes 1 / R_r for all rows:

    a replica with all rows     1 / R_r + f (1 / R_1 + ... + 1 / R_r-1) / m      of the rank r where that is most
    a step                      1 / (the sum of 1 / these over the replicas), for they divide the rows

where f is 1 if each rank waits for those before it. What crosses, and what is summed, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from whale.config import Config
from whale.estimate.costs.op_table import Floats
from whale.ir.cluster import Device
from whale.planning.annotations.taskgraphs import assign_by_scopes, read_scopes
from whale.planning.pipeline.placement import Placed
from whale.planning.pipeline.scheduling import PipelineShape, shape_pipeline
from whale.planning.structure.stages import Assignment
from whale.search.arrangement import Order
from whale.search.sketch.sketch import Sketches
from whale.search.space.ways import Way


@dataclass(frozen=True)
class Scoped:
    """What the scopes make of so many devices.

    Attributes:
        pipeline: of a replica; its micro-batches are not to be read.
        counts: per rank, how many ops of each column it has.
    """

    pipeline: PipelineShape
    counts: tuple[Floats, ...]


@dataclass(eq=False)
class ScopedSketches:
    """Rough times of the ways of one model on one cluster.

    Args:
        sketches: of any division of the model.
        config: settings.
    """

    sketches: Sketches
    config: Config
    _scoped: dict[tuple[int, Order | None], Scoped] = field(default_factory=dict, init=False)
    _speeds: dict[tuple[int, Order | None, int, Device, int], float] = field(default_factory=dict, init=False)

    def scoped(self, way: Way) -> Scoped:
        """What the scopes make of the devices of a way."""
        key = len(way.devices), way.order
        if key not in self._scoped:
            self._scoped[key] = self._read(way)
        return self._scoped[key]

    def seconds(self, way: Way, placed: Sequence[Placed]) -> float:
        """Seconds that a step roughly takes on these devices of each rank of each replica."""
        return 1 / sum(1 / self._with_all_rows(way, replica) for replica in placed)

    def _with_all_rows(self, way: Way, placed: Placed) -> float:
        fills, before, longest = way.order is not None and way.order.fills, 0.0, 0.0
        for rank, names in enumerate(placed):
            seconds = 1 / sum(self._speed(way, rank, self.sketches.prices.cluster.by_name[name].kind) for name in names)
            longest = max(longest, seconds + fills * before / way.num_micro_batch)
            before += seconds
        return longest

    def _speed(self, way: Way, rank: int, kind: Device) -> float:
        """Of what a rank does for all rows, how much a device does in a second."""
        key = len(way.devices), way.order, way.num_micro_batch, kind, rank
        if key not in self._speeds:
            m, counts = way.num_micro_batch, self.scoped(way).counts[rank]
            times = self.sketches.pieces.columns.seconds(kind, self.sketches.num_rows / m)
            self._speeds[key] = 1 / max(m * float((times.forward + times.backward) @ counts), 1e-30)
        return self._speeds[key]

    def _read(self, way: Way) -> Scoped:
        graph = self.sketches.prices.graph
        config, num_devices = way.settings(self.config), len(way.devices)
        annotations = read_scopes(graph, config, num_devices)
        assert annotations is not None, "replicas that are written down have no ways to sketch"
        pipeline = shape_pipeline(config, annotations, num_devices)
        assignment, _ = assign_by_scopes(graph, annotations)
        return Scoped(pipeline, tuple(self._counts(pipeline, assignment)))

    def _counts(self, pipeline: PipelineShape, assignment: Assignment) -> Iterable[Floats]:
        """Per rank its ops, by column."""
        columns = self.sketches.pieces.columns
        column_of = dict(zip(columns.names, columns.of.tolist(), strict=True))
        for rank in range(pipeline.num_ranks):
            stages = pipeline.stages_of(rank)
            own = [column_of[name] for name, stage in assignment.stage_of.items() if stage in stages and name in column_of]
            yield np.bincount(own, minlength=len(columns.counts)).astype(np.float64)
