"""The cut into stages against brute force over all cuts."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.planning.graphs import Graph, chain, cluster
from tests.unit.search.many import drawn_graph
from whale.config import Config
from whale.estimate import Costs
from whale.estimate.prices.prices import Prices
from whale.hardware import load_cluster
from whale.ir.cluster import Cluster, Link
from whale.ir.graph import ModelGraph
from whale.planning import make_plan
from whale.planning.cutting.partition import Partition, _chosen, _least_maximum, _least_squares, cut_into_stages, wishes_of
from whale.planning.cutting.pieces import Pieces
from whale.planning.cutting.stage_tables import Band, StageTables
from whale.planning.pipeline.cut_points import find_cut_points
from whale.planning.pipeline.placement import likeness_of
from whale.planning.pipeline.recompute import KEEP_ALL, kept_under
from whale.planning.pipeline.scheduling import Split, shape_pipeline
from whale.planning.structure.stages import assign
from whale.planning.structure.structure import analyse
from whale.workloads import GPT


@given(st.integers(1, 4), st.data())
def test_no_cut_has_a_faster_slowest_stage(num_stages: int, data: st.DataObject) -> None:
    num_units = data.draw(st.integers(num_stages, 8))
    work = [data.draw(st.lists(st.integers(0, 5), min_size=num_units, max_size=num_units)) for _ in range(num_stages)]
    receive = data.draw(st.lists(st.integers(0, 3), min_size=num_units + 1, max_size=num_units + 1))
    tables = []
    for stage in range(num_stages):
        table = np.full((num_units + 1, num_units + 1), np.inf)
        for i in range(num_units):
            for j in range(i + 1, num_units + 1):
                table[i, j] = sum(work[stage][i:j]) + (receive[i] if stage else 0)
        tables.append(table)

    def costs(bounds: tuple[int, ...]) -> list[float]:
        return [float(tables[s][bounds[s], bounds[s + 1]]) for s in range(num_stages)]

    every = [(0, *inner, num_units) for inner in combinations(range(1, num_units), num_stages - 1)]
    least = min(max(costs(bounds)) for bounds in every)
    band = Band(num_units, num_units)
    banded = [np.where(band.is_piece, table[band.starts, band.ends], np.inf) for table in tables]
    assert _least_maximum(banded, band) == least
    found = tuple(_least_squares(banded, least, band))
    assert max(costs(found)) == least
    assert sum(c * c for c in costs(found)) == min(sum(c * c for c in costs(b)) for b in every if max(costs(b)) == least)


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 4), st.lists(st.sampled_from([1e9, 3e9, 20e9]), min_size=4, max_size=4), st.sampled_from([1.0, 0.08, 0.04, 0.01]))
def test_pieces_that_are_not_too_long_are_enough_where_that_is_said(num_stages: int, speeds: list[float], margin: float) -> None:
    graph = chain(10)
    prices = Prices(graph, cluster(speeds, memory=2**20), Costs())
    pipeline = shape_pipeline(Config({"pipeline.num_stages": num_stages, "pipeline.num_micro_batch": 4}), None, num_stages)
    points = find_cut_points(analyse(graph), prices, kept_under(prices, KEEP_ALL))
    pieces = Pieces(prices, points, 64)
    tables, placed = StageTables(points, pieces, prices, pipeline, KEEP_ALL), tuple((f"h0/{index}",) for index in range(num_stages))
    found = [_chosen(tables, placed, 64, margin, Band(points.num_units, longest)) for longest in range(1, points.num_units + 1)]
    assert found[-1] is not None
    assert {tuple(bounds) for bounds in found if bounds is not None} == {tuple(found[-1])}


def test_between_split_groups_parts_cross_and_do_not_push_the_cut_aside() -> None:
    graph = chain(8, width=1024)  # a layer takes a device of a group 0.1 ms; what crosses takes 0.17 ms at once, 0.08 ms in parts
    hosts = replace(cluster((1e12,) * 4, (1e12,) * 4, memory=2**34), network=Link(3e9, 1e-9))
    prices = Prices(graph, hosts, Costs())
    placed = tuple(tuple(f"h{host}/{index}" for index in range(4)) for host in range(2))
    points = find_cut_points(analyse(graph), prices, kept_under(prices, KEEP_ALL))
    pipeline = shape_pipeline(Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4}), None, 2)
    split = replace(pipeline, devices=(4, 4), splits=(Split(4), Split(4)))
    pieces = Pieces(prices, points, 64)
    cut = cut_into_stages(StageTables(points, pieces, prices, split, KEEP_ALL), placed, 64, 1.0, likeness_of(placed, hosts))
    assert cut.bounds == (0, 4, 9)  # in the middle of the layers


def test_a_cut_counts_what_comes_back() -> None:
    """Between a head of many words and the loss the gradients of all scores come back: a cut by blocks is no better."""
    graph = GPT(layers=12, hidden=768, heads=12, sequence=512, vocabulary=30_000).graph()
    there = load_cluster(Path(__file__).parents[4] / "strategies/clusters/v100_t4.yaml")
    pipeline = {"num_stages": 4, "num_micro_batch": 8, "schedule": "1f1b"}
    chosen = make_plan(graph, there, Config({"planning.search": "off", "pipeline": pipeline}), rows=32)
    by_blocks = {"planning.search": "off", "plan": {"replicas": 1, **pipeline, "blocks": [5, 6, 1, 0]}}
    assert chosen.step_seconds < 1.01 * make_plan(graph, there, Config(by_blocks), rows=32).step_seconds


def tied_in_two_chunks(memory: int) -> StageTables:
    """A GPT whose first and last pieces share the embedding, in two chunks on each of two ranks."""
    graph = GPT(layers=2, hidden=64, heads=4, sequence=16, vocabulary=5000, tied=True).graph()
    prices = Prices(graph, cluster([1e12, 1e12], memory=memory), Costs())
    pipeline = shape_pipeline(Config({"pipeline.num_stages": 2, "pipeline.schedule": "zb_v", "pipeline.num_micro_batch": 2}), None, 2)
    points = find_cut_points(analyse(graph), prices, kept_under(prices, KEEP_ALL))
    return StageTables(points, Pieces(prices, points, 4), prices, pipeline, KEEP_ALL)


def test_a_rank_holds_what_its_stages_share_once() -> None:
    tables, placed = tied_in_two_chunks(2**30), (("h0/0",), ("h0/1",))
    graph, points = tables.prices.graph, tables.points
    for inner in list(combinations(range(1, points.num_units), 3))[::37]:
        bounds = 0, *inner, points.num_units
        loads, (on_ranks, _) = tables.loads(placed, 2, bounds), tables.on_ranks(placed, 2, bounds)
        pieces = [points.spine[points.bounds[start] : points.bounds[stop]] for start, stop in pairwise(bounds)]
        names = [{each.name for op in piece for each in graph.parameters_among(points.structure.inputs[op])} for piece in pieces]
        for rank, (first, second) in enumerate(((0, 3), (1, 2))):
            twice = sum(map(tables.prices.parameter_bytes, names[first] & names[second]))
            assert on_ranks[rank] == loads[first] + loads[second] - twice


def test_a_stage_may_take_more_of_its_rank_than_another() -> None:
    placed, roomy = (("h0/0",), ("h0/1",)), tied_in_two_chunks(2**30)
    look = likeness_of(placed, roomy.prices.cluster)
    best = cut_into_stages(roomy, placed, 2, 1.0, look).units
    needed = int(roomy.on_ranks(placed, 2, best)[0].max())
    assert roomy.loads(placed, 2, best).max() > needed / 2  # more than an equal part of its rank
    tight = tied_in_two_chunks(round(1.01 * needed / roomy.prices.costs.memory_fraction))
    assert cut_into_stages(tight, placed, 2, 1.0, look).units == best


def tables_of(graph: ModelGraph, hosts: Cluster, num_ranks: int, schedule: str, num_chunks: int = 1) -> StageTables:
    prices = Prices(graph, hosts, Costs())
    asked = {"num_stages": num_ranks, "schedule": schedule, "num_chunks": num_chunks, "num_micro_batch": 4}
    pipeline = shape_pipeline(Config({f"pipeline.{key}": value for key, value in asked.items()}), None, num_ranks)
    points = find_cut_points(analyse(graph), prices, kept_under(prices, KEEP_ALL))
    return StageTables(points, Pieces(prices, points, 8), prices, pipeline, KEEP_ALL)


@pytest.mark.parametrize("number", range(1, 16, 2))
def test_a_stage_receives_what_it_reads_and_gradients_of_what_is_read_elsewhere(number: int) -> None:
    """Each over the link between two ranks: nothing for what passes a stage, or stays on its rank."""
    graph, placed = drawn_graph(random.Random(number), scoped=False), (("h0/0",), ("h0/1",), ("h1/0",))
    hosts = cluster((1e9, 2e9), (3e9,))
    free = Cluster("free", tuple(replace(host, link=Link(1e300, 0.0)) for host in hosts.hosts), Link(1e300, 0.0))
    for num_ranks, schedule, num_chunks in ((2, "interleaved", 2), (2, "zb_v", 2), (3, "1f1b", 1)):
        tables, computing = (tables_of(graph, each, num_ranks, schedule, num_chunks) for each in (hosts, free))
        points, prices, ranks = tables.points, tables.prices, tables.pipeline.stage_rank
        for inner in combinations(range(1, points.num_units), len(ranks) - 1):
            units = (0, *inner, points.num_units)
            cut = Partition(tuple(points.bounds[list(units)].tolist()), units, lambda _: 0.0)
            expected, received = np.array(computing.by_stage(placed, 2, units)), np.zeros(len(ranks))
            for stage, part in enumerate(assign(graph, points.structure, wishes_of(points, cut), len(ranks))[0].parts):
                for source, line, count in prices.part(part, 2.0).sends:
                    if ranks[source] != ranks[stage]:
                        link = prices.link(placed[ranks[source]][0], placed[ranks[stage]][0])
                        received[[source, stage]] += (line.at(2) / link.bandwidth + count * link.latency) / 2
            assert tables.by_stage(placed, 2, units) == pytest.approx(expected + received, rel=1e-9)


def test_what_stays_on_a_rank_does_not_push_the_cut_aside() -> None:
    """Each chunk hands a value past the next one, to its own rank; over the link goes only what the third one makes."""
    graph = Graph()
    x = graph.input("x", 64)
    first = graph.linear("first", x, width=64)
    second = graph.linear("second", x, width=64)
    both = graph.call("both", "aten.add.Tensor", first, x, width=64, tags=["pointwise"])
    third = graph.linear("third", both, width=64)
    graph.sum_loss(graph.call("joined", "aten.add.Tensor", third, second, width=64, tags=["pointwise"]))
    hosts = Cluster("slow", tuple(replace(host, link=Link(2e7, 1e-6)) for host in cluster((2e9, 1e10)).hosts), None)
    placed, tables = (("h0/0",), ("h0/1",)), tables_of(graph.build(), hosts, 2, "interleaved", 2)
    points = tables.points
    chosen = cut_into_stages(tables, placed, 4, 1.0, likeness_of(placed, hosts))
    every = [(0, *inner, points.num_units) for inner in combinations(range(1, points.num_units), 3)]
    assert chosen.slowest == min(max(tables.by_stage(placed, 4, units)) for units in every)
    stages = [points.spine[start:stop] for start, stop in pairwise(chosen.bounds)]
    assert stages == [("first",), ("second",), ("both",), ("third", "joined", "loss")]
