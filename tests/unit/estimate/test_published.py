"""Simulated figures against published ones."""

from __future__ import annotations

import pytest

from tests.examples import slow
from whale.estimate import ActionTimes, bubble_rate, simulate
from whale.schedules import build, insert_recompute

# Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, Table 5 (4 of its 12 settings): stages, micro-batches, chunks of
# interleaved; milliseconds of F, I, W and of a hop; bubble rates of 1f1b, interleaved, zb_h1, zb_h2.
TABLE_5 = [
    (8, 24, 3, 18.522, 18.086, 9.337, 0.601, (0.2431, 0.1055, 0.1585, 0.1083)),
    (8, 64, 4, 29.935, 29.621, 19.388, 0.535, (0.1091, 0.0320, 0.0554, 0.0294)),
    (16, 48, 3, 11.347, 11.248, 8.132, 0.377, (0.2552, 0.1104, 0.1397, 0.0672)),
    (32, 96, 2, 10.419, 10.207, 7.715, 0.408, (0.2646, 0.1493, 0.1421, 0.0641)),
]


@pytest.mark.parametrize(
    ("p", "m", "v", "forward", "inputs", "weights", "hop", "rates"),
    [TABLE_5[0], *(slow(*row) for row in TABLE_5[1:])],
)
def test_zero_bubble_table_5(
    p: int, m: int, v: int, forward: float, inputs: float, weights: float, hop: float, rates: tuple[float, ...]
) -> None:
    def rate(name: str, chunks: int = 1) -> float:
        schedule = build(name, num_ranks=p, num_micro_batch=m, num_chunks=chunks)
        return bubble_rate(simulate(schedule, ActionTimes(forward / chunks, inputs / chunks, weights / chunks, transfer=hop)))

    one_f_one_b, interleaved, zb_h1, zb_h2 = rates
    assert round(rate("1f1b"), 4) == one_f_one_b
    assert round(rate("zb_h1"), 4) == zb_h1
    assert round(rate("zb_h2"), 4) == zb_h2
    assert abs(rate("interleaved", v) - interleaved) < 0.004


# Lai et al., "Merak", arXiv 2206.04959: what recomputation off the critical path saves (R = F, B = 2 F, nothing for transfer).
@pytest.mark.parametrize(
    ("p", "m", "figures"),
    [(4, 8, (44, 41, 39, 38)), (8, 8, (60, 53, 51, 50)), (8, 16, (92, 85, 83, 82)), slow(8, 64, (284, 277, 275, 274))],
)
def test_recompute_table(p: int, m: int, figures: tuple[int, ...]) -> None:
    names = ("1f1b", "recompute_early", "last_no_recompute", "shifted_critical_path")
    plain, *others = (build(name, num_ranks=p, num_micro_batch=m) for name in names)
    costs = ActionTimes(1.0, 2.0, recompute=1.0)
    assert tuple(simulate(schedule, costs).makespan for schedule in (insert_recompute(plain), *others)) == figures


# F = 1, B = 2 for a whole rank; times at all-reduces of 16 and of 32 for a whole rank, and peak activations in whole stages.
GROUP_TABLE = [
    (4, 4, 16, "interleaved", 4, (60.25, 76.25), 4.75),
    (4, 4, 16, "interleaved", 8, (54.25, 70.25), 7.75),
    (4, 4, 16, "interleaved", 16, (54.25, 58.25), 13.75),
    (4, 4, 16, "aiao", None, (54.25, 58.25), 16),
    slow(8, 4, 32, "interleaved", 8, (105.25, 121.25), 9.75),
    slow(8, 4, 32, "interleaved", 16, (105.25, 109.25), 15.75),
    slow(8, 4, 32, "interleaved", 32, (105.25, 109.25), 27.75),
    slow(8, 4, 32, "aiao", None, (105.25, 109.25), 32),
]


@pytest.mark.parametrize(("p", "v", "m", "name", "group", "times", "peak"), GROUP_TABLE)
def test_group_size_against_exposed_sync(
    p: int, v: int, m: int, name: str, group: int | None, times: tuple[float, float], peak: float
) -> None:
    schedule = build(name, num_ranks=p, num_micro_batch=m, num_chunks=v, group_size=group)
    for all_reduce, wanted in zip((16, 32), times, strict=True):
        timeline = simulate(schedule, ActionTimes(1 / v, 2 / v, sync=all_reduce / v))
        assert timeline.makespan == wanted
        assert timeline.exposed_sync == wanted - (m + (p - 1) / v) * 3
    assert max(timeline.peak_in_flight) / v == peak


def test_groups_of_twice_the_ranks_hide_the_hops() -> None:
    def seconds(group: int) -> float:
        schedule = build("interleaved", num_ranks=8, num_micro_batch=32, num_chunks=4, group_size=group)
        return simulate(schedule, ActionTimes(1 / 4, 2 / 4, transfer=0.05)).makespan

    assert (round(seconds(8), 6), round(seconds(16), 6)) == (104.35, 101.95)
