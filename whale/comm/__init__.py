"""Process groups and collectives over `torch.distributed`: all communication between ranks goes through here."""

from whale.comm.clocks import Clock, compare_clocks
from whale.comm.groups import Channel, Channels, Groups, RankSet, as_moved, flat_bytes, rounded, start_sum, start_sum_into
from whale.comm.waiting import Launched, Waits, backend_of, blocks_host
from whale.comm.world import World, close_at_exit, connect, on_first_rank, together

__all__ = [
    "Channel",
    "Channels",
    "Clock",
    "Groups",
    "Launched",
    "RankSet",
    "Waits",
    "World",
    "as_moved",
    "backend_of",
    "blocks_host",
    "close_at_exit",
    "compare_clocks",
    "connect",
    "flat_bytes",
    "on_first_rank",
    "rounded",
    "start_sum",
    "start_sum_into",
    "together",
]
