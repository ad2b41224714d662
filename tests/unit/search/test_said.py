"""What a search says of its plan, in words that hold whatever its bound is."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.search.test_search import GIB, layers, made
from whale.config import Config
from whale.search import search

FOUND = search(layers([64] * 4), made([[(1e9, GIB)], [(1e5, GIB)]], network=1e3), Config(), rows=8)


def test_a_bound_that_is_far_below_is_no_share_of_the_plan() -> None:
    near = replace(FOUND, bound=FOUND.value / 1.25, num_unproven=1).reasons[1]
    far = replace(FOUND, bound=FOUND.value / 4, num_unproven=1).reasons[1]
    assert near.startswith("within 25.0% of the best of this space, which is at least ")
    assert far.startswith("how near the best of this space is cannot be told: it is at least ") and "the plan 4.0 times that" in far


def test_devices_are_idle_because_the_search_found_nothing_better_with_them() -> None:
    (idle,) = (choice for choice in FOUND.plan.choices if choice.subject == "idle devices")
    assert (idle.decision, idle.bound) == ("h1/0", "the search found no better plan with them")
