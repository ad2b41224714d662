"""Rows and cuts of a placement, solved from equal rows or from those of another placement."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.planning.graphs import chain, cluster
from whale.config import Config
from whale.estimate import Costs
from whale.estimate.prices.prices import Prices
from whale.planning.cutting.pieces import Pieces
from whale.planning.pipeline.cut_points import find_cut_points
from whale.planning.pipeline.placement import Placement
from whale.planning.pipeline.recompute import KEEP_ALL, kept_under
from whale.planning.pipeline.scheduling import shape_pipeline
from whale.planning.replicas.solve import Solver
from whale.planning.shard.stage_price import StagePricing
from whale.planning.structure.structure import analyse


def two_stages(num_rows: int) -> Solver:
    """Two stages on hosts of a fast and a slow device each, the second half as fast as the first."""
    graph = chain(6)
    prices = Prices(graph, cluster([4e9, 2e9], [2e9, 1e9]), Costs())
    pipeline = shape_pipeline(Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4}), None, 2)
    points = find_cut_points(analyse(graph), prices, kept_under(prices, KEEP_ALL))
    return Solver(StagePricing.of(prices), pipeline, num_rows, points=points, pieces=Pieces(prices, points, num_rows))


def seats(*, fast_first: bool) -> Placement:
    order = (0, 1) if fast_first else (1, 0)
    return Placement("as told", tuple(tuple((f"h{host}/{index}",) for index in order) for host in (0, 1)), ())


@pytest.mark.parametrize("fast_first", [True, False])
def test_from_the_rows_of_another_order_the_same_is_found(fast_first: bool) -> None:
    solver = two_stages(96)
    other = solver.solve(seats(fast_first=not fast_first))
    assert other.rows[0] > other.rows[1]
    alone, after = solver.solve(seats(fast_first=fast_first)), solver.solve(seats(fast_first=fast_first), other)
    assert after.rows == alone.rows and after.step_seconds == alone.step_seconds


def test_rows_of_other_devices_are_no_start() -> None:
    solver, own = two_stages(96), seats(fast_first=True)
    alone = solver.solve(own)
    crossed = dataclasses.replace(own, replicas=(tuple(reversed(own.replicas[0])), (("h1/0",), ("h0/1",))))
    start = dataclasses.replace(alone, placement=crossed, rows=(95, 1))
    assert solver.solve(own, start) == dataclasses.replace(alone, placement=own)
