"""The links that sketches price are links that arrangements may have."""

from __future__ import annotations

from tests.unit.search.exhaustive import front_of, seater_of
from tests.unit.search.test_search import GIB, layers, made
from whale.config import Config
from whale.estimate import all_reduce_seconds
from whale.search.arrangement import Group, Team
from whale.search.sketch.links import SUMMED, Ties


def test_a_split_group_is_inside_a_host_that_has_room_for_it() -> None:
    cluster = made([[(1e9, GIB)], [(1e9, GIB)] * 2], network=1e6)
    ties = Ties(seater_of(layers([64]), cluster, Config(), 8).prices)
    inside = ties.inside(Group(cluster.devices[0].kind, 2))
    assert (inside.latency, inside.per_byte) == (1e-6, 1e-9), "the link of the second host, not that between the two"


def test_each_rank_sums_over_the_links_between_its_own_devices() -> None:
    cluster = made([[(1e9, GIB)] * 2, [(1e9, GIB)], [(1e9, GIB)], [(1e9, GIB)] * 2], network=1e6)
    ties = Ties(seater_of(layers([64]), cluster, Config(), 8).prices)
    kind, names = cluster.devices[0].kind, [device.name for device in cluster.devices]
    pipelines, copies = Team((Group(kind),) * 2, 2), Team((Group(kind),), 2)
    for teams, near, owners in (
        ((pipelines,), False, [(0, 1), (2, 3)]),
        ((pipelines,), True, [(0, 2), (1, 3)]),
        ((copies, pipelines), False, [(0, 1, 2, 3), (0, 1, 4, 5)]),
        ((Team((Group(kind),), 1),), False, [(0,)]),
    ):
        sums = tuple(all_reduce_seconds(cluster, [names[number] for number in own], SUMMED) / SUMMED for own in owners)
        assert ties.sum_rates(teams, teams[-1], near=near) == sums
    across = all_reduce_seconds(cluster, [names[number] for number in (0, 1, 2, 3)], SUMMED) / SUMMED
    assert ties.ends_rate(pipelines, near=False) == across


def test_split_groups_are_as_many_as_hosts_have_room_for() -> None:
    cluster = made([[(1e9, GIB)] * 5, [(1e9, GIB)] * 5], network=1e6)
    lineups = front_of(layers([64] * 8), cluster, 64).lineups
    for width, most in ((1, 10), (2, 4), (4, 2)):
        numbers = [team.count * team.num_ranks for lineup in lineups for team in lineup if team.narrowest == width]
        assert max(numbers) == most
