"""Which whole parameters of split stages have partial gradients, on any rank's stages: all ranks plan the same buckets."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from whale.axes import Axes
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Plan
from whale.runtime.program.shard import lower_shards
from whale.runtime.program.shared_gradient import shared_parameters
from whale.runtime.program.stage_source import StageSource
from whale.runtime.state.holdings import Partial


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
            if stage.shards:
                assert axes is not None
                plain = replace(stage, recompute=())
                source = StageSource(model, lambda _: graph, replica, plain, set(), torch.device("cpu"), False)
                rows = model.num_rows if any(shard.axis == BATCH for shard in stage.shards) else 0
                program = lower_shards(source(model.num_rows).module.graph, model, axes, stage.shards, 0, num_rows=rows)
                found[replica.index, stage.index] = program.partial | shared_parameters(replica, stage)
    return found
