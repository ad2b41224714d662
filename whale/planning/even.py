"""What equal shares would cost on the same devices: equal rows, equal parts of cuts, equally many blocks per stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from whale.config import Config, ReplicaBlock
from whale.errors import WhaleError
from whale.estimate import Costs, estimate
from whale.ir.blocks import find_repeated_blocks
from whale.ir.cluster import Cluster
from whale.ir.division import divide_evenly
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Plan, Replica, Stage
from whale.planning.plan import plan_and_estimate
from whale.planning.verify.verify import memory_faults


@dataclass(frozen=True)
class EvenShares:
    """A plan with equal shares, beside the one that it is made of.

    Attributes:
        step_seconds: of its step; None where there is none, because its stages do not fit in memory.
        reason: why it would not run; "" where it would.
    """

    step_seconds: float | None
    reason: str = ""


def even_shares(plan: Plan, graph: ModelGraph, cluster: Cluster, config: Config) -> EvenShares:
    """What a plan would cost if its replicas took equal rows, the devices of a stage equal parts, and its stages equally many blocks.

    Stages that the model's scopes say, or whose rows were gathered, stay as they are, and so do those of a model without repeated blocks.

    Args:
        plan: of the graph on the cluster.
        config: that it was made with.
    """
    if _may_move(plan, graph):
        asked = config.with_values({"replicas": tuple(_block(replica, config) for replica in plan.replicas)})
        try:
            plan, _ = plan_and_estimate(graph, cluster, asked, rows=plan.planned_rows)
        except WhaleError as error:
            return EvenShares(None, error.message)
    even = replace(plan, replicas=tuple(_with_equal_rows(replica) for replica in plan.replicas))
    step = estimate(even, graph, cluster, Costs.for_model(config, graph, cluster))
    return EvenShares(step.step_seconds, "; ".join(fault.message for fault in memory_faults(step, cluster)))


def _may_move(plan: Plan, graph: ModelGraph) -> bool:
    """Whether stages can have equally many blocks: nobody says them, and there are blocks to count."""
    has_scopes = any(op.scope for op in graph.ops)
    is_joined = any(stage.row_shard for replica in plan.replicas for stage in replica.stages)
    has_stages = any(len(replica.stages) > 1 for replica in plan.replicas)
    return has_stages and not has_scopes and not is_joined and find_repeated_blocks(graph) is not None


def _block(replica: Replica, config: Config) -> ReplicaBlock:
    """A replica on its devices with its pipeline and the axes that the user had it cut, and equally many blocks in each stage."""
    pipeline, policy = replica.pipeline, config.recompute.policy
    said = ((name, getattr(pipeline, name)) for name in ("schedule", "num_micro_batch", "num_chunks", "group_size"))
    first = [replica.stages[pipeline.stage_rank.index(rank)] for rank in range(pipeline.num_ranks)]
    if pipeline.recomputed_stages:
        policy = tuple((stage.index, _recomputed(replica, stage)) for stage in replica.stages)
    elif policy == "none" and any(stage.recomputed for stage in replica.stages):
        policy = "auto"
    said_axes = any(block.axes is not None for block in config.replicas)
    cut = dict.fromkeys(shard.axis for stage in replica.stages for shard in stage.shards if said_axes and shard.axis != BATCH)
    return ReplicaBlock(
        devices=tuple(stage.virtual_device.devices for stage in first),
        split=first[0].split if first[0].split > 1 else None,
        rows=1,
        axes=tuple(cut) or None,
        pipeline=(*((name, value) for name, value in said if value is not None), ("num_stages", pipeline.num_ranks)),
        blocks="even",
        recompute=policy,
    )


def _recomputed(replica: Replica, stage: Stage) -> str:
    """What a stage computes again, in a word."""
    if stage.index in replica.pipeline.recomputed_stages:
        return "full"
    return "blocks" if stage.recomputed else "none"


def _with_equal_rows(replica: Replica) -> Replica:
    return replace(replica, share=1, stages=tuple(map(_with_equal_parts, replica.stages)))


def _with_equal_parts(stage: Stage) -> Stage:
    shards = (replace(shard, sizes=divide_evenly(sum(shard.sizes), len(shard.sizes))) for shard in stage.shards)
    return replace(stage, shares=(1,) * len(stage.shares), shards=tuple(shards))
