"""The closed form of a pipeline of which only the sum of each rank's passes is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.estimate import ActionTimes, pipeline_seconds, simulate
from whale.schedules import build

PLAIN = ("gpipe", "1f1b")


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [("1f1b", 1, (8 + 3) * 3.0), ("gpipe", 1, 33.0), ("interleaved", 3, 24 + 3), ("zb_h1", 1, 24 + 3)],
)
def test_equal_stages(schedule: str, chunks: int, expected: float) -> None:
    """p = 4, m = 8, F = 1, B = 2: the bubbles of the schedules."""
    assert float(pipeline_seconds(schedule, [3.0] * 4, 8, chunks)) == pytest.approx(expected)


def test_unequal_stages_and_many_cases_at_once() -> None:
    assert float(pipeline_seconds("1f1b", [1.0, 3.0, 2.0], 5)) == 5 * 3 + 1
    cases = pipeline_seconds("1f1b", [np.array([1.0, 2.0]), np.array([3.0, 1.0])], 2)
    assert cases.tolist() == [7.0, 4.0]


times = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(st.sampled_from(PLAIN), times, st.integers(1, 9), st.floats(0, 3))
def test_never_above_the_simulation(schedule: str, forward: list[int], m: int, transfer: float) -> None:
    order = build(schedule, num_ranks=len(forward), num_micro_batch=m)
    found = simulate(order, ActionTimes([float(f) for f in forward], [2.0 * f for f in forward], transfer=transfer)).makespan
    assert float(pipeline_seconds(schedule, [3.0 * f for f in forward], m)) <= found + 1e-9


@given(st.sampled_from(PLAIN), st.integers(1, 6), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))
def test_exact_for_equal_stages(schedule: str, p: int, m: int, forward: int, backward: int) -> None:
    found = simulate(build(schedule, num_ranks=p, num_micro_batch=m), ActionTimes(forward, backward)).makespan
    assert found == float(pipeline_seconds(schedule, [forward + backward] * p, m))


@given(st.sampled_from(("interleaved", "aiao")), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
def test_exact_for_equal_chunks(schedule: str, p: int, chunks: int, groups: int, forward: int) -> None:
    m = p * groups
    order = build(schedule, num_ranks=p, num_micro_batch=m, num_chunks=chunks)
    found = simulate(order, ActionTimes(forward / chunks, 2 * forward / chunks)).makespan
    assert float(pipeline_seconds(schedule, [3.0 * forward] * p, m, chunks)) == pytest.approx(found)
