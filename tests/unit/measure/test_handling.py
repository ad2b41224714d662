"""What messages take of a rank, from the processor time of two sizes of sums."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from whale.comm import World
from whale.measure import link_speed
from whale.measure.link_speed import LARGE_SUM, SMALL_SUM, handling_samples
from whale.measure.samples import RoundTimer

SHARE, ADDITION, MESSAGE, BYTE = 0.5, 1e-3, 2e-4, 3e-10
"""Of a core; and seconds of the processor."""
COUNT = 4
"""Messages of two ranks: two steps, each sent and received."""


def test_a_line_through_two_sizes_by_the_share_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_of(num_bytes: int) -> tuple[float, ...]:
        return (ADDITION + COUNT * (MESSAGE + BYTE * num_bytes / 2),) * 3

    rounds = iter([(ADDITION,) * 3, sum_of(SMALL_SUM), sum_of(LARGE_SUM)])
    monkeypatch.setattr(link_speed, "exchange_rounds", lambda *_: next(rounds))
    monkeypatch.setattr(link_speed, "_share_of_core", lambda _: SHARE)
    clock = RoundTimer(World(0, 2, 0, 2, torch.device("cpu"), timedelta(seconds=60)), num_rounds=3)
    messages, rate = handling_samples(clock)
    assert messages.values == pytest.approx((MESSAGE / SHARE,) * 3)
    assert rate.values == pytest.approx((SHARE / BYTE,) * 3)
