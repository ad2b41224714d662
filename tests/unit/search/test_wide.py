"""On models that are no chains, and clusters whose links differ, the search finds the fastest plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.planning.graphs import Graph
from tests.unit.search.exhaustive import space_of
from tests.unit.search.test_search import GIB, NETWORKS, clusters, is_exhaustive, layers, made
from whale.config import Config
from whale.ir.cluster import Cluster, Link
from whale.ir.graph import ModelGraph
from whale.planning import make_plan
from whale.search import search

WIDTH = 16


def encoder_decoder(depth: int) -> ModelGraph:
    """Layers over one input, and layers over another, each of which reads the last of the first."""
    graph = Graph()
    memory, value = graph.input("x", WIDTH), graph.input("y", WIDTH)
    for index in range(depth):
        memory = layer(graph, f"encoder{index}", memory)
    for index in range(depth):
        value = graph.call(
            f"crossed{index}", "aten.add.Tensor", layer(graph, f"decoder{index}", value), memory, width=WIDTH, tags=["pointwise"]
        )
    graph.sum_loss(value)
    return graph.build()


def skipping(depth: int) -> ModelGraph:
    """Layers, of which the last ones read the first ones' results, as in a U-Net."""
    graph = Graph()
    values = [graph.input("x", WIDTH)]
    for index in range(depth):
        values.append(layer(graph, f"down{index}", values[-1]))
    value = values[-1]
    for index, skipped in enumerate(values[::-1]):
        value = graph.call(f"added{index}", "aten.add.Tensor", layer(graph, f"up{index}", value), skipped, width=WIDTH, tags=["pointwise"])
    graph.sum_loss(value)
    return graph.build()


def tied(depth: int) -> ModelGraph:
    """Layers of which the first and the last share a weight."""
    graph = Graph()
    value = layer(graph, "first", graph.input("x", WIDTH), "shared")
    for index in range(depth):
        value = layer(graph, f"layer{index}", value)
    graph.sum_loss(layer(graph, "last", value, "shared"))
    return graph.build()


def layer(graph: Graph, name: str, value: str, weight: str | None = None) -> str:
    own = graph.parameter(f"{weight or name}.weight", WIDTH, WIDTH)
    return graph.call(name, "aten.linear.default", value, own, width=WIDTH, flops=8 * WIDTH * WIDTH)


models = st.tuples(st.sampled_from((encoder_decoder, skipping, tied)), st.integers(1, 2)).map(lambda drawn: drawn[0](drawn[1]))


@st.composite
def uneven_clusters(draw: st.DrawFn, num_devices: int) -> Cluster:
    """Some hosts have a card that their devices share, or a bus, and some pairs of hosts a link of their own."""
    cluster = draw(clusters(num_devices))
    hosts = [
        replace(host, card=draw(st.sampled_from((None, 1e7))), link=replace(host.link, shared=draw(st.booleans())))
        for host in cluster.hosts
    ]
    names = sorted(host.name for host in hosts)
    pairs = [(a, b) for number, a in enumerate(names) for b in names[number + 1 :]]
    own = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=1)) if pairs else []
    links = tuple((pair, Link(draw(st.sampled_from(NETWORKS)), 1e-5)) for pair in own)
    return replace(cluster, hosts=tuple(hosts), pairs=links)


@settings(max_examples=3)
@given(graph=models, cluster=uneven_clusters(2), rows=st.integers(1, 4))
def test_equals_the_best_of_all_plans_on_two_devices(graph: ModelGraph, cluster: Cluster, rows: int) -> None:
    is_exhaustive(graph, cluster, rows)


@pytest.mark.slow
@settings(max_examples=10)
@given(graph=models, cluster=uneven_clusters(3), rows=st.integers(1, 4))
def test_equals_the_best_of_all_plans_on_three_devices(graph: ModelGraph, cluster: Cluster, rows: int) -> None:
    is_exhaustive(graph, cluster, rows)


def test_hosts_of_one_kind_are_left_out_where_the_network_is_slow() -> None:
    hosts = [[(1e9, GIB)] * 3] * 2
    one = make_plan(layers([64] * 6), made(hosts[:1], network=1e5), Config(), rows=12)
    both = search(layers([64] * 6), made(hosts, network=1e5), Config(), rows=12)
    assert both.value <= one.step_seconds and len(both.plan.devices) <= 3


@pytest.mark.parametrize("per_host", [1, 3])
def test_plans_with_a_kind_are_all_plans_but_those_without_it(per_host: int) -> None:
    cluster = made([[(1e9, GIB)] * per_host, [(2e9, GIB)] * per_host], network=1e9)
    space = space_of(layers([64] * 6), cluster, 12)
    for kind in space.space.counts:
        using = replace(space.space, freedom=replace(space.space.freedom, using=kind))
        every = space.space.lineups(space.alone)
        wanted = [strategy for strategy in every if any(kind in replica.taken for replica in strategy.replicas)]
        assert list(using.lineups(space.alone)) == wanted and len({len(strategy.replicas) for strategy in wanted}) > 1
