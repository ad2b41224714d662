"""Few communicators: equal sets of ranks share one, and a pair of ranks has one for each direction in which something travels."""

from __future__ import annotations

import pytest

from tests.unit.planning.graphs import chain, cluster
from whale.config import Config
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning import make_plan
from whale.sharding.communicators import MANY, MANY_FOR_A_RANK, Communicators, communicators_of
from whale.sharding.parameters import parameter_shardings


def plan_of(config: Config, num_devices: int) -> tuple[Plan, ModelGraph]:
    graph = chain(4, width=64)
    return make_plan(graph, cluster((1e9,) * num_devices), config, rows=16), graph


def test_counts_and_text() -> None:
    made = Communicators(((0, 1), (0, 1, 2, 3), (2, 3)), ((0, 2), (2, 0), (1, 3)))
    assert len(made) == 6 and made.most_of_a_rank == 4
    assert str(made) == "communicators: 3 collective, 3 point-to-point; at most 4 on one device"
    assert made.warning is None


@pytest.mark.parametrize(("channels", "most"), [(MANY_FOR_A_RANK + 1, MANY_FOR_A_RANK + 1), (MANY + 1, 1)])
def test_many_are_warned_of(channels: int, most: int) -> None:
    pairs = [(0, target + 1) for target in range(channels)] if most > 1 else [(2 * channel, 2 * channel + 1) for channel in range(channels)]
    made = Communicators((), tuple(pairs))
    assert made.most_of_a_rank == most
    assert made.warning is not None and f"{channels} communicators, {most} of them on one device" in made.warning


def test_of_a_plan() -> None:
    plan, graph = plan_of(Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2}), 4)
    made = communicators_of(plan, graph, parameter_shardings(plan, graph, None))
    assert made.groups == ((0, 1, 2, 3), (0, 2), (1, 3)), "all, and the owners of each stage"
    assert made.channels == ((0, 1), (1, 0), (2, 3), (3, 2)), "within replicas only"


def test_equal_sets_share_one_and_nothing_travels_between_replicas() -> None:
    plan, graph = plan_of(Config(), 2)
    made = communicators_of(plan, graph, parameter_shardings(plan, graph, None))
    assert made.groups == ((0, 1),) and made.channels == (), "the owners of all gradients are all ranks"
