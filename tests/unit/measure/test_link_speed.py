"""How fast links are, from the times of small and large messages."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from whale.comm import World
from whale.measure import link_speed
from whale.measure.link_speed import AT_ONCE, LEAST_EXCHANGES, MOST_EXCHANGES, ExchangePhase, link_samples, seconds_of_bytes
from whale.measure.samples import RoundTimer


def test_noise_makes_no_absurd_bandwidth() -> None:
    assert seconds_of_bytes([5e-3, 3e-3], 1e-3) == [4e-3, 2e-3]
    assert seconds_of_bytes([2e-3, 0.5e-3], 1.9e-3) == [1e-3, 0.25e-3]


class BesideASlowOne(World):
    """A world whose other rank takes so long that only the fewest exchanges are made."""

    def gather_objects(self, value: object) -> list[object]:
        return [value, 1e9]


@pytest.mark.parametrize(
    ("world", "round_seconds", "count"),
    [(BesideASlowOne, 1.0, LEAST_EXCHANGES), (World, 1e12, MOST_EXCHANGES)],
    ids=["as the slowest rank has time for", "never more than enough"],
)
def test_all_ranks_exchange_equally_often_before_and_in_a_round(
    monkeypatch: pytest.MonkeyPatch, world: type[World], round_seconds: float, count: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(link_speed, "_call", lambda *_: lambda: calls.append(None))
    clock = RoundTimer(world(0, 1, 0, 1, torch.device("cpu"), timedelta(seconds=60)), num_rounds=3, round_seconds=round_seconds)
    latency, bandwidth = link_samples(clock, ExchangePhase("inside here", AT_ONCE, ((0, 1), (1, 0))))
    assert len(latency.values) == len(bandwidth.values) == 3
    assert len(calls) == 2 * (1 + 3 * 2 * count), "of small and of large ones: one to see how long it takes, then rounds"
