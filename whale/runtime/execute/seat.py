"""Where a rank sits in a plan."""

from __future__ import annotations

from dataclasses import dataclass

from whale.ir.plan import Plan


@dataclass(frozen=True)
class Seat:
    """Where this rank sits in the plan.

    Attributes:
        rank: of the plan.
        replica: the model replica it belongs to.
        pipeline_rank: which virtual device of the replica.
        position: of its device in that virtual device.
    """

    rank: int
    replica: int
    pipeline_rank: int
    position: int


def find_seat(plan: Plan, rank: int | None) -> Seat | None:
    """The seat of a rank of the plan; None for a rank that the plan leaves idle."""
    if rank is None:
        return None
    device = plan.devices[rank]
    for replica in plan.replicas:
        for stage in replica.stages:
            if device in stage.virtual_device.devices:
                return Seat(rank, replica.index, replica.pipeline.stage_rank[stage.index], stage.virtual_device.devices.index(device))
    raise AssertionError(f"{device} is in the plan but in no stage")
