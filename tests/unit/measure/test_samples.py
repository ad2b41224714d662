"""How often a rank repeats what it measures: about as long as a round, and as long as the slowest rank needs."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from whale.comm import World
from whale.measure.samples import RoundTimer


class BesideASlowOne(World):
    """A world whose other rank takes eight times as long."""

    def gather_objects(self, value: object) -> list[object]:
        assert isinstance(value, float)
        return [value, 8 * value]


@pytest.mark.parametrize(("world", "repeats"), [(World, 1), (BesideASlowOne, 8)])
def test_no_rank_is_idle_while_the_slowest_measures(world: type[World], repeats: int) -> None:
    calls: list[None] = []
    clock = RoundTimer(world(0, 1, 0, 1, torch.device("cpu"), timedelta(seconds=60)), num_rounds=2, round_seconds=1e-12)
    assert len(clock.rounds(lambda: calls.append(None))) == 2
    settling = 2 if repeats > 1 else 0  # at most one call before each round
    assert 1 + 2 * repeats <= len(calls) <= 1 + 2 * repeats + settling
