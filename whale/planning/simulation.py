"""The predicted step of a plan in a few figures, and the cost of equal shares: equal rows, equal cuts, equally many blocks per stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from whale.config import Config, ReplicaBlock
from whale.errors import WhaleError
from whale.estimate import Costs, DeviceEstimate, StepEstimate, estimate, pipeline_seconds
from whale.ir.blocks import find_repeated_blocks
from whale.ir.cluster import Cluster
from whale.ir.division import divide_evenly
from whale.ir.graph import ModelGraph
from whale.ir.plan import BATCH, Plan, Replica, Stage
from whale.planning.plan import plan_and_estimate
from whale.planning.strategy import block_of
from whale.planning.verify.verify import memory_faults


@dataclass(frozen=True)
class EvenShares:
    """A plan with equal shares."""

    step_seconds: float | None  # of its step; None where its stages do not fit in memory
    reason: str = ""  # why it would not run, or ""


def even_shares(plan: Plan, graph: ModelGraph, cluster: Cluster, config: Config) -> EvenShares:
    """Cost of the plan with equal rows, equal parts, and equally many blocks per stage.

    Stages fixed by scopes, or with gathered rows, stay as they are, as do those of a model without repeated blocks.

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
    even = replace(
        plan, replicas=tuple(replace(each, share=1, stages=tuple(map(_with_equal_parts, each.stages))) for each in plan.replicas)
    )
    step = estimate(even, graph, cluster, Costs.for_model(config, graph, cluster))
    return EvenShares(step.step_seconds, "; ".join(fault.message for fault in memory_faults(step, cluster)))


def _may_move(plan: Plan, graph: ModelGraph) -> bool:
    """Whether stages can have equally many blocks: nothing fixes them, and there are blocks to count."""
    has_scopes = any(op.scope for op in graph.ops)
    is_joined = any(stage.row_shard for replica in plan.replicas for stage in replica.stages)
    has_stages = any(len(replica.stages) > 1 for replica in plan.replicas)
    return has_stages and not has_scopes and not is_joined and find_repeated_blocks(graph) is not None


def _block(replica: Replica, config: Config) -> ReplicaBlock:
    """The replica with the user's cut axes, and equally many blocks in each stage."""
    pipeline, policy = replica.pipeline, config.recompute.policy
    if pipeline.recomputed_stages:
        policy = tuple((stage.index, _recomputed(replica, stage)) for stage in replica.stages)
    elif policy == "none" and any(stage.recomputed for stage in replica.stages):
        policy = "auto"
    is_cut_by_user = any(block.axes is not None for block in config.replicas)
    cut = dict.fromkeys(shard.axis for stage in replica.stages for shard in stage.shards if is_cut_by_user and shard.axis != BATCH)
    return replace(block_of(replica), rows=1, axes=tuple(cut) or None, blocks="even", recompute=policy)


def _recomputed(replica: Replica, stage: Stage) -> str:
    if stage.index in replica.pipeline.recomputed_stages:
        return "full"
    return "blocks" if stage.recomputed else "none"


def _with_equal_parts(stage: Stage) -> Stage:
    shards = (replace(shard, sizes=divide_evenly(sum(shard.sizes), len(shard.sizes))) for shard in stage.shards)
    return replace(stage, shares=(1,) * len(stage.shares), shards=tuple(shards))


@dataclass(frozen=True)
class Simulation:
    """A plan and the estimate of its step."""

    plan: Plan  # verified
    step: StepEstimate  # its estimate
    even: EvenShares | None = None  # what equal shares would cost, if asked for

    @property
    def samples_per_second(self) -> float:
        return self.plan.planned_rows / self.step.step_seconds

    @property
    def speedup(self) -> float | None:
        """Step time with equal shares relative to this plan's; None where unknown."""
        seconds = self.even.step_seconds if self.even else None
        return None if seconds is None else seconds / self.step.step_seconds

    @cached_property
    def bounds(self) -> Mapping[str, float]:
        """Lower bounds of the step in seconds.

        ``evenly``: all computation, divided evenly among the devices in use. ``slowest``: the computation of the busiest device.
        ``schedule``: the closed form of the schedules, without messages. ``links``: transfer time of the busiest link.
        """
        step = self.step
        num_devices = sum(len(each.devices) for each in step.devices)
        return {
            "evenly": sum(each.busy * len(each.devices) for each in step.devices) / num_devices,
            "slowest": step.straggler.busy,
            "schedule": max(map(self._schedule_seconds, self.plan.replicas)),
            "links": step.step_seconds * max((link.share for link in step.links), default=0.0),
        }

    def _schedule_seconds(self, replica: Replica) -> float:
        """The closed form of a replica's schedule with the computing time of its virtual devices, without the optimizer."""
        pipeline = replica.pipeline
        ranks = [0.0] * pipeline.num_ranks
        chunks: list[list[float]] = [[] for _ in ranks]
        for stage, rank in zip(replica.stages, pipeline.stage_rank, strict=True):
            own = (self.step.of(name) for name in stage.virtual_device.devices)
            ranks[rank] = max((each.busy - each.optimizer) / pipeline.num_micro_batch for each in own)
            chunks[rank].append(max((each.forward + each.backward for each in stage.estimates), default=0.0))
        firsts = [own[0] / sum(own) if sum(own) else 1 / len(own) for own in chunks]
        return float(pipeline_seconds(pipeline.schedule, ranks, pipeline.num_micro_batch, pipeline.num_chunks, firsts))

    def as_data(self) -> dict[str, Any]:
        """The figures as plain data; times in seconds, sizes in bytes."""
        step, even = self.step, self.even
        figures = {} if even is None else {"even": {"step_seconds": even.step_seconds, "speedup": self.speedup, "reason": even.reason}}
        return {
            "step_seconds": step.step_seconds,
            "samples_per_second": self.samples_per_second,
            "bubble_rate": step.bubble_rate,
            "exposed_communication": step.straggler.exposed,
            "devices": list(self._devices()),
            "bounds": dict(self.bounds),
            **figures,
        }

    def _devices(self) -> Iterator[dict[str, Any]]:
        """Each device in use, by rank."""
        figures = {id(each): _figures(each, self.step.step_seconds) for each in self.step.devices}
        for name in self.plan.devices:
            yield {"name": name} | figures[id(self.step.of(name))]


def _figures(each: DeviceEstimate, step_seconds: float) -> dict[str, Any]:
    return {
        "stages": list(each.stages),
        "busy": each.busy / step_seconds,
        "compute": each.busy,
        "communication": each.communicating,
        "exposed_communication": each.exposed,
        "peak_bytes": round(each.peak.total),
        "capacity_bytes": each.capacity,
        "filled_with": {name: round(num_bytes) for name, num_bytes in each.peak.parts if num_bytes >= 0.5},
    }
