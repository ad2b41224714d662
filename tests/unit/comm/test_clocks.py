"""Clocks: what all-reduces tell of the distance between two of them is never wrong by more than it says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from whale.comm.clocks import Clock, clock_between

short = st.floats(1e-6, 1e-2)
ROUND = st.tuples(st.floats(0.0, 10.0), short, short, short, short)
"""When all are inside, and how long before and after it each of two ranks enters and leaves."""


@given(st.lists(ROUND, min_size=1, max_size=8), st.floats(-1e3, 1e3))
def test_the_offset_is_within_its_error(rounds: list[tuple[float, float, float, float, float]], ahead: float) -> None:
    reference = [(at - before, at + after) for at, before, after, _, _ in rounds]
    own = [(at - before - ahead, at + after - ahead) for at, _, _, before, after in rounds]
    found = clock_between(own, reference, is_same=False)
    assert abs(found.offset - ahead) <= found.error + 1e-9
    assert found.error <= min(a + b + c + d for _, a, b, c, d in rounds) + 1e-9


def test_ranks_of_one_machine_have_one_clock_unless_that_cannot_be() -> None:
    assert clock_between([(1.0, 3.0)], [(2.0, 4.0)], is_same=True) == Clock()
    assert clock_between([(1.0, 3.0)], [(2.0, 4.0)], is_same=False) == Clock(1.0, 2.0)
    assert clock_between([(1.0, 2.0)], [(7.0, 8.0)], is_same=True).offset == 6.0, "a container with a clock of its own"
