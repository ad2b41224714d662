"""The links that sketches price are links that arrangements may have."""

from __future__ import annotations

from tests.unit.search.exhaustive import seater_of
from tests.unit.search.test_search import GIB, layers, made
from whale.config import Config
from whale.search.arrangement import Group
from whale.search.sketch.links import Ties


def test_a_split_group_is_inside_a_host_that_has_room_for_it() -> None:
    cluster = made([[(1e9, GIB)], [(1e9, GIB)] * 2], network=1e6)
    ties = Ties(seater_of(layers([64]), cluster, Config(), 8).prices)
    inside = ties.inside(Group(cluster.devices[0].kind, 2))
    assert (inside.latency, inside.per_byte) == (1e-6, 1e-9), "the link of the second host, not that between the two"
