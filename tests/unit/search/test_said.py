"""What a search says of its plan, in words."""

from __future__ import annotations

from tests.unit.search.test_search import GIB, layers, made
from whale.config import Config
from whale.search import search

FOUND = search(layers([64] * 4), made([[(1e9, GIB)], [(1e5, GIB)]], network=1e3), Config(), rows=8)


def test_devices_are_idle_because_the_search_found_nothing_better_with_them() -> None:
    (idle,) = (choice for choice in FOUND.plan.choices if choice.subject == "idle devices")
    assert (idle.decision, idle.bound) == ("h1/0", "the search found no better plan with them")
