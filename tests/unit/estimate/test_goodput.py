"""What a run with faults gets done: the closed form against drawn faults, and the interval that is best."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.estimate import Faults


def drawn(faults: Faults, interval: float, num_segments: int, seed: int) -> float:
    """The share of useful time of a run whose faults are drawn."""
    random, now = np.random.default_rng(seed), 0.0
    fault = random.exponential(faults.mean_seconds)
    for _ in range(num_segments):
        end = now + interval + faults.save_seconds
        while fault < end:
            now, fault = fault, fault + random.exponential(faults.mean_seconds)
            restarted = now + faults.restart_seconds
            while fault < restarted:  # a fault during a restart begins it again
                restarted, fault = fault + faults.restart_seconds, fault + random.exponential(faults.mean_seconds)
            end = restarted + interval + faults.save_seconds
        now = end
    return num_segments * interval / now


@pytest.mark.parametrize(
    ("faults", "interval"),
    [(Faults(1e3, 5.0, 60.0), 100.0), (Faults(1e3, 5.0, 60.0), 1500.0), (Faults(100.0, 20.0, 80.0), 60.0), (Faults(1e5, 1.0, 60.0), 500.0)],
)
def test_closed_form_equals_drawn_faults(faults: Faults, interval: float) -> None:
    assert drawn(faults, interval, 40_000, seed=0) == pytest.approx(faults.goodput(interval).useful, rel=0.03)


@given(st.floats(1.0, 1e7), st.floats(0.0, 100.0), st.floats(0.0, 1e3), st.floats(0.1, 1e5))
def test_shares_are_whole_and_best_interval_is_best(mean: float, save: float, restart: float, other: float) -> None:
    faults = Faults(mean, save, restart)
    for interval in (other, best := faults.best_interval(least=0.1)):
        found = faults.goodput(interval)
        assert found.useful + found.saving + found.repeated + found.restarting == pytest.approx(1.0)
        assert min(found.useful, found.saving, found.repeated, found.restarting) >= 0
    assert faults.goodput(best).useful >= faults.goodput(other).useful - 1e-9


def test_best_interval_is_that_of_young_where_saves_are_short() -> None:
    faults = Faults(86_400.0, 1.0, 60.0)
    assert faults.best_interval(least=0.1) == pytest.approx(faults.young_interval, rel=0.01)
