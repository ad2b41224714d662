"""Bounds of many pipelines at once, from the ends of their runs of like ranks, are those of one after another, rank by rank."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from whale.estimate.costs.op_table import Floats
from whale.schedules import peak_in_flight
from whale.search.arrangement import Order
from whale.search.bounds.waiting import LEAST, AlikeRanks, Pass, Passes, Pipelines

NUM_COLUMNS = 3


def drawn(draw: random.Random, num_runs: int, num_cases: int) -> tuple[Pipelines, list[list[int]]]:
    """Pipelines of so many runs of ranks, with the run of each rank, per case."""
    counts = np.array([draw.randint(1, 9) for _ in range(NUM_COLUMNS)], dtype=np.float64)
    lengths = [[draw.choice((1, 1, 2, 5, 9)) for _ in range(num_runs)] for _ in range(num_cases)]
    m = [draw.choice((1, 2, 3, 8, 40)) for _ in range(num_cases)]

    def seconds(low: float, high: float) -> Floats:
        speed = np.array([[10 ** draw.uniform(-1, 1)] for _ in range(num_cases)])
        found: Floats = speed * np.array([[draw.uniform(low, high) for _ in range(NUM_COLUMNS)] for _ in range(num_cases)])
        return found

    runs = list[AlikeRanks]()
    for place in range(num_runs):
        forward, backward = seconds(0.1, 1.0), seconds(0.1, 2.0)
        mean, fewest, most = (
            Pass(forward * scale, backward * scale, counts) for scale in (1.0, draw.uniform(0.7, 1), draw.uniform(1, 1.5))
        )
        runs.append(AlikeRanks(Passes(mean, fewest, most), np.array([own[place] for own in lengths], dtype=np.float64)))
    shapes = [(sum(own), number, 1) for own, number in zip(lengths, m, strict=True)]
    ranks = [[place for place, number in enumerate(own) for _ in range(number)] for own in lengths]
    return Pipelines(runs, counts, np.array(m, dtype=np.float64), shapes), ranks


def first(found: Pipelines, case: int, ranks: list[int], filling: list[Floats]) -> float:
    m, after, prices = found.num_micro_batch[case], 0.0, list[Floats]()
    for place in reversed(ranks):
        mean, fill = found.runs[place].passes.mean.both[case], filling[place][case]
        whole = mean @ found.counts
        weight = max(0.0, 1 / whole - (fill @ found.counts) / whole * after)
        prices.append(weight * mean + after * fill)
        after += weight / m
    return float(np.min(prices, axis=0) @ found.counts / after)


def there_and_back(found: Pipelines, case: int, ranks: list[int], order: Order) -> float:
    m, wanted, whole, more, once = found.num_micro_batch[case], list[float](), list[float](), list[Floats](), list[Floats]()
    peaks = peak_in_flight(order.schedule, num_ranks=len(ranks), num_micro_batch=int(m))
    for place, peak in zip(ranks, peaks, strict=True):
        own = found.runs[place].passes
        once.append(own.fewest.both[case])
        whole.append(float(once[-1] @ found.counts))
        more.append(m * own.mean.both[case] - own.fewest.backward[case] - peak * own.most.forward[case])
        wanted.append(max(float(more[-1] @ found.counts), LEAST * whole[-1]))
    part = sum(1 / each for each in wanted) / (1 + sum(own / each for own, each in zip(whole, wanted, strict=True)))
    weights = [max(0.0, (1 - part * own) / each) for own, each in zip(whole, wanted, strict=True)]
    prices = [sum(weights) * each + weight * own for each, weight, own in zip(once, weights, more, strict=True)]
    return float(np.min(prices, axis=0) @ found.counts / sum(weights))


def chunks(found: Pipelines, case: int, ranks: list[int]) -> float:
    m = found.num_micro_batch[case]
    ratio = len(ranks) / m
    wanted = [float(1 / found.runs[place].passes.mean.whole[case]) for place in ranks]
    guess = min(wanted) * (1 - math.exp(-ratio) * (1 + ratio)) / (1 - ratio * math.exp(-ratio))
    one, two, weights = 0.0, 0.0, list[tuple[int, float, float, float, float]]()
    for place, each in zip(reversed(ranks), reversed(wanted), strict=True):
        own = max(0.0, each - guess - one)
        both = max(own, each - two)
        weights.append((place, own, one, both, two))
        one, two = one + own / m, two + (both - own) / m
    prices = list[Floats]()
    for place, own, before, both, behind in weights:
        mean, once = found.runs[place].passes.mean.both[case], found.runs[place].passes.fewest.both[case]
        prices += [own * mean + (before + two) * once, both * mean + behind * once]
    return float(np.min(prices, axis=0) @ found.counts / (one + two))


@pytest.mark.parametrize("number", range(6))
def test_ends_of_runs_say_what_all_ranks_say(number: int) -> None:
    draw = random.Random(number)
    found, ranks = drawn(draw, 1 + number % 3, 20)
    for filling in ([run.passes.fewest.both for run in found.runs], [run.passes.fewest.forward for run in found.runs]):
        plain = [first(found, case, own, filling) for case, own in enumerate(ranks)]
        assert found.first(filling) == pytest.approx(plain, rel=1e-9)
    for order in (Order("1f1b"), Order("eager_1f1b"), Order("gpipe")):
        plain = [there_and_back(found, case, own, order) for case, own in enumerate(ranks)]
        assert found.there_and_back(order) == pytest.approx(plain, rel=1e-9)
    assert found.chunks() == pytest.approx([chunks(found, case, own) for case, own in enumerate(ranks)], rel=1e-9)
