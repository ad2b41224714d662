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


_Change = tuple[int, float, tuple[What, int]]
"""A `Change` at the start, or at the end, of a computation."""

_START, _END = 0, 1


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
    changes = _Changes(worker, order).over(times)
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
    """The changes that the computations of a device make; those of like computations are found once."""

    worker: Worker
    order: Sequence[Computation]
    _passed: set[tuple[int, Kind]] = field(default_factory=set)
    _given: float = 0.0
    _known: dict[tuple[int, Kind, int, bool], tuple[_Change, ...]] = field(default_factory=dict)

    def over(self, times: Sequence[tuple[float, float]]) -> list[Change]:
        """All of them, the computations being at these times."""
        again = {(each.action.stage, each.action.micro_batch) for each in self.order if each.action.kind is Kind.RECOMPUTE}
        goes_back = {each.action.stage for each in self.order if each.action.kind in _BACKWARD}
        found = list[Change]()
        for each, ends in zip(self.order, times, strict=True):
            kind, stage, micro_batch = each.action.kind, each.action.stage, each.action.micro_batch
            if stage is None:
                continue
            assert micro_batch is not None
            is_again = (stage, micro_batch) in again
            key = stage, kind, self.worker.rows[micro_batch], is_again
            own = self._known.get(key)
            if own is None:
                is_first = (stage, kind) not in self._passed
                work = work_of(self.worker, each.action)
                own = tuple(self._of(kind, stage, work, is_again=is_again, is_first=is_first, goes_back=stage in goes_back))
                self._passed.add((stage, kind))
                if not is_first:
                    self._known[key] = own
            for place, num_bytes, what in own:
                found.append((ends[place], num_bytes, what))
        return found

    def _of(self, kind: Kind, stage: int, work: Work, *, is_again: bool, is_first: bool, goes_back: bool) -> Iterator[_Change]:
        """The changes of one computation."""
        if kind is Kind.FORWARD:
            yield from _during("working", stage, work.beside.forward)
            if goes_back:
                yield _START, work.left if is_again else work.kept, ("activations", stage)
        elif kind is Kind.RECOMPUTE:
            yield from _during("working", stage, work.beside.again)
            yield _START, work.kept - work.left, ("recomputed", stage)
        elif kind is Kind.BACKWARD_WEIGHT:
            yield from self._weights(stage, work, is_first=is_first)
        else:
            yield from self._backward(stage, work, kind, is_again=is_again, is_first=is_first)

    def _backward(self, stage: int, work: Work, kind: Kind, *, is_again: bool, is_first: bool) -> Iterator[_Change]:
        """A B or I, all the time as it is when it has most."""
        fullest, own = work.beside.first if is_first else work.beside.later, _let_go(is_again)
        yield _START, -fullest.freed, (own, stage)
        yield from _during("working", stage, fullest.working)
        yield from _during("recomputed", stage, fullest.recomputed)
        yield _END, -(work.kept - (work.left if is_again else 0.0) - fullest.freed), (own, stage)
        if is_again:
            yield _END, -work.left, ("activations", stage)
        if kind is Kind.BACKWARD_INPUT:
            yield from _during("gradients", stage, fullest.gradients)
            yield _END, work.for_weights, ("activations", stage)
        elif is_first:
            made = self._make(work)
            yield _START, min(fullest.gradients, made), ("gradients", stage)
            yield _END, made - min(fullest.gradients, made), ("gradients", stage)

    def _weights(self, stage: int, work: Work, *, is_first: bool) -> Iterator[_Change]:
        """A W: all that it waited with is there to its end."""
        if not is_first:
            yield from _during("working", stage, work.beside.weight)
        else:
            yield _START, self._make(work), ("gradients", stage)
        yield _END, -work.for_weights, ("activations", stage)

    def _make(self, work: Work) -> float:
        """The gradients that a stage makes first: of a parameter that several stages of the device hold, one of them does."""
        made = min(work.beside.gradients, self.worker.apart - self._given)
        self._given += made
        return made


def _let_go(is_again: bool) -> What:
    """What a backward pass lets go as it goes on."""
    return "recomputed" if is_again else "activations"


def _during(what: What, stage: int, num_bytes: float) -> Iterator[_Change]:
    yield _START, num_bytes, (what, stage)
    yield _END, -num_bytes, (what, stage)


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
