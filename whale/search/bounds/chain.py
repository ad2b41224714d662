"""Which ops later ones do not wait for: a stage of such ops alone is one that the ranks behind it do not wait for either.

x -> a -> b -> sum       all that follows a, b or the sum comes from it: whatever the cut, each stage waits for the one before
y -> c -> d ---^         c and d come from neither a nor b: a stage with a and b alone computes beside one with c and d
"""

from __future__ import annotations

import numpy as np

from whale.estimate.costs.op_table import Floats
from whale.ir.graph import ModelGraph
from whale.planning.pipeline.cut_points import CutPoints
from whale.search.bounds.columns import Columns


def loose_runs(graph: ModelGraph, points: CutPoints, columns: Columns) -> Floats:
    """The runs of consecutive ops for which not all later ops wait: ``[runs, columns]``, how many of each column are in it.

    All later ops wait for an op if each of them reads something from it on: that comes from it in turn. In training both ways count, so
    only what has a gradient is something.
    """
    position = {name: index for index, name in enumerate(points.spine)}
    latest = np.full(len(points.spine) + 1, len(points.spine), dtype=np.int64)
    for name, index in position.items():
        if name not in points.floating:
            read = (graph.by_name[source] for source in graph.by_name[name].inputs if source in position and source not in points.floating)
            latest[index] = max((position[op.name] for op in read if op.requires_grad or graph.mode != "train"), default=-1)
    needed = np.minimum.accumulate(latest[::-1])[::-1][1:]  # from here on all later ops read something
    is_loose = np.arange(len(points.spine)) > needed
    is_loose &= np.array([name not in points.floating for name in points.spine], dtype=np.bool_)
    firm = np.flatnonzero(~is_loose)
    number = np.searchsorted(firm, np.arange(len(points.spine)))  # equal for those with no firm op between them
    found = np.zeros((len(firm) + 1, len(columns.counts)))
    np.add.at(found, (number[is_loose], columns.of[is_loose]), 1.0)
    result: Floats = found[found.any(axis=1)]
    return result
