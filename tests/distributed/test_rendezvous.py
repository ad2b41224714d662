"""Steps run where every launch waits for its other end: the order of the schedule is enough, on the wire as on paper."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from tests.distributed.ranks import PATIENCE_SECONDS
from tests.distributed.test_schedules import CASES, check, pipeline
from tests.distributed.world import RankFailure
from tests.distributed.world import World as Ranks
from whale.comm import Channel, Channels, World


@pytest.fixture(scope="module")
def meeting() -> Iterator[Ranks]:
    """Four ranks on such a network."""
    with Ranks(4, network="rendezvous") as ranks:
        yield ranks


@pytest.mark.parametrize(
    "name",
    ["four ranks", "zero bubble on four ranks", "data parallel around, interleaved", "data parallel around, zb_v", "stages, aiao"],
)
def test_the_law(meeting: Ranks, name: str) -> None:
    check(meeting, CASES[name])


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
def test_two_ranks(meeting: Ranks, schedule: str) -> None:
    check(meeting, pipeline(schedule, 2, 4, (1.0, 2.0)))


def swap(rank: int, num_ranks: int, in_order: bool) -> float:
    """Two ranks send to each other."""
    channels = Channels(World(rank, 2, rank, 2, torch.device("cpu"), timedelta(seconds=PATIENCE_SECONDS)), [])
    sent, received = torch.full((1,), float(rank)), torch.empty(1)
    actions = [lambda: channels.send(sent, Channel(rank, 1 - rank)), lambda: channels.receive(received, Channel(1 - rank, rank))]
    works = [action() for action in (actions if rank == 0 or not in_order else reversed(actions))]
    for work in works:
        work.work.wait()
    return float(received)


def test_two_that_send_first_wait_for_each_other(meeting: Ranks) -> None:
    """The control: the network does wait."""
    assert meeting.run(swap, True, num_ranks=2) == [1.0, 0.0]
    with pytest.raises(RankFailure):
        meeting.run(swap, False, num_ranks=2, timeout=2.0)
