"""The connections of one rank: process groups, channels, sums over all ranks, and its status board."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whale.comm import Channel, Channels, Groups, close_at_exit
from whale.ir.plan import Stage
from whale.runtime.execute.call_check import WorldSums
from whale.runtime.execute.roster import Roster
from whale.runtime.execute.status import StatusBoard
from whale.runtime.program.shard import Group
from whale.runtime.program.watch import Watch
from whale.sharding.communicators import Way


@dataclass(frozen=True)
class Connections:
    """A rank's connections to the others of a plan."""

    roster: Roster
    groups: Groups
    channels: Channels
    world_sums: WorldSums
    status: StatusBoard  # shows the current action to other processes
    watch: Watch  # called when each action, message and segment begins and ends

    @staticmethod
    def open(roster: Roster, rank_sets: Iterable[tuple[int, ...]], channels: Iterable[Sequence[Way]], watch: Watch) -> Connections:
        """Makes the connections; a collective of the world with equal arguments.

        Args:
            rank_sets: ranks of the plan that sum together, besides the whole world.
            channels: (sender, receiver) ranks of the plan, by the communicator that they share.
        """
        world = roster.world
        status = StatusBoard.open(world.rank)
        groups = Groups(world, [roster.all_ranks, *map(roster.in_world, rank_sets)])
        shared = (tuple(Channel(*(roster.world_ranks[rank] for rank in way)) for way in ways) for ways in channels)
        made = Connections(roster, groups, Channels(world, shared), WorldSums(world, groups, status, watch), status, watch)
        close_at_exit(made)
        return made

    def split_group(self, stage: Stage, position: int) -> Group | None:
        """The split group of a device of a stage; None if it is not split."""
        if stage.split == 1:
            return None
        roster = self.roster
        ranks = tuple(roster.world_ranks[roster.plan.rank_of[device]] for device in stage.groups[position // stage.split])
        is_unlike = roster.plan.are_unlike(roster.plan.rank_of[device] for device in stage.groups[position // stage.split])
        return Group(self.groups, ranks, roster.world.device, roster.world.waits, watch=self.watch, is_unlike=is_unlike)

    def close(self) -> None:
        self.channels.close()
        self.groups.close()
        self.status.finish()
