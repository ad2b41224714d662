"""Whether tensors between split stages cross in parts, and what the plan says of it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.planning.graphs import device
from tests.unit.planning.shard.test_sharding_scopes import mlp, split
from whale.config import Config
from whale.ir.cluster import Cluster, Host, Link
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning import make_plan
from whale.planning.verify import verify


def two_stages() -> ModelGraph:
    """Two feed-forward blocks, each in a split stage of its own."""
    return mlp((split(0, name="front"),), (split(1, name="back"),))


def hosts(between: float) -> Cluster:
    """Two hosts of two devices on fast links, with a link of so many bytes per second between them."""
    made = tuple(Host(host, tuple(device(f"{host}/{index}", host) for index in range(2)), Link(1e11, 1e-9)) for host in "ab")
    return Cluster("hosts", made, Link(between, 1e-9))


def arriving(plan: Plan) -> list[str]:
    return [name for shard in plan.replicas[0].stages[1].shards for name in shard.arriving]


@pytest.mark.parametrize(("between", "crosses_in_parts"), [(1e6, True), (1e12, False)])
def test_tensors_cross_in_parts_where_the_link_is_slow(between: float, crosses_in_parts: bool) -> None:
    plan = make_plan(two_stages(), hosts(between), Config())
    assert bool(arriving(plan)) == crosses_in_parts
    told = [choice for choice in plan.choices if "gathered on arrival" in choice.decision]
    assert len(told) == crosses_in_parts


def test_what_is_handed_on_in_parts_may_arrive_whole() -> None:
    graph, cluster = two_stages(), hosts(1e6)
    plan = make_plan(graph, cluster, Config())
    replica = plan.replicas[0]
    whole = dataclasses.replace(
        replica.stages[1], shards=tuple(dataclasses.replace(shard, arriving=()) for shard in replica.stages[1].shards)
    )
    verify(dataclasses.replace(plan, replicas=(dataclasses.replace(replica, stages=(replica.stages[0], whole)),)), graph, cluster)


def test_groups_may_be_of_unlike_sizes() -> None:
    graph = mlp((split(0, name="front"),), (split(1, count=3, name="back"),))
    made = [
        Host(host, tuple(device(f"{host}/{index}", host) for index in range(count)), Link(1e11, 1e-9))
        for host, count in (("a", 2), ("b", 3))
    ]
    plan = make_plan(graph, Cluster("hosts", tuple(made), Link(1e6, 1e-9)), Config())
    (told,) = [choice.decision for choice in plan.choices if "gathered on arrival" in choice.decision]
    sizes = [[len(shard.sizes) for shard in stage.shards if shard.arriving or shard.handed_on] for stage in plan.replicas[0].stages]
    assert " to " in told and sizes == [[2], [3]]
