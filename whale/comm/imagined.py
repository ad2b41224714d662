"""A world whose other ranks are not there: what is sent goes nowhere, and what is received has no contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from whale.comm.world import World
from whale.errors import ConfigError


@contextmanager
def imagined_world(rank: int, size: int) -> Iterator[World]:
    """One rank of a world that is imagined, for as long as it is open.

    Args:
        rank: this process's.
        size: how many ranks there would be.

    Raises:
        ConfigError: this process has peers.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # tells torch of a backend, which nobody else is to see

    if dist.is_initialized():
        raise ConfigError("a dry run is a process of its own (this one is a rank among others already)", hint="run it without a launcher")
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield World(rank, size, 0, 1, torch.device("cpu"), timedelta(seconds=60), is_imagined=True)
    finally:
        dist.destroy_process_group()
