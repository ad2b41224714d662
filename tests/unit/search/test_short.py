"""Memories that are just enough: what fits by the estimate is found, however little room there is."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from tests.unit.planning.graphs import Graph, cluster
from tests.unit.search.exhaustive import every_strategy, least_divided, recomputing, replica_of, seater_of
from tests.unit.search.many import drawn_cluster, drawn_graph
from tests.unit.search.test_search import layers
from whale.config import Config
from whale.errors import ConfigError, OutOfMemory
from whale.estimate import Costs
from whale.ir.cluster import Cluster
from whale.planning.plan import plan_and_estimate
from whale.planning.replicas.solve import most_rows
from whale.planning.strategy import Strategy
from whale.search import search
from whale.search.freedom import FOR_MEMORY, ORDERS, Order, freedom_of


def with_room(given: Cluster, num_bytes: float) -> Cluster:
    """The same devices, each with so much to fill."""
    memory = math.ceil(num_bytes / Costs.of(Config()).memory_fraction) + 1
    hosts = (replace(host, devices=tuple(replace(own, memory=memory) for own in host.devices)) for host in given.hosts)
    return replace(given, hosts=tuple(hosts))


def test_weights_that_stages_of_one_rank_share_are_held_once() -> None:
    graph = Graph()
    value = graph.input("x", 64)
    for index, weight in enumerate(("outer", "inner", "inner", "outer")):
        value = graph.linear(f"layer{index}", value, weight, width=64)
    graph.sum_loss(value)
    built, roomy = graph.build(), cluster((1e9, 1e9))
    own = replace(replica_of((("h0/0",), ("h0/1",)), roomy, Order("zb_v", 2), 4), recompute="none")
    found = seater_of(built, roomy, Config(), 8).realize(Strategy((own,)))
    tight = with_room(roomy, 1.02 * max(each.peak.total for each in found.step.devices))
    model, _ = seater_of(built, tight, Config(), 8).solver(own, "none").model(own.names or (), 8, 1.0, 1.0)
    assert model.curve.excess[8] == 0


@pytest.mark.parametrize("policy", ["none", "blocks"])
def test_a_plan_fits_in_what_the_estimate_says_that_it_needs(policy: str) -> None:
    graph, roomy, config = layers([64] * 4), cluster((1e9,)), Config({"recompute.policy": policy, "planning.search": "off"})
    plan, step = plan_and_estimate(graph, roomy, config, rows=8)
    need = max(each.peak.total for each in step.devices)
    again, _ = plan_and_estimate(graph, with_room(roomy, need), config, rows=8)
    assert [stage.program for stage in again.replicas[0].stages] == [stage.program for stage in plan.replicas[0].stages]


@pytest.mark.parametrize("number", [43, 66, 70, 227])
def test_any_plan_fits_in_what_the_estimate_says_that_it_needs(number: int) -> None:
    draw, config = random.Random(number), freedom_of(Config(), mixes_samples=False).config
    graph, devices, rows = drawn_graph(draw, scoped=False), drawn_cluster(draw, 2), draw.randint(1, 9)
    roomy = seater_of(graph, with_room(devices, 2**40), config, rows)
    for strategy in draw.sample(list(every_strategy(devices, rows)), 4):
        policy = draw.choice(["none", "blocks", "full", "auto"])
        own = recomputing(strategy, policy)
        try:
            need = max(each.peak.total for each in roomy.realize(own).step.devices)
        except ConfigError:
            continue  # more chunks than the model has places to cut
        seater_of(graph, with_room(devices, need), config, rows).realize(own)


@pytest.mark.parametrize("policy", ["none", "auto"])
def test_where_all_can_be_kept_the_bound_of_rows_says_so(policy: str) -> None:
    graph, roomy = layers([64] * 4), cluster((1e9,))
    config = Config({"recompute.policy": policy, "planning.search": "off"})
    plan, step = plan_and_estimate(graph, roomy, config, rows=64)
    just = with_room(roomy, max(each.peak.total for each in step.devices))
    seater = seater_of(graph, just, config, 64)
    placed = ((just.devices[0].name,),)
    solver = seater.solver(replica_of(placed, just, ORDERS[0], 1), "none")
    assert most_rows(seater.prices, solver.pipeline, placed) >= 64
    again, _ = plan_and_estimate(graph, just, config, rows=64)
    assert [stage.program for stage in again.replicas[0].stages] == [stage.program for stage in plan.replicas[0].stages]


@pytest.mark.parametrize("number", [14, 16, 33])
def test_what_the_plain_way_finds_in_short_memories_is_found(number: int) -> None:
    draw = random.Random(number)
    graph, roomy, rows = drawn_graph(draw, scoped=True), drawn_cluster(draw, 2), draw.randint(1, 9)
    smallest = search(graph, with_room(roomy, 2**30), Config({"planning.objective": "memory", "memory.zero": "0"}), rows=rows)
    short = with_room(roomy, smallest.value)
    every = [least_divided(graph, short, Config({"recompute.policy": policy}), rows) for policy in ("auto", *FOR_MEMORY)]
    assert any(seconds is not None for seconds in every)
    assert search(graph, short, Config({"memory.zero": "0"}), rows=rows).value > 0


def test_a_lack_of_memory_on_hosts_is_said_beside_that_on_devices() -> None:
    """Pipelines fit on devices, and not what they keep on the host; single devices have too little memory themselves."""
    config = Config({"memory.offload": "optimizer", "memory.zero": "0"})
    graph, roomy = layers([64] * 4), cluster((1e9, 1e9))
    least = search(graph, roomy, config.with_values({"planning.objective": "memory"}), rows=8).value
    short = with_room(roomy, least)
    short = replace(short, hosts=tuple(replace(host, memory=1000) for host in short.hosts))
    with pytest.raises(
        OutOfMemory, match=r"(?s)out of memory on h0/0.*or more memory on hosts.*\nout of memory on host h0: .*, 1000 B usable"
    ):
        search(graph, short, config, rows=8)
