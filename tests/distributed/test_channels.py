"""Channels: messages between two ranks meet in the order in which both start them, with and without groups of their own."""

from __future__ import annotations

from datetime import timedelta
from itertools import combinations, permutations

import pytest
import torch

from tests.distributed.ranks import PATIENCE_SECONDS
from tests.distributed.world import World as Ranks
from whale.comm import Channel, Channels, World

NUM_MESSAGES = 3


def exchange(rank: int, num_ranks: int, own_groups: bool, shares: bool = False) -> tuple[list[float], int]:
    """Every rank sends messages of growing sizes to every other; all receives are posted before the first is waited for."""
    world = World(rank, num_ranks, rank, num_ranks, torch.device("cpu"), timedelta(seconds=PATIENCE_SECONDS))
    pairs = [Channel(source, target) for source, target in permutations(range(num_ranks), 2)]
    ways = [tuple(each for each in pairs if {each.source, each.target} == set(pair)) for pair in combinations(range(num_ranks), 2)]
    channels = Channels(world, ways if shares else [(pair,) for pair in pairs], own_groups=own_groups)
    works, received, sent = [], [], []
    for number in range(NUM_MESSAGES):
        for channel in pairs:
            if channel.source == rank:
                sent.append(torch.full((number + 1,), 100.0 * rank + 10 * channel.target + number))
                works.append(channels.send(sent[-1], channel))
            elif channel.target == rank:
                received.append(torch.empty(number + 1))
                works.append(channels.receive(received[-1], channel))
    for work in works:
        work.work.wait()
    num_groups = len(channels)
    channels.close()
    return [float(value.unique()) for value in received], num_groups


@pytest.mark.parametrize("own_groups", [False, True])
def test_messages_meet_in_order(world: Ranks, own_groups: bool) -> None:
    for rank, (values, num_groups) in enumerate(world.run(exchange, own_groups, num_ranks=3)):
        others = [other for other in range(3) if other != rank]
        assert values == [100.0 * other + 10 * rank + number for number in range(NUM_MESSAGES) for other in others]
        assert num_groups == (4 if own_groups else 0), "one for each direction to each of two others"


def test_both_directions_of_a_pair_share_a_group(world: Ranks) -> None:
    alone, shared = (world.run(exchange, True, shares, num_ranks=3) for shares in (False, True))
    assert [values for values, _ in alone] == [values for values, _ in shared]
    assert [num_groups for _, num_groups in shared] == [2, 2, 2]
