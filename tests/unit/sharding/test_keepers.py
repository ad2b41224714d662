"""Keepers: every element is kept once, bytes follow the shares, and only what is larger than a share is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.unit.planning.graphs import chain, cluster
from whale.config import Config
from whale.ir.plan import Form, VirtualDevice, states_of
from whale.planning import make_plan
from whale.schedules import alike_schedules
from whale.sharding import Region
from whale.sharding.buckets import ALIGNED_BYTES, plan_buckets
from whale.sharding.keepers import SharedOut, deal, deal_by_group, keeper_groups
from whale.sharding.parameters import parameter_shardings


@st.composite
def dealt(draw: st.DrawFn) -> tuple[list[SharedOut], list[int]]:
    """Parameters that all owners hold whole, and shares."""
    shares = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    sizes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=12))
    found = []
    for number, (rows, width) in enumerate(sizes):
        ways = tuple({device: rows * width} for device in range(len(shares)))
        found.append(SharedOut(f"p{number}", rows, 4 * rows * width, ways))
    return found, shares


@at_most(100)
@given(dealt())
def test_bytes_follow_shares(case: tuple[list[SharedOut], list[int]]) -> None:
    parameters, shares = case
    keeping = deal(parameters, shares)
    total, load, uncut = sum(own.num_bytes for own in parameters), [0.0] * len(shares), [0]
    wanted = [total * share / sum(shares) for share in shares]
    for own in parameters:
        kept = keeping[own.name]
        if kept.rows:
            assert own.num_bytes > max(wanted) and sum(kept.rows) == own.num_rows and 0 not in kept.rows
            for device, rows in zip(kept.devices, kept.rows, strict=True):
                load[device] += own.num_bytes * rows / own.num_rows
        else:
            (device,) = kept.devices
            load[device] += own.num_bytes
            uncut.append(own.num_bytes)
    row = max(own.num_bytes / own.num_rows for own in parameters)
    assert all(own <= most + max(uncut) + row for own, most in zip(load, wanted, strict=True))


def test_what_a_split_group_holds_in_parts_is_kept_by_one_group() -> None:
    halves = SharedOut("w", 1, 80, ({0: 12, 1: 8}, {2: 10, 3: 10}, {4: 20}))
    whole = SharedOut("b", 1, 400, ({0: 4}, {1: 4}, {4: 4}))
    keeping = deal([halves, whole], (1, 1, 1, 1, 3))
    assert keeping["b"].devices == (4,) and keeping["w"].devices == (2, 3)


class CountedWays(tuple[dict[int, int], ...]):
    """Counts how often all ways are gone through."""

    num_passes = 0

    def __iter__(self) -> Iterator[dict[int, int]]:
        self.num_passes += 1
        return super().__iter__()


@pytest.mark.parametrize("num_owners", [4, 40])
def test_ways_are_gone_through_once_for_all_layers_and_not_for_each_owner(num_owners: int) -> None:
    ways = CountedWays({device: 4} for device in range(num_owners))
    keeping = deal([SharedOut(f"p{number}", 4 * num_owners, 64 * num_owners, ways) for number in range(2 * num_owners)], (1,) * num_owners)
    assert len(keeping) == 2 * num_owners and ways.num_passes <= 4


@pytest.mark.parametrize(("num_layers", "shares", "num_cut"), [(6, (1, 2, 3), 0), (2, (1, 1, 1), 2), (2, (1, 1, 400), 0)])
def test_each_keeper_has_one_run_of_a_bucket_and_what_is_cut_a_bucket_of_its_own(
    num_layers: int, shares: tuple[int, ...], num_cut: int
) -> None:
    graph = chain(num_layers, width=6)
    plan = make_plan(graph, cluster((1e9,) * 3), Config({"planning.search": "off"}), rows=12)
    plan = replace(plan, parameter_states=states_of(graph.parameters, optimizer=Form("float32", "owners")), keeper_shares=shares)
    shardings = parameter_shardings(plan, graph, None)
    buckets = plan_buckets(plan, shardings, graph, alike_schedules(plan), bucket_bytes=1 << 20)
    cut = [name for name in shardings.keeping if shardings.kept(name).is_sharded]
    assert len(cut) == num_cut
    for found in (buckets.summed, buckets.published):
        assert sorted(name for bucket in found for name in bucket.names) == sorted(shardings.parameters)
        for bucket in found:
            assert len(bucket.names) == 1 or not set(bucket.names) & set(cut)
            assert [start for _, start, _ in bucket.runs][1:] == [stop for *_, stop in bucket.runs][:-1]
            assert bucket.runs[-1][2] == bucket.num_elements and all(4 * slot.start % ALIGNED_BYTES == 0 for slot in bucket.slots)
            assert len({keeper for keeper, *_ in bucket.runs}) == len(bucket.runs)
    for rank, kept in buckets.kept.items():
        for name, num_elements in kept.items():
            region = shardings.kept(name).held[rank]
            assert num_elements == (36 if region == Region() else shardings.space(name).num_elements(region))
    assert sum(num for kept in buckets.kept.values() for num in kept.values()) == num_layers * 36


@st.composite
def on_hosts(draw: st.DrawFn) -> tuple[list[SharedOut], list[int], list[list[int]]]:
    """The same with the devices in groups."""
    parameters, shares = draw(dealt())
    numbers = draw(st.lists(st.integers(0, 2), min_size=len(shares), max_size=len(shares)))
    groups = [[device for device, own in enumerate(numbers) if own == number] for number in sorted(set(numbers))]
    return parameters, shares, groups


@at_most(100)
@given(on_hosts())
def test_each_group_keeps_as_if_it_were_alone(case: tuple[list[SharedOut], list[int], list[list[int]]]) -> None:
    parameters, shares, groups = case
    found = deal_by_group(parameters, shares, groups)
    for number, group in enumerate(groups):
        alone = [replace(own, ways=tuple({device: own.ways[device][device]} for device in group)) for own in parameters]
        expected = deal(alone, [share if device in group else 1 for device, share in enumerate(shares)])
        assert {name: copies[number] for name, copies in found.items()} == expected
    assert deal_by_group(parameters, shares, ()) == {name: (own,) for name, own in deal(parameters, shares).items()}


def test_a_group_without_a_parameter_keeps_none_of_it() -> None:
    first = SharedOut("first", 4, 64, ({0: 16}, {1: 16}))
    last = SharedOut("last", 4, 64, ({2: 16}, {3: 16}))
    found = deal_by_group([first, last], (1,) * 4, ((0, 2), (1,), (3,)))
    assert {name: [own.devices for own in copies] for name, copies in found.items()} == {"first": [(0,), (1,)], "last": [(2,), (3,)]}


@pytest.mark.parametrize(
    ("hosts", "splits", "expected"),
    [
        ("aabb", ((0,), (1,), (2,), (3,)), (0, 0, 1, 1)),
        ("baab", ((0,), (1,), (2,), (3,)), (0, 1, 1, 0)),
        ("aaaa", ((0,), (1,), (2,), (3,)), ()),
        ("abca", ((0, 1), (2,), (3,)), (0, 0, 1, 0)),
        ("abcd", ((0, 1), (2, 3)), (0, 0, 1, 1)),
        ("abbc", ((0, 1), (2, 3)), ()),
    ],
)
def test_hosts_that_a_split_group_connects_keep_one_copy(
    hosts: str, splits: tuple[tuple[int, ...], ...], expected: tuple[int, ...]
) -> None:
    plan = make_plan(chain(4), cluster((1e9,) * 4), Config({"planning.search": "off"}), rows=8)
    (stage,) = plan.replicas[0].stages
    replicas = tuple(
        replace(
            plan.replicas[0],
            index=index,
            stages=(
                replace(stage, virtual_device=VirtualDevice(tuple(plan.devices[rank] for rank in group)), split=len(group), shares=(1,)),
            ),
        )
        for index, group in enumerate(splits)
    )
    assert keeper_groups(replace(plan, replicas=replicas), list(hosts)) == expected


def test_stages_that_lie_on_one_host_each_have_no_second_copy() -> None:
    plan = make_plan(chain(4), cluster((1e9,) * 4), Config({"planning.search": "off", "pipeline.num_stages": 2}), rows=8)
    hosts = {device: "ab"[stage.index] for replica in plan.replicas for stage in replica.stages for device in stage.virtual_device.devices}
    assert keeper_groups(plan, [hosts[device] for device in plan.devices]) == ()
    assert keeper_groups(plan, ["a", "a", "b", "b"]) == (0, 0, 1, 1)
