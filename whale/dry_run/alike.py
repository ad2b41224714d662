"""Which ranks of a plan run the same program: of these one is enough."""

from __future__ import annotations

from collections.abc import Hashable

from whale.ir.plan import Plan, Replica


def alike_devices(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The devices of a plan, those together that have the same place in alike replicas; by their first ranks.

    Replicas are alike that have the same pipeline, stages and rows: each shares with the others what the others share with it.
    """
    found: dict[tuple[Hashable, int, int], list[str]] = {}
    for replica in plan.replicas:
        form = _form(plan, replica)
        for rank in range(replica.pipeline.num_ranks):
            stage = replica.stages[replica.pipeline.stage_rank.index(rank)]
            for position, device in enumerate(stage.virtual_device.devices):
                found.setdefault((form, rank, position), []).append(device)
    return tuple(tuple(devices) for devices in found.values())


def _form(plan: Plan, replica: Replica) -> Hashable:
    """All of a replica that its program depends on, without the names of its devices."""
    rows = tuple(stop - start for start, stop in plan.micro_batch_rows(replica.index, plan.planned_rows))
    stages = tuple(
        (stage.ops, len(stage.virtual_device.devices), stage.shares, stage.parameters, stage.split, stage.shards, stage.program)
        for stage in replica.stages
    )
    return rows, replica.pipeline, stages, replica.edges
