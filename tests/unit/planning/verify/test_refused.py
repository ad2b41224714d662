"""Plans that memory decides on: which attempts are made, and which plan is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest

from tests.unit.planning.graphs import device
from whale.estimate import StepEstimate
from whale.ir.cluster import Device
from whale.planning.pipeline.balance import shortage
from whale.planning.verify.refused import UNLIMITED_BYTES, Decide, Refused, decide_in_memory

KIND = device("h/0", "h", 1e9, 1000).kind


@dataclass(frozen=True)
class Made:
    seconds: float

    @property
    def step(self) -> StepEstimate:
        full = SimpleNamespace(peak=SimpleNamespace(total=999), capacity=1000)
        return cast(StepEstimate, SimpleNamespace(devices=(full,), step_seconds=self.seconds))


def refused(seconds: float) -> Refused:
    fault = Refused("it does not fit")
    fault.num_bytes, fault.lacking, fault.step_seconds = 10, {KIND: 10}, seconds
    return fault


def test_what_fits_with_unlimited_memory_is_found_though_closed_forms_say_that_it_lacks_some() -> None:
    """With somewhat more memory than there is, another cut is chosen, which is slow and does not fit."""
    asked = list[int]()

    def keeping(spared: Mapping[Device, int]) -> Made:
        asked.append(spared[KIND])
        if spared[KIND] == -UNLIMITED_BYTES:
            return Made(1.0)
        raise shortage("too little", 100, ()) if spared[KIND] == 0 else refused(1.9)

    assert decide_in_memory({KIND: 1000}, lambda spared: Made(2.0), [keeping]) == Made(1.0)
    assert asked == [0, -UNLIMITED_BYTES]


def test_more_attempts_to_keep_everything_are_made_only_where_they_promise_a_tenth() -> None:
    for least, num_attempts in ((1.9, 2), (1.0, 3)):
        asked = list[int]()

        def keeping(spared: Mapping[Device, int], asked: list[int] = asked, least: float = least) -> Made:
            asked.append(spared[KIND])
            if spared[KIND] == 0:
                raise shortage("too little", 100, ())
            if spared[KIND] == -UNLIMITED_BYTES:
                raise refused(least)
            return Made(least)

        made = decide_in_memory({KIND: 1000}, lambda spared: Made(2.0), [keeping])
        assert len(asked) == num_attempts and made == Made(least if num_attempts == 3 else 2.0)


def test_what_nothing_fits_is_refused_with_the_least_that_any_plan_lacks() -> None:
    def lacks(num_bytes: int) -> Decide[Made]:
        def decide(spared: Mapping[Device, int]) -> Made:
            fault = refused(1.0)
            fault.num_bytes, fault.lacking = num_bytes, {KIND: num_bytes}
            raise fault

        return decide

    for as_needed, least, expected in ((50, (40, 20), 20), (50, (20, 40), 20), (10, (40, 20), 10)):
        with pytest.raises(Refused) as caught:
            decide_in_memory({KIND: 1000}, lacks(as_needed), [], [lacks(each) for each in least])
        assert caught.value.num_bytes == expected
    assert decide_in_memory({KIND: 1000}, lacks(50), [], [lacks(40), lambda spared: Made(3.0)]) == Made(3.0)
