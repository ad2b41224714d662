"""What no plan can beat where scopes say which ops each rank of a replica has, in closed form.

Let T_r be the time in which a device would do alone, for all rows of the batch, what rank r of a replica does. The devices of a rank
share that, so a rank for whose devices 1 / T_r comes to R takes 1 / R for all rows at least:

    a replica with all rows     a + w, of the rank r where that is most    a = 1 / R_r,  w = f x (1 / R_1 + ... + 1 / R_r-1) / m
    a step                      1 / (the sum of 1 / these over the replicas), for they divide the rows

where f is 1 if each rank waits for those before it, as in `whale.search.bounds.bounds`. Where it is not said which devices a rank
has, it has the fastest.

It waits for a micro-batch that may have the fewest rows, of n rows of a replica floor(n / m). With N rows in all that makes of w:

    one replica      w x floor(N / m) / (N / m)
    several          w x the least of floor(n / m) / (n / m), which is that of n = 2m - 1 where a replica may have so many;
                     or w less m - 1 rows of it, for floor(n / m) >= (n - m + 1) / m, whichever says more
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from whale.config import Config
from whale.estimate.costs.op_table import Floats
from whale.ir.cluster import Device
from whale.ir.graph import ModelGraph
from whale.planning.annotations.taskgraphs import assign_by_scopes, read_scopes
from whale.planning.pipeline.placement import Placed
from whale.planning.pipeline.scheduling import PipelineShape, shape_pipeline
from whale.planning.structure.stages import Assignment
from whale.search.arrangement import Group, Order, Team
from whale.search.bounds.bounds import Bounds
from whale.search.space.ways import Way


@dataclass(frozen=True)
class Scoped:
    """What the scopes make of so many devices.

    Attributes:
        pipeline: of a replica; its micro-batches are not to be read.
        counts: per rank, how many ops of each column it has.
        is_chain: whether each rank has one stage, which waits for values of the one before, and that one for gradients.
    """

    pipeline: PipelineShape
    counts: tuple[Floats, ...]
    is_chain: bool


@dataclass(eq=False)
class ScopedBounds:
    """Bounds of the ways of one model on one cluster.

    Args:
        bounds: of any division of the model.
        config: settings.
    """

    bounds: Bounds
    config: Config
    _scoped: dict[tuple[int, Order | None], Scoped] = field(default_factory=dict, init=False)
    _alone: dict[tuple[int, Order | None, int, Device, int], float] = field(default_factory=dict, init=False)
    _whole: dict[tuple[tuple[Device, ...], int], float] = field(default_factory=dict, init=False)

    def scoped(self, way: Way) -> Scoped:
        """What the scopes make of the devices of a way."""
        key = len(way.devices), way.order
        if key not in self._scoped:
            self._scoped[key] = self._read(way)
        return self._scoped[key]

    def of_any(self, way: Way, num_micro_batch: int) -> float:
        """Seconds that a step takes at least however the devices of a way divide the model.

        Args:
            num_micro_batch: the fewest of any replica.
        """
        key = tuple(self._kinds(way.devices)), num_micro_batch
        if key not in self._whole:
            team = Team(tuple(map(Group, key[0])), 1)
            self._whole[key] = self.bounds.of_lineups([((team,), num_micro_batch)])[0]
        return self._whole[key]

    def of(self, way: Way) -> float:
        """Seconds that a step takes at least, whichever of its devices a rank has."""
        pipeline = self.scoped(way).pipeline
        count, kinds = len(way.devices) // pipeline.num_devices, list(self._kinds(way.devices))
        found = [self.of_any(way, way.num_micro_batch)]
        for rank, width in enumerate(pipeline.devices):
            speeds = sorted((self._speed(way, rank, kind) for kind in kinds), reverse=True)
            found.append(1 / sum(speeds[: count * width]))
        return max(found)

    def of_placed(self, way: Way, placed: Sequence[Placed]) -> float:
        """Seconds that a step takes at least on these devices of each rank of each replica."""
        m, num_rows = way.num_micro_batch, self.bounds.num_rows
        ranks = [tuple(self._ranks(way, replica)) for replica in placed]
        most = num_rows if len(placed) == 1 else min(2 * m - 1, max(m, num_rows - m * (len(placed) - 1)))
        fewest = most // m * m / most
        found = 1 / sum(1 / max(own + fewest * waiting for own, waiting in each) for each in ranks)
        if len(placed) == 1:
            return found
        longest = [max(each, key=sum) for each in ranks]
        taken_off = (m - 1) / num_rows * sum(waiting / (own + waiting) for own, waiting in longest)
        return max(found, (1 - taken_off) / sum(1 / (own + waiting) for own, waiting in longest))

    def _ranks(self, way: Way, placed: Placed) -> Iterable[tuple[float, float]]:
        """Of each rank of a replica that had all rows, seconds of computing, and of waiting for micro-batches of the mean rows."""
        own, before = self.scoped(way), 0.0
        fill = own.is_chain and way.order is not None and way.order.fills
        for rank, names in enumerate(placed):
            seconds = 1 / sum(self._speed(way, rank, kind) for kind in self._kinds(names))
            yield seconds, fill * before / way.num_micro_batch
            before += seconds

    def _kinds(self, names: Iterable[str]) -> Iterable[Device]:
        return (self.bounds.prices.cluster.by_name[name].kind for name in names)

    def _speed(self, way: Way, rank: int, kind: Device) -> float:
        """Of what a rank does for all rows, how much a device does in a second."""
        key = len(way.devices), way.order, way.num_micro_batch, kind, rank
        if key not in self._alone:
            m, counts = way.num_micro_batch, self.scoped(way).counts[rank]
            times = self.bounds.columns.seconds(kind, self.bounds.num_rows / m)
            seconds = m * float((times.forward + times.backward) @ counts)
            self._alone[key] = 1 / max(seconds, 1e-30)
        return self._alone[key]

    def _read(self, way: Way) -> Scoped:
        graph = self.bounds.prices.graph
        config, num_devices = way.settings(self.config), len(way.devices)
        annotations = read_scopes(graph, config, num_devices)
        assert annotations is not None, "replicas that are written down have no ways to bound"
        pipeline = shape_pipeline(config, annotations, num_devices)
        assignment, _ = assign_by_scopes(graph, annotations)
        return Scoped(pipeline, tuple(self._counts(pipeline, assignment)), _is_chain(graph, pipeline, assignment))

    def _counts(self, pipeline: PipelineShape, assignment: Assignment) -> Iterable[Floats]:
        """Per rank its ops, by column."""
        columns = self.bounds.columns
        column_of = dict(zip(columns.names, columns.of.tolist(), strict=True))
        for rank in range(pipeline.num_ranks):
            stages = pipeline.stages_of(rank)
            own = [column_of[name] for name, stage in assignment.stage_of.items() if stage in stages and name in column_of]
            yield np.bincount(own, minlength=len(columns.counts)).astype(np.float64)


def _is_chain(graph: ModelGraph, pipeline: PipelineShape, assignment: Assignment) -> bool:
    """Whether ranks have one stage each, and something with a gradient goes from each to the next."""
    if pipeline.num_stages > pipeline.num_ranks:
        return False
    for stage, part in enumerate(assignment.parts[1:]):
        if not any(graph.by_name[name].requires_grad or graph.mode != "train" for name in part.received_from(stage)):
            return False
    return True
