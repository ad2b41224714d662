"""Process groups and collectives over `torch.distributed`: the only road between ranks."""

from whale.comm.agreement import on_first_rank, together
from whale.comm.backend import backend_of, blocks_host
from whale.comm.channels import Channel, Channels
from whale.comm.clocks import Clock, compare_clocks
from whale.comm.groups import Groups, RankSet
from whale.comm.sums import start_sum, start_sum_into
from whale.comm.waiting import Launched, Waits
from whale.comm.world import World, close_at_exit, connect

__all__ = [
    "Channel",
    "Channels",
    "Clock",
    "Groups",
    "Launched",
    "RankSet",
    "Waits",
    "World",
    "backend_of",
    "blocks_host",
    "close_at_exit",
    "compare_clocks",
    "connect",
    "on_first_rank",
    "start_sum",
    "start_sum_into",
    "together",
]
