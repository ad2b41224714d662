"""The memory of a device over a step, from what the runtime keeps and lets go.

received   from when the receive is posted ---> F
kept                                            F ------------------> B (or I)     of a stage that R computes again:
sent                                                                  B ---> the gradient has arrived
working                                         F                     B            F --> left --> R --> kept --> B
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from whale.estimate.events.computations import Computation
from whale.estimate.step.program import work_of
from whale.estimate.step.step import MemoryUse
from whale.estimate.step.workers import Worker
from whale.ir.schedule import Kind

What = Literal["activations", "recomputed", "received", "sent", "working"]


Change = tuple[float, float, tuple[What, int]]
"""A time, the bytes that are taken then (let go, below zero), and of which kind and stage. Plain: there are many."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Bytes of a message that lie on a device from one time to another."""

    stage: int
    num_bytes: float
    start: float
    end: float


@dataclass(frozen=True)
class MemoryOverTime:
    """What a device holds.

    Attributes:
        points: (second, bytes) wherever the bytes change.
        peak: what it is made of when it is most.
        stages: per stage of the device, bytes beside parameters at that time.
    """

    points: tuple[tuple[float, float], ...]
    peak: MemoryUse
    stages: tuple[float, ...]


def memory_over_time(
    worker: Worker,
    order: Sequence[Computation],
    times: Sequence[tuple[float, float]],
    received: Iterable[Waiting],
    sent: Iterable[Waiting],
) -> MemoryOverTime:
    """Follows the memory of one device.

    Args:
        worker: what it holds and does.
        order: its computations.
        times: their starts and ends.
        received: tensors from the time at which their receives are posted to that of their use.
        sent: gradients from the time at which they are made to that of their arrival.
    """
    changes = [*_of_computations(worker, order, times)]
    for each in received:
        changes += (each.start, each.num_bytes, ("received", each.stage)), (each.end, -each.num_bytes, ("received", each.stage))
    for each in sent:
        changes += (each.start, each.num_bytes, ("sent", each.stage)), (each.end, -each.num_bytes, ("sent", each.stage))
    changes.sort(key=lambda change: (change[0], change[1] > 0))
    return _follow(worker, changes)


def _of_computations(worker: Worker, order: Sequence[Computation], times: Sequence[tuple[float, float]]) -> Iterator[Change]:
    again = {(each.action.stage, each.action.micro_batch) for each in order if each.action.kind is Kind.RECOMPUTE}
    splits = {each.action.stage for each in order if each.action.kind is Kind.BACKWARD_WEIGHT}
    goes_back = {each.action.stage for each in order if each.action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
    for each, (start, end) in zip(order, times, strict=True):
        kind, stage = each.action.kind, each.action.stage
        if stage is None:
            continue
        work = work_of(worker, each.action)
        is_again = (stage, each.action.micro_batch) in again
        backward = kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        working = work.working + (work.again if backward else 0.0)
        yield start, working, ("working", stage)
        yield end, -working, ("working", stage)
        if kind is Kind.FORWARD and stage in goes_back:
            yield start, work.left if is_again else work.kept, ("activations", stage)
        elif kind is Kind.RECOMPUTE:
            yield start, work.kept - work.left, ("recomputed", stage)
        elif backward:
            yield end, -(work.left if is_again else work.kept), ("activations", stage)
            if is_again:
                yield end, work.left - work.kept, ("recomputed", stage)
            if stage in splits:
                yield end, work.for_weights, ("activations", stage)
        elif kind is Kind.BACKWARD_WEIGHT:
            yield end, -work.for_weights, ("activations", stage)


def _follow(worker: Worker, changes: Sequence[Change]) -> MemoryOverTime:
    totals = list(accumulate((num_bytes for _, num_bytes, _ in changes), initial=worker.held.total))
    points = {0.0: totals[0]}
    points.update(zip((time for time, _, _ in changes), totals[1:], strict=True))  # of one time the last
    use: dict[tuple[What, int], float] = {}
    for _, num_bytes, key in changes[: totals.index(max(totals))]:
        use[key] = use.get(key, 0.0) + num_bytes
    return MemoryOverTime(tuple(points.items()), _peak(worker, use), tuple(_of_stage(use, stage) for stage in worker.stages))


def _peak(worker: Worker, use: Mapping[tuple[What, int], float]) -> MemoryUse:
    sums: dict[str, float] = {}
    for (what, _), num_bytes in use.items():
        sums[what] = sums.get(what, 0.0) + num_bytes
    return replace(worker.held, **sums)


def _of_stage(use: Mapping[tuple[What, int], float], stage: int) -> float:
    return sum(num_bytes for (_, own), num_bytes in use.items() if own == stage)
