"""No plan is faster than the bound of its arrangement says, whatever its model looks like."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.unit.planning.graphs import Graph
from tests.unit.search.exhaustive import seater_of
from tests.unit.search.test_search import GIB, clusters, layers, made
from whale.config import Config
from whale.errors import PlanError
from whale.ir.cluster import Cluster, Link
from whale.ir.graph import ModelGraph
from whale.planning.seating import Seating
from whale.search import search
from whale.search.arrangement import Arrangement, Group, Order, Team
from whale.search.bounds.bounds import Bounds
from whale.search.bounds.chain import loose_runs
from whale.search.bounds.columns import columns_of
from whale.search.front import Front
from whale.search.objective import LeastTime
from whale.search.run import Closed, FreeRun
from whale.search.sketch.links import Ties
from whale.search.sketch.pieces import pieces_of
from whale.search.sketch.sketch import Sketches
from whale.search.space.freedom import freedom_of
from whale.search.space.space import Space


def towers(depths: list[int], width: int = 64) -> ModelGraph:
    """Towers of linear layers, side by side, whose results are added."""
    graph = Graph()
    value = graph.input("x", width)
    tops = []
    for tower, depth in enumerate(depths):
        top = value
        for index in range(depth):
            weight = graph.parameter(f"tower{tower}.{index}.weight", width, width)
            top = graph.call(f"tower{tower}_{index}", "aten.linear.default", top, weight, width=width, flops=8 * width * width)
        tops.append(top)
    result = tops[0]
    for number, top in enumerate(tops[1:]):
        result = graph.call(f"added{number}", "aten.add.Tensor", result, top, width=width, tags=["pointwise"])
    graph.sum_loss(result)
    return graph.build()


def front_of(graph: ModelGraph, cluster: Cluster, rows: int) -> Front:
    seater = seater_of(graph, cluster, Config(), rows)
    freedom = freedom_of(Config(), mixes_samples=False)
    bounds = Bounds(seater.prices, seater.structure, seater.points, rows)
    sketches = Sketches(seater.prices, pieces_of(bounds.columns, seater.points), Ties(seater.prices), rows, freedom.recomputes)
    return Front(Space(cluster, freedom, rows, seater.points.num_units), bounds, sketches, LeastTime())


@at_most(5)
@given(depths=st.lists(st.integers(1, 3), min_size=1, max_size=3), cluster=clusters(2), rows=st.integers(1, 6))
@example(depths=[3, 3], cluster=made([[(1e9, GIB)] * 2], network=1e10), rows=4)
def test_no_plan_is_below_its_bound(depths: list[int], cluster: Cluster, rows: int) -> None:
    graph = towers(depths)
    front = front_of(graph, cluster, rows)
    try:
        found = search(graph, cluster, Config(), rows=rows, effort=math.inf)
    except PlanError:
        return  # nothing fits
    for arrangement, seconds in (
        (found.arrangement, found.plan.step_seconds),
        *((each.arrangement, each.seconds) for each in found.others),
    ):
        assert front.bound(arrangement) <= seconds * (1 + 1e-9), str(arrangement)
        assert front.bounds.of_lineups([(arrangement.teams, arrangement.num_micro_batch)])[0] <= seconds * (1 + 1e-9)


def test_devices_sum_over_all_their_links_at_once() -> None:
    """A copy sums some gradients inside its host, and others, at the same time, with the stage that is on another one."""
    graph = layers([64] * 4)
    slow = made([[(3e7, GIB)] * 2, [(3e7, GIB)]], network=1e6)
    cluster = replace(slow, hosts=tuple(replace(host, link=Link(1e6, 1e-6)) for host in slow.hosts))
    front, seater = front_of(graph, cluster, 4), seater_of(graph, cluster, Config(), 4)
    first, second, beyond = ((device.name,) for device in cluster.devices)
    copy, pipeline = Seating("1f1b", 1, 2, (first,)), Seating("zb_h1", 1, 2, (beyond, second))
    kind = Group(cluster.devices[0].kind)
    arrangement = Arrangement((Team((kind,), 1), Team((kind, kind), 1)), Order("zb_h1"), 2)
    assert front.bound(arrangement) <= seater.draft((copy, pipeline), "auto").plan.step_seconds


def test_parts_of_ops_start_as_many_kernels_as_whole_ones() -> None:
    front = front_of(layers([64] * 4), made([[(1e15, GIB)] * 4], network=1e9), 4)
    kind = Group(next(iter(front.space.counts)))
    alone, split = (Arrangement((Team((replace(kind, width=width),), 1),), Order("1f1b"), 1) for width in (1, 4))
    assert 0.95 * front.bound(alone) < front.bound(split) < front.bound(alone)  # hardly anything else takes time


def test_bounds_of_many_at_once_are_those_of_each() -> None:
    graph, cluster = layers([64, 32, 64]), made([[(1e9, GIB)] * 2, [(2e9, GIB)]], network=1e9)
    front = front_of(graph, cluster, 70)
    found = [each for *_, group in front._left for each in group.own]
    apart = [front_of(graph, cluster, 70).bounds.of([each])[0] for each in found[::7]]
    assert front.bounds.of(found)[::7] == pytest.approx(apart, rel=1e-9)


def test_what_is_never_opened_is_bounded_as_if_it_were(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = layers([64, 32, 64, 64]), made([[(1e9, GIB)] * 4, [(2e9, GIB)] * 2], network=1e7)
    left, closed = list[int](), Front.closed

    def counted(self: Front, value: float) -> list[Closed]:
        left.append(len(closed(self, value)))
        return closed(self, value)

    monkeypatch.setattr(Front, "closed", counted)
    found = search(graph, cluster, Config(), rows=32, effort=3)
    monkeypatch.setattr(FreeRun, "reach", math.inf)
    whole = search(graph, cluster, Config(), rows=32, effort=3)
    assert (found.arrangement, found.value, found.bound) == (whole.arrangement, whole.value, whole.bound)
    assert found.bound < found.value and left[0] > left[1] == 0


def test_ops_side_by_side_do_not_wait_for_one_another() -> None:
    for graph, runs in ((towers([2, 2]), [2]), (layers([64] * 4), [])):
        seater = seater_of(graph, made([[(1e9, GIB)]], network=1e9), Config(), 4)
        found = loose_runs(graph, seater.points, columns_of(seater.prices, seater.structure))
        assert found.sum(axis=1).tolist() == runs
