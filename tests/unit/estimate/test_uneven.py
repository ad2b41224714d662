"""Alike replicas on unlike hosts: told as one where their links are equally fast all the time, apart where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.planning.graphs import chain, device
from tests.unit.search.exhaustive import recomputing, replica_of
from whale.config import Config
from whale.estimate import Costs
from whale.estimate.events.engine import Task, Transfer, Uneven, run
from whale.estimate.prices.prices import Prices
from whale.estimate.step.estimate import estimate_with
from whale.estimate.step.program import Gathered, Program, gather, make_program
from whale.estimate.step.step import StepEstimate
from whale.ir.cluster import Cluster, Host, Link
from whale.ir.plan import Plan
from whale.planning.realizing import Realizer
from whale.planning.strategy import Strategy
from whale.search.freedom import Order

ROWS = 16


def hosts_of(sizes: Sequence[int], inside: Link, network: Link, card: float | None) -> Cluster:
    """Hosts of so many equal devices."""
    names = [(f"h{number}", size) for number, size in enumerate(sizes)]
    hosts = tuple(Host(name, tuple(device(f"{name}/{index}", name) for index in range(size)), inside, card=card) for name, size in names)
    return Cluster("uneven", hosts, network if len(hosts) > 1 else None)


def planned(cluster: Cluster, names: Sequence[str], num_ranks: int, schedule: str, m: int) -> tuple[Plan, Prices]:
    """Pipelines of so many ranks, one after another from these devices."""
    prices = Prices(chain(6, width=16), cluster, Costs())
    rows = [tuple((name,) for name in names[start : start + num_ranks]) for start in range(0, len(names), num_ranks)]
    replicas = tuple(replica_of(own, cluster, Order(schedule), m) for own in rows if len(own) == num_ranks)
    return Realizer(prices, Config(), ROWS).realize(recomputing(Strategy(replicas), "none")).plan, prices


def told(step: StepEstimate) -> dict[str, list[object]]:
    """What each device does when, and what it holds."""
    found: dict[str, list[object]] = {}
    for each in step.devices:
        spans = [time for span in each.compute for time in (span.start, span.end)]
        sent = sorted(time for message in each.messages for time in (message.start, message.end))
        summed = sorted(time for sync in each.syncs for time in (sync.start, sync.end))
        own = [*spans, *sent, *summed, each.exposed, *astuple(each.peak)]
        found |= dict.fromkeys(each.devices, own)
    return found


def whatever_goes_over_links(gathered: Gathered, *, by_links: bool) -> Program:
    return make_program(gathered, by_links=True)


def whether_even(plan: Plan, prices: Prices) -> tuple[bool, bool]:
    """Whether links that are alike by themselves are equally fast, and whether there are fewer classes of devices by them."""
    gathered = gather(plan, prices)
    one, apart = (make_program(gathered, by_links=by_links) for by_links in (False, True))
    try:
        run(one.tasks, one.transfers, one.bandwidths)
    except Uneven:
        return False, len(one.members) < len(apart.members)
    return True, len(one.members) < len(apart.members)


OWN, FAST = Link(1e6, 1e-5), Link(1e9, 1e-6)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    rates=st.tuples(st.floats(4, 9), st.floats(4, 9)),
    shared=st.booleans(),
    card=st.none() | st.floats(4, 9),
    shuffled=st.randoms(use_true_random=False) | st.none(),
    num_ranks=st.integers(2, 3),
    schedule=st.sampled_from(["1f1b", "zb_h1", "gpipe"]),
    m=st.sampled_from([1, 2, 4]),
)
@example(sizes=[3, 2, 3], rates=(6.0, 6.0), shared=False, card=6.0, shuffled=None, num_ranks=2, schedule="1f1b", m=4)
@example(sizes=[4, 1, 3], rates=(9.0, 9.0), shared=False, card=9.0, shuffled=None, num_ranks=2, schedule="1f1b", m=4)
def test_the_step_is_that_of_what_is_alike_whatever_goes_over_links(
    sizes: list[int],
    rates: tuple[float, float],
    shared: bool,
    card: float | None,
    shuffled: object,
    num_ranks: int,
    schedule: str,
    m: int,
) -> None:
    if sum(sizes) < num_ranks or ROWS // (sum(sizes) // num_ranks) < m:
        return
    inside, network = (Link(10**rate, 1e-5, shared=shared) for rate in rates)
    cluster = hosts_of(sizes, inside, network, None if card is None else 10**card)
    names = [each.name for each in cluster.devices]
    if shuffled is not None:
        shuffled.shuffle(names)  # type: ignore[attr-defined]
    plan, prices = planned(cluster, names, num_ranks, schedule, m)
    step = estimate_with(prices, plan)
    with patch("whale.estimate.step.estimate.make_program", whatever_goes_over_links):
        plain = estimate_with(prices, plan)
    assert step.step_seconds == pytest.approx(plain.step_seconds, rel=1e-9)
    own, wanted = told(step), told(plain)
    assert own.keys() == wanted.keys()
    for name, figures in own.items():
        assert figures == pytest.approx(wanted[name], rel=1e-9, abs=1e-15), name


def test_replicas_on_unlike_hosts_are_one_as_long_as_nothing_is_in_the_way() -> None:
    # one pipeline lies across hosts, and what else goes over their cards is over when it is to send
    cluster = hosts_of([4, 1, 3], FAST, FAST, 1e9)
    plan, prices = planned(cluster, [each.name for each in cluster.devices], 2, "1f1b", 4)
    assert whether_even(plan, prices) == (True, True)


def test_replicas_are_apart_where_one_has_a_card_to_itself() -> None:
    cluster = hosts_of([2, 1, 2, 1], OWN, OWN, 1e6)
    names = ["h0/0", "h2/0", "h0/1", "h2/1", "h1/0", "h3/0"]  # two pipelines from host 0 to 2, and one from 1 to 3
    plan, prices = planned(cluster, names, 2, "1f1b", 4)
    assert whether_even(plan, prices) == (False, True)


def test_ways_that_are_not_equally_fast_are_told() -> None:
    sender, receiver = [Task(1.0, sends=(0, 1))], [Task(0.0, posts=(0, 1)), Task(0.0, needs=(0, 1))]
    both = Transfer(10.0, 0.0, 2, ((0, 1.0), (1, 1.0)), ways=((0,), (1,)))
    assert run([sender, receiver], [both, both], [5.0, 5.0]).transfers == [(1.0, 5.0), (1.0, 5.0)]
    with pytest.raises(Uneven):
        run([sender, receiver], [both, Transfer(10.0, 0.0, 2, ((0, 1.0),))], [5.0, 5.0])
