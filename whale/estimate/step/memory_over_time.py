"""The memory of a device over a step, from what the runtime keeps and lets go.

received   from when the receive is posted ---> F
kept                                            F ------------------> B (or I)     of a stage that R computes again:
sent                                                                  B ---> the gradient has arrived
working                                         F                     B            F --> left --> R --> kept --> B
gradients  in buckets: always; others                                 B ---> end of the step (first W, where weights wait)

In a pass the memory is told as it is where that has most (`whale.estimate.memory.passes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from whale.estimate.events.computations import Computation
from whale.estimate.step.program import work_of
from whale.estimate.step.step import MemoryUse
from whale.estimate.step.work import Work
from whale.estimate.step.workers import Worker
from whale.ir.schedule import Kind

What = Literal["gradients", "activations", "recomputed", "received", "sent", "working"]

_BACKWARD = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})


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
    changes = [*_Changes(worker, order).over(times)]
    for each in received:
        changes += (each.start, each.num_bytes, ("received", each.stage)), (each.end, -each.num_bytes, ("received", each.stage))
    for each in sent:
        changes += (each.start, each.num_bytes, ("sent", each.stage)), (each.end, -each.num_bytes, ("sent", each.stage))
    changes.sort(key=_in_turn)
    return _follow(worker, changes)


def _in_turn(change: Change) -> tuple[float, bool]:
    """At one time what is let go comes first."""
    return change[0], change[1] > 0


@dataclass
class _Changes:
    """The changes that the computations of a device make."""

    worker: Worker
    order: Sequence[Computation]
    _passed: set[tuple[int, Kind]] = field(default_factory=set)
    _given: float = 0.0

    def over(self, times: Sequence[tuple[float, float]]) -> Iterator[Change]:
        """All of them, the computations being at these times."""
        again = {(each.action.stage, each.action.micro_batch) for each in self.order if each.action.kind is Kind.RECOMPUTE}
        goes_back = {each.action.stage for each in self.order if each.action.kind in _BACKWARD}
        for each, (start, end) in zip(self.order, times, strict=True):
            kind, stage = each.action.kind, each.action.stage
            if stage is None:
                continue
            work, is_again = work_of(self.worker, each.action), (stage, each.action.micro_batch) in again
            if kind is Kind.FORWARD:
                yield from _during(start, end, "working", stage, work.beside.forward)
                if stage in goes_back:
                    yield start, work.left if is_again else work.kept, ("activations", stage)
            elif kind is Kind.RECOMPUTE:
                yield from _during(start, end, "working", stage, work.beside.again)
                yield start, work.kept - work.left, ("recomputed", stage)
            elif kind is Kind.BACKWARD_WEIGHT:
                yield from self._weights(start, end, stage, work)
            else:
                yield from self._backward(start, end, stage, work, kind, is_again=is_again)
            self._passed.add((stage, kind))

    def _backward(self, start: float, end: float, stage: int, work: Work, kind: Kind, *, is_again: bool) -> Iterator[Change]:
        """A B or I, all the time as it is when it has most."""
        is_first = (stage, kind) not in self._passed
        fullest, own = work.beside.first if is_first else work.beside.later, _let_go(is_again)
        yield start, -fullest.freed, (own, stage)
        yield from _during(start, end, "working", stage, fullest.working)
        yield from _during(start, end, "recomputed", stage, fullest.recomputed)
        yield end, -(work.kept - (work.left if is_again else 0.0) - fullest.freed), (own, stage)
        if is_again:
            yield end, -work.left, ("activations", stage)
        if kind is Kind.BACKWARD_INPUT:
            yield from _during(start, end, "gradients", stage, fullest.gradients)
            yield end, work.for_weights, ("activations", stage)
        elif is_first:
            made = self._make(work)
            yield start, min(fullest.gradients, made), ("gradients", stage)
            yield end, made - min(fullest.gradients, made), ("gradients", stage)

    def _weights(self, start: float, end: float, stage: int, work: Work) -> Iterator[Change]:
        """A W: all that it waited with is there to its end."""
        if (stage, Kind.BACKWARD_WEIGHT) in self._passed:
            yield from _during(start, end, "working", stage, work.beside.weight)
        else:
            yield start, self._make(work), ("gradients", stage)
        yield end, -work.for_weights, ("activations", stage)

    def _make(self, work: Work) -> float:
        """The gradients that a stage makes first: of a parameter that several stages of the device hold, one of them does."""
        made = min(work.beside.gradients, self.worker.apart - self._given)
        self._given += made
        return made


def _let_go(is_again: bool) -> What:
    """What a backward pass lets go as it goes on."""
    return "recomputed" if is_again else "activations"


def _during(start: float, end: float, what: What, stage: int, num_bytes: float) -> Iterator[Change]:
    yield start, num_bytes, (what, stage)
    yield end, -num_bytes, (what, stage)


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
    return replace(worker.held, **{**sums, "gradients": worker.held.gradients + sums.get("gradients", 0.0)})


def _of_stage(use: Mapping[tuple[What, int], float], stage: int) -> float:
    return sum(num_bytes for (what, own), num_bytes in use.items() if own == stage and what != "gradients")
