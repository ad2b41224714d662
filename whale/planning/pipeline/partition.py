"""Cuts a model without scopes into stages: the contiguous pieces whose slowest is fastest, within each device's memory.

    best[s][j] = min over i < j of max(best[s-1][i], cost_s(i, j))

over the units of `whale.planning.pipeline.cut_points`, where cost_s is what the piece from i to j takes on the device of stage s
for one micro-batch, with what it receives. Among the cuts with that slowest piece, the least sum of squares keeps the
other stages level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from whale.errors import ConfigError, PlanError
from whale.estimate.costs.op_table import Floats
from whale.planning.pipeline.cut_points import CutPoints
from whale.planning.pipeline.stage_tables import StageTables
from whale.planning.structure.stages import Wish


@dataclass(frozen=True)
class Partition:
    """A cut.

    Attributes:
        bounds: index into the spine where each stage starts, and the spine's length at the end.
        slowest: seconds of the slowest stage for one micro-batch.
        even: the same where each stage had equally many ops.
    """

    bounds: tuple[int, ...]
    slowest: float
    even: float


def cut_into_stages(tables: StageTables, devices: Sequence[str], num_rows: int, margin: float) -> Partition:
    """Finds the stages of one replica.

    Args:
        tables: what the pieces of the model cost as stages of a pipeline.
        devices: per rank its first device.
        num_rows: rows of a micro-batch.
        margin: share of the devices' memory that may be planned for here, where bytes are approximate.

    Raises:
        PlanError: there are fewer places to cut than stages need.
        ConfigError: likewise, with several chunks per rank.
    """
    points, pipeline = tables.points, tables.pipeline
    if points.num_units < pipeline.num_stages:
        if pipeline.num_chunks > 1:
            raise ConfigError(
                f"schedule {pipeline.schedule} with {pipeline.num_chunks} chunks on {pipeline.num_ranks} ranks needs "
                f"{pipeline.num_stages} TaskGraphs (the model can be cut into {points.num_units})",
                hint="fewer chunks (pipeline.num_chunks) or stages (pipeline.num_stages)",
            )
        raise PlanError(
            f"the model can be cut at {points.num_units - 1} places and {pipeline.num_stages} stages need {pipeline.num_stages - 1}",
            hint="fewer stages (pipeline.num_stages)",
        )
    found = [tables.of(stage, devices, num_rows, margin) for stage in range(pipeline.num_stages)]
    seconds = [np.where(excess > 0, np.inf, time) for time, excess in found]
    slowest = _least_maximum(seconds)
    if np.isinf(slowest):  # nothing fits: come as near as can be, the check of the whole plan says what is missing
        seconds = [excess for _, excess in found]
        slowest = _least_maximum(seconds)
    chosen = _least_squares(seconds, slowest)
    even = np.linspace(0, points.num_units, pipeline.num_stages + 1).round().astype(int)
    return Partition(
        bounds=tuple(int(points.bounds[index]) for index in chosen),
        slowest=max(float(found[s][0][i, j]) for s, (i, j) in enumerate(pairwise(chosen))),
        even=max(float(found[s][0][i, j]) for s, (i, j) in enumerate(pairwise(even))),
    )


def wishes_of(points: CutPoints, partition: Partition) -> dict[str, Wish]:
    """Where the ops of each piece want to run; what floats has no wish."""
    stages = np.searchsorted(partition.bounds, np.arange(len(points.spine)), side="right") - 1
    wishes = [Wish((stage,)) for stage in range(len(partition.bounds) - 1)]
    return {name: wishes[stage] for name, stage in zip(points.spine, stages, strict=True) if name not in points.floating}


def _least_maximum(tables: Sequence[Floats]) -> float:
    best = tables[0][0]
    for table in tables[1:]:
        best = np.maximum(best[:, None], table).min(axis=0)
    return float(best[-1])


def _least_squares(tables: Sequence[Floats], slowest: float) -> list[int]:
    """The bounds with the least sum of squares among those with no piece above `slowest`."""
    squares = [np.where(table <= slowest * (1 + 1e-12), table, np.inf) ** 2 for table in tables]
    best, choices = squares[0][0], []
    for table in squares[1:]:
        total = best[:, None] + table
        choices.append(total.argmin(axis=0))
        best = total[choices[-1], np.arange(len(best))]
    bounds = [len(best) - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return [0, *reversed(bounds)]
