"""Which whole parameters of split stages have partial gradients, on any rank's stages: all ranks plan the same buckets."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from whale.axes import Axes
from whale.ir.graph import ModelGraph
from whale.ir.layout import BATCH
from whale.ir.plan import Plan
from whale.runtime.cutting import lower_cuts
from whale.runtime.holdings import Partial
from whale.runtime.shared_gradient import shared_parameters
from whale.runtime.stage_source import StageSource


def partial_parameters(plan: Plan, model: ModelGraph, graph: fx.Graph, axes: Axes | None) -> Partial:
    """Per (replica, stage), the whole parameters whose gradients are to be added over each split group.

    Args:
        plan: the plan.
        model: the captured model.
        graph: its program.
        axes: of the model; None where no stage is cut.
    """
    found: dict[tuple[int, int], frozenset[str]] = {}
    for replica in plan.replicas:
        for stage in replica.stages:
            if stage.cuts:
                assert axes is not None
                plain = replace(stage, recompute=())
                source = StageSource(model, lambda _: graph, replica, plain, set(), torch.device("cpu"), False)
                rows = model.num_rows if any(cut.axis == BATCH for cut in stage.cuts) else 0
                program = lower_cuts(source(model.num_rows).module.graph, model, axes, stage.cuts, 0, num_rows=rows)
                found[replica.index, stage.index] = program.partial | shared_parameters(replica, stage)
    return found
