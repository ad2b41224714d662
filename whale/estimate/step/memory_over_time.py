"""The memory of a device over a step, from what the runtime keeps and lets go.

received   from when the receive is posted ---> F
kept                                            F ------------------> B (or I)     of a stage that R computes again:
sent                                                                  B ---> the gradient has arrived
working                                         F                     B            F --> left --> R --> kept --> B
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from whale.estimate.events.computations import Computation
from whale.estimate.step.program import work_of
from whale.estimate.step.step import MemoryUse
from whale.estimate.step.workers import Worker
from whale.ir.schedule import Kind

What = Literal["activations", "recomputed", "received", "sent", "working"]


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes of one kind and stage that are taken (or let go, below zero) at some time."""

    time: float
    num_bytes: float
    what: What
    stage: int


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
    for what, waiting in (("received", received), ("sent", sent)):
        for each in waiting:
            changes.append(Change(each.start, each.num_bytes, what, each.stage))  # type: ignore[arg-type]
            changes.append(Change(each.end, -each.num_bytes, what, each.stage))  # type: ignore[arg-type]
    return _follow(worker, sorted(changes, key=lambda change: (change.time, change.num_bytes > 0)))


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
        yield Change(start, working, "working", stage)
        yield Change(end, -working, "working", stage)
        if kind is Kind.FORWARD and stage in goes_back:
            yield Change(start, work.left if is_again else work.kept, "activations", stage)
        elif kind is Kind.RECOMPUTE:
            yield Change(start, work.kept - work.left, "recomputed", stage)
        elif backward:
            yield Change(end, -(work.left if is_again else work.kept), "activations", stage)
            if is_again:
                yield Change(end, work.left - work.kept, "recomputed", stage)
            if stage in splits:
                yield Change(end, work.for_weights, "activations", stage)
        elif kind is Kind.BACKWARD_WEIGHT:
            yield Change(end, -work.for_weights, "activations", stage)


def _follow(worker: Worker, changes: Sequence[Change]) -> MemoryOverTime:
    use: dict[tuple[What, int], float] = {}
    held = worker.held.total
    now = most = held
    points, fullest = [(0.0, held)], dict(use)
    for change in changes:
        key = change.what, change.stage
        use[key] = use.get(key, 0.0) + change.num_bytes
        now += change.num_bytes
        if points[-1][0] == change.time:
            points[-1] = change.time, now
        else:
            points.append((change.time, now))
        if now > most:
            most, fullest = now, dict(use)
    return MemoryOverTime(tuple(points), _peak(worker, fullest), tuple(_of_stage(fullest, stage) for stage in worker.stages))


def _peak(worker: Worker, use: Mapping[tuple[What, int], float]) -> MemoryUse:
    sums: dict[str, float] = {}
    for (what, _), num_bytes in use.items():
        sums[what] = sums.get(what, 0.0) + num_bytes
    return replace(worker.held, **sums)


def _of_stage(use: Mapping[tuple[What, int], float], stage: int) -> float:
    return sum(num_bytes for (_, own), num_bytes in use.items() if own == stage)
