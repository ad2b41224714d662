"""Uphill along numbers of micro-batches, fewest first: from one of them on to where its neighbours are no better."""

from __future__ import annotations

import math
from collections.abc import Callable


def climbed(
    count: int, start: int, value: Callable[[int], float], does_not_fit: Callable[[int], bool] = lambda _: True
) -> dict[int, float]:
    """The values that were looked at on the way, by place; less is better.

    Args:
        count: of places.
        start: the first.
        value: of a place; infinite where it has none, which is taken for too little memory: smaller micro-batches follow.
        does_not_fit: tells of a place without a value whether that is the reason.
    """
    known: dict[int, float] = {}

    def at(place: int) -> float:
        if place not in range(count):
            return math.inf
        if place not in known:
            known[place] = value(place)
        return known[place]

    place = start
    while at(place) == math.inf and place + 1 < count and does_not_fit(place):
        place += 1
    while (beside := min((place - 1, place + 1), key=at)) in range(count) and at(beside) < at(place):
        place = beside
    return known
