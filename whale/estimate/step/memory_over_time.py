"""The memory of a device over a step, as the runtime allocates and frees it.

received   from when the receive is posted ---> F
kept                                            F ------------------> B (or I)     of a stage that R recomputes:
sent                                                                  B ---> the gradient has arrived
working                                         F                     B            F --> left --> R --> kept --> B
gradients  in buckets: always; others                                 B ---> end of the step (first W, where weights wait)
           in the optimizer's dtype, where that differs, during the optimizer's step
           with buckets in flight, from when they are whole in the first last backward pass (or from the last, where sums wait for all)
           to the optimizer's step
           those of other keepers are freed when their sums have arrived: by the end of the last B (or W), and by the optimizer's step

For the duration of a pass its peak counts (`whale.estimate.memory.passes`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from whale.estimate.events.simulate import Computation
from whale.estimate.memory.passes import Fullest
from whale.estimate.step.program import work_of
from whale.estimate.step.step import MemoryUse
from whale.estimate.step.work import Peaks, Work
from whale.estimate.step.workers import SimulatedWorker
from whale.ir.schedule import Kind

What = Literal["gradients", "activations", "recomputed", "received", "sent", "working"]

_BACKWARD = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
_GRADIENTS = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})


_Key = tuple[What, int]
"""Kind of bytes, and stage."""

_Change = tuple[int, float, _Key]
"""Start or end of a computation, bytes allocated then (negative: freed), and what they are."""

_START, _END = 0, 1


class Waiting(NamedTuple):  # there are tens of thousands
    """Bytes of a message that occupy a device from `start` to `end`."""

    stage: int
    num_bytes: float
    start: float
    end: float


@dataclass
class _Bytes:
    """Allocations: per change its time, its bytes (negative: freed), and what they are, by number."""

    times: list[float] = field(default_factory=list)
    num_bytes: list[float] = field(default_factory=list)
    whats: list[int] = field(default_factory=list)
    number: dict[_Key, int] = field(default_factory=dict)

    def numbered(self, key: _Key) -> int:
        return self.number.setdefault(key, len(self.number))

    def adds(self, time: float, num_bytes: float, key: _Key) -> None:
        self.times.append(time)
        self.num_bytes.append(num_bytes)
        self.whats.append(self.numbered(key))

    def waits(self, what: What, messages: Iterable[Waiting]) -> None:
        """Adds messages."""
        for stage, num_bytes, start, end in messages:
            number = self.numbered((what, stage))
            self.times += start, end
            self.num_bytes += num_bytes, -num_bytes
            self.whats += number, number


@dataclass(frozen=True)
class MemoryOverTime:
    """What a device holds."""

    points: tuple[tuple[float, float], ...]  # (second, bytes) wherever the bytes change
    peak: MemoryUse  # its parts
    stages: tuple[float, ...]  # per stage of the device, bytes besides parameters at the peak


def memory_over_time(
    worker: SimulatedWorker,
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
        received: tensors from the post of their receive to their use.
        sent: gradients from when they are made to their arrival.
    """
    found = _Bytes()
    _Changes(worker, order, found).over(times)
    found.waits("received", received)
    found.waits("sent", sent)
    return _follow(worker, found)


@dataclass
class _Changes:
    """The changes by the computations of a device; equal computations are worked out once."""

    worker: SimulatedWorker
    order: Sequence[Computation]
    found: _Bytes
    _passed: set[tuple[int, Kind]] = field(default_factory=set)
    _given: float = 0.0
    _known: dict[tuple[int, Kind, int, bool], tuple[list[int], list[float], list[int]]] = field(default_factory=dict)

    def over(self, times: Sequence[tuple[float, float]]) -> None:
        """Records all of them, with the computations at these times."""
        recomputed = {(each.action.stage, each.action.micro_batch) for each in self.order if each.action.kind is Kind.RECOMPUTE}
        goes_back = {each.action.stage for each in self.order if each.action.kind in _BACKWARD}
        found, rows = self.found, self.worker.rows
        summing = self._sums(times)
        if self.worker.throughout or any(self.worker.apart):
            self._beside_passes(times)
        for number, (each, ends) in enumerate(zip(self.order, times, strict=True)):
            kind, stage, micro_batch = each.action.kind, each.action.stage, each.action.micro_batch
            if stage is None:
                if kind is Kind.STEP and self.worker.casts:
                    found.waits("gradients", [Waiting(self.worker.stages[0], self.worker.casts, *ends)])
                continue
            assert micro_batch is not None
            is_recomputed = (stage, micro_batch) in recomputed
            key = stage, kind, rows[micro_batch], is_recomputed
            is_summing = number in summing
            own = None if is_summing else self._known.get(key)
            if own is None:
                is_first = (stage, kind) not in self._passed
                work = work_of(self.worker, each.action)
                how = {"is_recomputed": is_recomputed, "is_first": is_first, "is_summing": is_summing, "goes_back": stage in goes_back}
                made = self._of(kind, stage, work, **how)
                changes = [each for each in made if each[1]]
                own = [end for end, *_ in changes], [change for _, change, _ in changes], [found.numbered(what) for *_, what in changes]
                self._passed.add((stage, kind))
                if not is_first and not is_summing:
                    self._known[key] = own
            places, num_bytes, whats = own
            found.times += [ends[place] for place in places]
            found.num_bytes += num_bytes
            found.whats += whats

    def _sums(self, times: Sequence[tuple[float, float]]) -> Collection[int]:
        """Buckets in flight, gradients freed as their sums arrive, and the weights that follow; the passes that count sums of their own."""
        worker, found, last, numbers = self.worker, self.found, dict[int | None, tuple[float, float]](), dict[int | None, int]()
        for number, (each, ends) in enumerate(zip(self.order, times, strict=True)):
            if each.action.kind in _GRADIENTS or each.action.kind is Kind.STEP:
                last[each.action.stage], numbers[each.action.stage] = ends, number
        summing = [number for number in numbers.values() if self._counts_sums(self.order[number])]
        if None not in last or not (summing or worker.sent or worker.sent_late or worker.freed_last or worker.published):
            return ()
        step, first = last.pop(None), worker.stages[0]
        begins = [end if numbers[stage] in summing else start for stage, (start, end) in last.items()]
        found.waits("gradients", [Waiting(first, worker.sent, min(begins, default=step[0]), step[0])])
        done = max((end for _, end in last.values()), default=step[0])
        found.waits("gradients", [Waiting(first, worker.sent_late, done, step[0])])
        found.waits("working", [Waiting(first, worker.published, *step)])
        for stage, num_bytes in zip(worker.stages, worker.freed, strict=False):
            found.adds(last[stage][1] if stage in last else step[0], -num_bytes, ("gradients", stage))
        found.adds(step[0], -worker.freed_last, ("gradients", first))
        return summing

    def _beside_passes(self, times: Sequence[tuple[float, float]]) -> None:
        """Weights gathered for all passes, and gradients beside their buckets."""
        worker, kinds = self.worker, [each.action.kind for each in self.order]
        step = times[kinds.index(Kind.STEP)] if Kind.STEP in kinds else None
        end = times[-1][1] if step is None else step[0]
        self.found.waits("working", [Waiting(worker.stages[0], worker.throughout, times[0][0], end)])
        first = next((start for kind, (start, _) in zip(kinds, times, strict=True) if kind in _GRADIENTS), None)
        if first is not None and step is not None:
            apart = zip(worker.apart, step, strict=True)
            self.found.waits("gradients", [Waiting(worker.stages[0], own, first, end) for own, end in apart])

    def _counts_sums(self, computation: Computation) -> bool:
        """Whether the last pass of a stage counts the sums that start in it."""
        if computation.action.stage is None:
            return False
        memory = work_of(self.worker, computation.action).memory
        peaks = memory.weights if computation.action.kind is Kind.BACKWARD_WEIGHT else memory.backward
        return peaks.last is not None

    def _of(
        self, kind: Kind, stage: int, work: Work, *, is_recomputed: bool, is_first: bool, is_summing: bool, goes_back: bool
    ) -> Iterator[_Change]:
        """The changes of one computation."""
        if kind is Kind.FORWARD:
            yield from _during("working", stage, work.memory.forward)
            if goes_back:
                yield _START, work.left if is_recomputed else work.kept, ("activations", stage)
        elif kind is Kind.RECOMPUTE:
            yield from _during("working", stage, work.memory.recompute)
            yield _START, work.kept - work.left, ("recomputed", stage)
        elif kind is Kind.BACKWARD_WEIGHT:
            fullest = _fullest(work.memory.weights, is_first=is_first, is_summing=is_summing)
            yield _START, -fullest.freed, ("activations", stage)
            yield from _during("working", stage, fullest.working)
            yield _END, fullest.freed - work.for_weights, ("activations", stage)
            yield from self._gradients(stage, work, fullest, is_first=is_first, is_summing=is_summing)
        else:
            yield from self._backward(stage, work, kind, is_recomputed=is_recomputed, is_first=is_first, is_summing=is_summing)

    def _backward(self, stage: int, work: Work, kind: Kind, *, is_recomputed: bool, is_first: bool, is_summing: bool) -> Iterator[_Change]:
        """A B or I, with its peak for its whole duration."""
        own, fullest = _let_go(is_recomputed), _fullest(work.memory.backward, is_first=is_first, is_summing=is_summing)
        yield _START, -fullest.freed, (own, stage)
        yield from _during("working", stage, fullest.working)
        yield from _during("recomputed", stage, fullest.recomputed)
        yield _END, -(work.kept - (work.left if is_recomputed else 0.0) - fullest.freed), (own, stage)
        if is_recomputed:
            yield _END, -work.left, ("activations", stage)
        if kind is Kind.BACKWARD_INPUT:
            yield from _during("gradients", stage, fullest.gradients)
            yield _END, work.for_weights, ("activations", stage)
        else:
            yield from self._gradients(stage, work, fullest, is_first=is_first, is_summing=is_summing)

    def _gradients(self, stage: int, work: Work, fullest: Fullest, *, is_first: bool, is_summing: bool) -> Iterator[_Change]:
        """Those that a B or W makes, with buffers of sums."""
        if is_first:
            made = self._make(work)
            most = min(fullest.gradients, made) + max(0.0, fullest.gradients - work.memory.gradients)
            yield _START, most, ("gradients", stage)
            yield _END, made - most, ("gradients", stage)
        elif is_summing:
            yield from _during("gradients", stage, fullest.gradients)

    def _make(self, work: Work) -> float:
        """The gradients that a stage makes first; a parameter shared by several stages of the device counts once."""
        made = min(work.memory.gradients, self.worker.unbucketed - self._given)
        self._given += made
        return made


def _fullest(peaks: Peaks, *, is_first: bool, is_summing: bool) -> Fullest:
    return peaks.last if is_summing and peaks.last is not None else peaks.first if is_first else peaks.later


def _let_go(is_recomputed: bool) -> What:
    """What a backward pass frees as it proceeds."""
    return "recomputed" if is_recomputed else "activations"


def _during(what: What, stage: int, num_bytes: float) -> Iterator[_Change]:
    yield _START, num_bytes, (what, stage)
    yield _END, -num_bytes, (what, stage)


def _follow(worker: SimulatedWorker, found: _Bytes) -> MemoryOverTime:
    times, num_bytes, whats = np.array(found.times), np.array(found.num_bytes), np.array(found.whats, dtype=np.int64)
    order = np.lexsort((num_bytes > 0, times))  # at one time what is let go comes first; else as they were found
    num_bytes = num_bytes[order]
    totals = np.cumsum(np.concatenate(([worker.held.total], num_bytes)))
    points = {0.0: float(totals[0])}
    points.update(zip(times[order].tolist(), totals[1:].tolist(), strict=True))  # of one time the last
    peak = int(np.argmax(totals))
    sums = np.bincount(whats[order][:peak], num_bytes[:peak], minlength=len(found.number)).tolist()
    use = dict(zip(found.number, sums, strict=True))
    return MemoryOverTime(tuple(points.items()), _peak(worker, use), tuple(_of_stage(use, stage) for stage in worker.stages))


def _peak(worker: SimulatedWorker, use: Mapping[_Key, float]) -> MemoryUse:
    sums: dict[str, float] = {}
    for (what, _), num_bytes in use.items():
        sums[what] = sums.get(what, 0.0) + num_bytes
    return replace(worker.held, **{**sums, "gradients": worker.held.gradients + sums.get("gradients", 0.0)})


def _of_stage(use: Mapping[_Key, float], stage: int) -> float:
    return sum(num_bytes for (what, own), num_bytes in use.items() if own == stage and what != "gradients")
