"""When weights that are shared out are gathered: in each pass through their stage, or from the beginning of a run to its end.

All owners gather together. Those that run equal schedules make the same passes in the same order. Where owners make unlike passes, and
where weight gradients wait for passes of their own, a bucket is there throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from whale.ir.graph import ModelGraph
from whale.ir.schedule import Kind, Schedule
from whale.sharding.buckets import Bucket


@dataclass(frozen=True)
class Visits:
    """What a rank gathers, by numbers of buckets.

    Attributes:
        forward: per stage, in a pass forward, in the order of first use.
        backward: in a pass backward, in the order of last use, the last first.
        throughout: before a run.
    """

    forward: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    backward: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    throughout: tuple[int, ...] = ()


def visits_of(buckets: Sequence[Bucket], model: ModelGraph, schedules: Sequence[Schedule]) -> dict[int, Visits]:
    """Those of each rank of a plan.

    Args:
        buckets: that are gathered, of the whole plan, in the order of first use.
        model: that the plan is for.
        schedules: per replica.
    """
    numbers: dict[Schedule, int] = {}
    alike = [numbers.setdefault(schedule, len(numbers)) for schedule in schedules]
    weights_wait = {(number, stage) for schedule, number in numbers.items() for stage in _with_weights(schedule)}
    at_one_place: dict[int, dict[int, list[int]]] = {}
    throughout: dict[int, list[int]] = {}
    for number, bucket in enumerate(buckets):
        places = {(alike[replica], stage) for replica, stage in bucket.stages}
        is_throughout = len(places) > 1 or places <= weights_wait
        for rank in bucket.owners:
            own = at_one_place.setdefault(rank, {})
            (throughout if is_throughout else own).setdefault(rank if is_throughout else bucket.stages[0][1], []).append(number)

    def last(number: int) -> int:
        return max(model.last_reads.get(name, 0) for name in buckets[number].names)

    return {
        rank: Visits(
            {stage: tuple(each) for stage, each in own.items()},
            {stage: tuple(sorted(each, key=last, reverse=True)) for stage, each in own.items()},
            tuple(throughout.get(rank, ())),
        )
        for rank, own in at_one_place.items()
    }


def _with_weights(schedule: Schedule) -> set[int | None]:
    """The stages whose weight gradients wait for passes of their own."""
    return {action.stage for actions in schedule.ranks for action in actions if action.kind is Kind.BACKWARD_WEIGHT}
