"""Each host keeps a copy of sharded state where the settings say so, or where that is open, fits and is faster."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from tests.unit.planning.graphs import chain, cluster
from whale.config import Config
from whale.errors import OutOfMemory, PlanError
from whale.estimate import estimate
from whale.estimate.costs.communication import Fabric, within_and_between
from whale.ir.cluster import Cluster, Link
from whale.ir.plan import Choice, Plan
from whale.ir.serialization import from_json, to_json
from whale.planning import make_plan, pricing
from whale.planning.verify.verify import verify
from whale.search import decide

WIDTH, NUM_LAYERS = 64, 4
WEIGHTS = NUM_LAYERS * WIDTH * WIDTH * 4
GRAPH = chain(NUM_LAYERS, width=WIDTH)


def on(*hosts: int, memory: int = 2**30, network: float = 1e6) -> Cluster:
    """Hosts with so many devices, and a network of so many bytes per second."""
    return replace(cluster(*((1e9,) * number for number in hosts), memory=memory), network=Link(network, 1e-8))


def planned(where: Cluster, zero: str = "3", within: str = "auto", **settings: object) -> Plan:
    named = {name.replace("__", "."): value for name, value in settings.items()}
    config = {"memory.zero": zero, "memory.zero_within": within, "memory.fraction": 1.0, "planning.search": "off", **named}
    return make_plan(GRAPH, where, Config(config), rows=16)


def choice(plan: Plan) -> Choice | None:
    return next((each for each in plan.choices if each.subject == "sharded state"), None)


def test_each_host_keeps_a_copy_where_that_is_faster() -> None:
    where = on(2, 2)
    plan, together, apart = (planned(where, within=within) for within in ("auto", "all", "host"))
    assert plan.keeper_groups == apart.keeper_groups == (0, 0, 1, 1) and not together.keeper_groups
    assert plan.step_seconds == apart.step_seconds < together.step_seconds
    said = choice(plan)
    assert said is not None and said.decision == "each host keeps a copy of it"
    assert said.runner_up.startswith("all devices keep one copy of it: ") and choice(together) is choice(apart) is None
    assert "what is sharded over owners has 2 copies: h0/0, h0/1; h1/0, h1/1" in str(plan)
    assert from_json(Plan, to_json(plan)) == plan


def test_hosts_have_room_for_their_copies() -> None:
    """What a faster plan would keep in the memory of hosts must fit there."""
    roomy, settings = on(2, 2), {"memory__offload": "optimizer", "pipeline__num_micro_batch": 4}
    assert planned(roomy, **settings).keeper_groups
    small = replace(roomy, hosts=tuple(replace(host, memory=3 * WEIGHTS) for host in roomy.hosts))
    assert not planned(small, **settings).keeper_groups
    with pytest.raises(OutOfMemory, match="out of memory on host h0") as caught:
        planned(small, within="host", **settings)
    assert "memory.zero_within: all" in str(caught.value)


def test_weights_are_gathered_over_the_links_of_a_host_alone() -> None:
    """With three times the micro-batches the slow network takes no more; where all devices keep one copy it takes the gathers too."""

    def more(within: str) -> float:
        few, many = (
            planned(on(2, 2, network=1e5), within=within, pipeline__num_micro_batch=number, communication__bucket_bytes="1")
            for number in (1, 3)
        )
        return many.step_seconds - few.step_seconds

    gathers = 2 * 2 * (WEIGHTS / 2) / (2 * 1e5)  # of two micro-batches, forward and backward, what the other host has, by two devices
    assert more("all") == pytest.approx(gathers, rel=0.01)
    assert more("host") < 0.01 * gathers


def test_what_is_kept_on_each_host_must_fit() -> None:
    where = on(2, 2, memory=round(3.2 * WEIGHTS))
    together, apart = planned(on(2, 2), "2", "all"), planned(on(2, 2), "2", "host")
    needed = [max(each.peak.total for each in estimate(own, GRAPH, where).devices) for own in (together, apart)]
    tight = on(2, 2, memory=round(sum(needed) / 2))
    assert needed[0] < needed[1]
    plan = planned(tight, "2")
    said = choice(plan)
    assert not plan.keeper_groups and said is not None and said.runner_up == "each host keeps a copy of it: does not fit"
    with pytest.raises(PlanError):
        planned(tight, "2", "host")


@pytest.mark.parametrize(
    ("hosts", "settings"),
    [((4,), {}), ((2, 2), {"zero": "0"}), ((2, 2), {"within": "all"}), ((2, 2), {"planning__objective": "memory"})],
)
def test_nothing_more_is_estimated_where_it_cannot_help(hosts: tuple[int, ...], settings: dict[str, str]) -> None:
    search = {"planning__search": "auto"} if "planning__objective" in settings else {}
    with mock.patch.object(pricing, "_with_shares", side_effect=pricing._with_shares) as made:
        named = {name.replace("__", "."): value for name, value in (settings | search).items() if "__" in name}
        config = Config(
            {"memory.zero": settings.get("zero", "3"), "memory.zero_within": settings.get("within", "auto"), "planning.search": "off"}
        )
        plan, _ = decide(None, GRAPH, on(*hosts), config.with_values(named), rows=16)
    assert not plan.keeper_groups and choice(plan) is None
    assert made.call_count == 1 or search
    assert not any(own.args[0].keeper_groups for own in made.call_args_list)


def test_a_search_ranks_plans_with_copies() -> None:
    where = on(2, 2)
    found = {
        within: decide(None, GRAPH, where, Config({"memory.zero": "3", "memory.zero_within": within}), rows=16)[1].step_seconds
        for within in ("all", "auto", "host")
    }
    assert found["auto"] <= min(found.values())


@pytest.mark.parametrize(
    ("groups", "message"),
    [((0, 1), r"for 2 ranks \(\[0, 1\]\) of 4"), ((0, 0, 0, 0, 1), r"for 5 ranks \(\[0, 0, 0, 0, 1\]\) of 4")],
)
def test_every_rank_is_in_a_group(groups: tuple[int, ...], message: str) -> None:
    where = on(2, 2)
    with pytest.raises(PlanError, match=f"groups that keep copies of sharded state are given {message}"):
        verify(replace(planned(where), keeper_groups=groups), GRAPH, where)


def test_sums_inside_and_between() -> None:
    """Two hosts of four, and two groups of two hosts each: parts of a payload that pass each link, and hops."""
    over = Fabric(8, 2, 4, 4, 8.0, 2.0, 1e-6, 1e-4)
    way = within_and_between(over, 2)
    assert (way.inside, way.between) == (3 / 4, 2 * 1 / 2) and way.latency == pytest.approx(3e-6 + 2e-4)
    assert way.seconds_per_byte(over) == pytest.approx(max(3 / 4 / 8.0, 1.0 / 2.0))
    spread = within_and_between(Fabric(16, 4, 4, 4, 8.0, 2.0, 1e-6, 1e-4), 2)
    assert spread.between == 1.0 + 1 / 2, "the sum of a group crosses between its two hosts once"
