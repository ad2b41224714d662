"""Few communicators: equal sets of ranks share one, and a pair of ranks has one for each direction, or one for both if they take turns."""

from __future__ import annotations

import pytest

from tests.unit.planning.graphs import chain, cluster
from whale.config import Config
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.planning import make_plan
from whale.schedules import BUILDERS, schedules_of
from whale.sharding.communicators import MANY, MANY_FOR_A_RANK, Communicators, communicators_of
from whale.sharding.parameters import parameter_shardings


def plan_of(config: Config, num_devices: int) -> tuple[Plan, ModelGraph]:
    graph = chain(4, width=64)
    return make_plan(graph, cluster((1e9,) * num_devices), config, rows=16), graph


def of_plan(plan: Plan, graph: ModelGraph, num_idle: int = 0) -> Communicators:
    num_ranks = len(plan.devices) + num_idle
    return communicators_of(plan, graph, parameter_shardings(plan, graph, None), schedules_of(plan), num_ranks)


def test_counts_and_text() -> None:
    made = Communicators(((0, 1), (0, 1, 2, 3), (2, 3)), (((0, 2), (2, 0)), ((1, 3),), ((3, 1),)))
    assert len(made) == 6 and made.most_of_a_rank == 4
    assert str(made) == "communicators: 3 collective, 3 point-to-point; at most 4 on one device"
    assert made.warning is None


@pytest.mark.parametrize(("channels", "most"), [(MANY_FOR_A_RANK + 1, MANY_FOR_A_RANK + 1), (MANY + 1, 1)])
def test_many_are_warned_of(channels: int, most: int) -> None:
    pairs = [(0, target + 1) for target in range(channels)] if most > 1 else [(2 * channel, 2 * channel + 1) for channel in range(channels)]
    made = Communicators((), tuple((pair,) for pair in pairs))
    assert made.most_of_a_rank == most
    assert made.warning is not None and f"{channels} communicators, {most} of them on one device" in made.warning


def test_of_a_plan() -> None:
    plan, graph = plan_of(Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": 3}), 4)
    made = of_plan(plan, graph)
    assert made.groups == ((0, 1, 2, 3), (0, 2), (1, 3)), "all, and the owners of each stage"
    assert made.channels == (((0, 1),), ((1, 0),), ((2, 3),), ((3, 2),)), "within replicas only"


@pytest.mark.parametrize("schedule", sorted({*BUILDERS} - {"zb_v"}))
@pytest.mark.parametrize("num_micro_batch", [1, 4])
def test_pairs_share_one_where_nothing_forward_is_launched_after_anything_backward(schedule: str, num_micro_batch: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    settings = {"num_stages": 2, "schedule": schedule, "num_micro_batch": num_micro_batch, "num_chunks": chunks}
    plan, graph = plan_of(Config({f"pipeline.{name}": value for name, value in settings.items()}), 2)
    first = [str(action) for action in schedules_of(plan)[0].ranks[0] if action.kind.value.startswith(("SEND", "POST"))]
    forward = ["_F" in each for each in first]
    is_in_turn = forward == sorted(forward, reverse=True) and chunks == 1  # with chunks rank 1 sends forward too
    assert of_plan(plan, graph).channels == ((((0, 1), (1, 0)),) if is_in_turn else (((0, 1),), ((1, 0),)))
    assert is_in_turn or (schedule, num_micro_batch) not in {("gpipe", 4), ("1f1b", 1)}
    assert not is_in_turn or (schedule, num_micro_batch) != ("1f1b", 4)


def test_equal_sets_share_one_and_nothing_travels_between_replicas() -> None:
    plan, graph = plan_of(Config(), 2)
    made = of_plan(plan, graph)
    assert made.groups == ((0, 1),) and made.channels == (), "the owners of all gradients are all ranks"
    assert of_plan(plan, graph, num_idle=2).groups == ((0, 1), (0, 1, 2, 3)), "with idle ranks they are not"


def test_what_only_idle_ranks_sum_is_a_communicator_too() -> None:
    plan, graph = plan_of(Config({"pipeline.num_stages": 2}), 2)
    assert of_plan(plan, graph).groups == ((0, 1),), "all"
    assert of_plan(plan, graph, num_idle=1).groups == ((0, 1, 2),), "the stages have nothing to sum"
