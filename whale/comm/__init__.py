"""Process groups and collectives over `torch.distributed`: the only road between ranks."""

from whale.comm.agreement import on_first_rank, together
from whale.comm.backend import backend_of
from whale.comm.channels import Channels, Lane
from whale.comm.groups import Groups
from whale.comm.waiting import wait
from whale.comm.world import World, close_at_exit, connect

__all__ = ["Channels", "Groups", "Lane", "World", "backend_of", "close_at_exit", "connect", "on_first_rank", "together", "wait"]
