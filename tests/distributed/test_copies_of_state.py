"""The law where groups of ranks, such as those of a host, each keep a copy of sharded state, and weights do not leave their group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from tests import reference
from tests.distributed.split_training import plan_case
from tests.distributed.test_state_law import assert_as_planned, check_equal, come_late, trained_bytes, with_state
from tests.distributed.test_unlike_replicas import CLIPPED, ONE, SPLIT, TWO, Blocks, unlike
from tests.distributed.training import Case, largest_of, make_cluster, make_engine, run_case, train_reference, trained
from tests.distributed.world import RankFailure, World
from tests.examples import further
from whale.comm import Groups
from whale.estimate import estimate
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan, Zero
from whale.runtime.state.gradient_sync import GradientSync

BY_NAME: Zero = (("*0*", 0), ("*1*", 3), ("*weight", 2), ("*", 1))
TWO_ROWS = ONE | {"num_micro_batch": 2}


@dataclass(frozen=True)
class Kept:
    """How a case keeps its state: replicas, the group and the weight of each rank, and settings of the case."""

    replicas: Blocks
    groups: tuple[int, ...]
    shares: tuple[int, ...] = ()
    config: tuple[tuple[str, Any], ...] = CLIPPED


FIXED: dict[str, Kept] = {
    "two and two": Kept((ONE, ONE, ONE, ONE), (0, 0, 1, 1)),
    "two and two, cut at other rows": Kept((ONE, ONE, ONE, ONE), (0, 0, 1, 1), (3, 1, 2, 5)),
    "one and two": Kept((ONE, ONE, ONE), (0, 1, 1), (1, 2, 3)),
    "a copy on each": Kept((ONE, ONE, TWO_ROWS), (0, 1, 2)),
    "groups across the order of ranks": Kept((ONE, ONE, ONE, ONE), (0, 1, 0, 1)),
    "split and whole": Kept((SPLIT, ONE, ONE), (0, 0, 1, 1), (2, 1, 1, 3)),
    "split otherwise in each": Kept((SPLIT, SPLIT | {"num_micro_batch": 2}), (0, 0, 1, 1)),
    "stages of a replica in two groups": Kept((TWO, TWO), (0, 1, 0, 1)),
    "unlike schedules between groups": Kept((TWO | {"schedule": "gpipe"}, ONE, ONE), (0, 0, 1, 1), (1, 2, 2, 1)),
    "zero bubble": Kept((TWO | {"schedule": "zb_h1"}, TWO | {"schedule": "zb_h1"}), (0, 1, 0, 1)),
}


MIXED = ("two and two, cut at other rows", "one and two", "split and whole", "stages of a replica in two groups")
ALIKE: tuple[Zero, ...] = (1, 2, 3, 3)
"""What each of these shares out of all parameters; the cases by names share out some of each."""


def kept_case(kept: Kept, **more: Any) -> Case:
    return unlike(*kept.replicas, config=kept.config, optimizer="adam", evaluates=True, **more)


def in_groups(plan: Plan, graph: ModelGraph, kept: Kept, zero: Zero, home: str = "device") -> Plan:
    return with_state(plan, graph, zero, home, kept.shares, groups=kept.groups)


SHARED_OUT = [*zip(MIXED, ALIKE, strict=True)]


@pytest.mark.parametrize(
    ("name", "zero"), [*product(FIXED, [BY_NAME]), *SHARED_OUT, *further(own for own in product(MIXED, [1, 2, 3]) if own not in SHARED_OUT)]
)
def test_law(world: World, name: str, zero: Zero) -> None:
    """Half of the steps in groups, then without them, by a checkpoint or by replanning."""
    kept = FIXED[name]
    case = kept_case(kept)
    plan, graph = world.prepare(plan_case, case)
    plans = in_groups(plan, graph, kept, zero), with_state(plan, graph, 2)
    check_equal(world, case, plans if zero != 3 else plans[::-1], train_reference(case), saves=zero in (1, 3))


@pytest.mark.parametrize(("zero", "home"), [(2, "host"), (3, "weights"), *further([(3, "host"), (2, "weights")])])
def test_law_of_state_on_hosts(world: World, zero: Zero, home: str) -> None:
    kept = FIXED["two and two, cut at other rows"]
    case = kept_case(kept)
    plan, graph = world.prepare(plan_case, case)
    check_equal(world, case, (in_groups(plan, graph, kept, zero, home),) * 2, train_reference(case), saves=True)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", MIXED)
def test_memory_is_the_plans_to_the_byte(world: World, name: str, zero: Zero) -> None:
    kept = replace(FIXED[name], config=())
    case = replace(kept_case(kept), evaluates=False)
    plan, graph = world.prepare(plan_case, case)
    plan = in_groups(plan, graph, kept, zero)
    expected = estimate(plan, graph, make_cluster(case.speeds))
    alone = estimate(replace(plan, keeper_groups=()), graph, make_cluster(case.speeds))
    for device, read, summed, own, on_host in run_case(world, trained_bytes, case, plan):
        assert_as_planned(expected.of(device), read, summed, own, on_host)
    held = [sum(each.of(device).peak.optimizer for device in plan.devices) for each in (expected, alone)]
    if name != "stages of a replica in two groups":  # of which each group has others
        assert held[0] == len(set(kept.groups)) * held[1]


def test_sums_are_rounded_inside_and_between_groups(world: World) -> None:
    kept = FIXED["two and two, cut at other rows"]
    case = kept_case(kept)
    plan, graph = world.prepare(plan_case, case)
    plan = in_groups(plan, graph, kept, 2)
    rounded = tuple(state if state.gradient is None else replace(state, sum_dtype="float32") for state in plan.parameter_states)
    runs = run_case(world, trained_by, case, replace(plan, parameter_states=rounded))
    assert 1e-12 < largest_of(runs, train_reference(case))[0] < 1e-4


def trained_by(rank: int, size: int, case: Case, plan: Plan) -> reference.Run:
    return trained(make_engine(case, plan), case)


def train_without_second_sums(rank: int, size: int, case: Case, plan: Plan) -> reference.Run:
    with mock.patch.object(GradientSync, "_cross", lambda self: self._to_cross.clear()):
        return trained(make_engine(case, plan), case)


@pytest.mark.parametrize("zero", [1, 3])
def test_the_law_would_notice_groups_that_sum_alone(world: World, zero: Zero) -> None:
    kept = FIXED["two and two"]
    case = kept_case(kept)
    plan, graph = world.prepare(plan_case, case)
    with pytest.raises(RankFailure, match="weights differ between ranks"):
        run_case(world, train_without_second_sums, case, in_groups(plan, graph, kept, zero))


def sent_by(rank: int, size: int, case: Case, plan: Plan) -> dict[str, set[tuple[int, ...]]]:
    """The sets of ranks of each kind of collective of a step."""
    found: dict[str, set[tuple[int, ...]]] = {}

    def noted(kind: str) -> Any:
        start = getattr(Groups, kind)

        def note(self: Groups, tensor: torch.Tensor, ranks: tuple[int, ...], *root: int) -> Any:
            found.setdefault(kind, set()).add(ranks)
            return start(self, tensor, ranks, *root)

        return mock.patch.object(Groups, kind, note)

    engine = make_engine(case, plan)
    with come_late(), noted("reduce"), noted("broadcast"), noted("all_reduce"):
        engine.step(case.batches[0])
    engine.close()
    return found


@pytest.mark.parametrize("zero", [2, 3])
def test_only_sums_of_parts_go_from_group_to_group(world: World, zero: Zero) -> None:
    kept = FIXED["groups across the order of ranks"]
    case = kept_case(kept)
    plan, graph = world.prepare(plan_case, case)
    groups = {(0, 2), (1, 3)}
    for found in run_case(world, sent_by, case, in_groups(plan, graph, kept, zero)):
        assert found["reduce"] | found["broadcast"] <= groups
        assert found["all_reduce"] <= {(0, 1), (2, 3)}


def test_a_split_group_keeps_one_copy(world: World) -> None:
    kept = Kept((SPLIT, ONE), (0, 1, 1))
    case = kept_case(kept)
    plan, graph = world.prepare(plan_case, case)
    with pytest.raises(
        RankFailure, match=r"a split group lies in several groups that keep copies of sharded state \(\{'host0/0': 0, "
    ) as caught:
        run_case(world, trained_bytes, case, in_groups(plan, graph, kept, 2))
    assert "give the devices of a split group one number" in str(caught.value)
