"""Which devices form a replica, and which are left over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.planning.graphs import cluster
from whale.planning.pipeline.placement import device_groups

SPEEDS = st.lists(st.lists(st.integers(1, 4).map(float), min_size=1, max_size=4), min_size=1, max_size=4)


@given(SPEEDS, st.integers(1, 4), st.booleans())
def test_groups_use_every_device_once(speeds: list[list[float]], size: int, prefers: bool) -> None:
    there = cluster(*speeds)
    groups, idle = device_groups(there, size, prefer_intra_node=prefers)
    assert len(groups) == len(there.devices) // size
    assert all(len(group) == size for group in groups)
    assert sorted(device.name for group in (*groups, idle) for device in group) == sorted(device.name for device in there.devices)


@given(SPEEDS, st.integers(1, 4))
def test_as_many_groups_as_can_be_stand_on_one_host(speeds: list[list[float]], size: int) -> None:
    groups, _ = device_groups(cluster(*speeds), size, prefer_intra_node=True)
    local = sum(len({device.host for device in group}) == 1 for group in groups)
    assert local >= sum(len(host) // size for host in speeds)
