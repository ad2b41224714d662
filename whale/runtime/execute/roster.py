"""The ranks of a plan in the world, and the place of each in the plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from whale.comm import World
from whale.ir.plan import Plan


@dataclass(frozen=True)
class RankPlace:
    """The place of this rank in the plan."""

    rank: int  # of the plan
    replica: int  # its model replica
    pipeline_rank: int  # its virtual device in the replica
    position: int  # of its device in that virtual device


def find_rank_place(plan: Plan, rank: int | None) -> RankPlace | None:
    """The place of a rank of the plan; None for an idle rank."""
    if rank is None:
        return None
    device = plan.devices[rank]
    for replica in plan.replicas:
        for stage in replica.stages:
            if device in stage.virtual_device.devices:
                return RankPlace(rank, replica.index, replica.pipeline.stage_rank[stage.index], stage.virtual_device.devices.index(device))
    raise AssertionError(f"{device} is in the plan but in no stage")


@dataclass(frozen=True)
class Roster:
    """The ranks of a plan; `world_ranks` gives, per rank of the plan, the rank in the world."""

    plan: Plan
    world: World
    world_ranks: tuple[int, ...]

    @cached_property
    def rank_place(self) -> RankPlace | None:
        """The place of this rank; None if it is idle."""
        own = self.world.rank
        return find_rank_place(self.plan, self.world_ranks.index(own) if own in self.world_ranks else None)

    @property
    def rank(self) -> int | None:
        """This rank's number in the plan; None if it is idle."""
        return None if self.rank_place is None else self.rank_place.rank

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """All ranks of the world."""
        return tuple(range(self.world.size))

    @property
    def owned(self) -> list[str]:
        """Parameters and buffers that this rank owns, or parts of them."""
        return [name for name, owners in self.plan.owners.items() if self.rank in owners]

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Per parameter and buffer, the world ranks that own it, or parts of it, ascending."""
        return {name: self.in_world(owners) for name, owners in self.plan.owners.items()}

    def in_world(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The world ranks, ascending, of ranks of the plan."""
        return tuple(sorted(self.world_ranks[rank] for rank in ranks))
