"""Plans again where the planner's closed forms and the estimate disagree on memory; the estimate decides.

closed forms: fits             -->  estimate: 300 bytes short on T4s  -->  closed forms, with 300 bytes less of each T4  --> ...
closed forms: 20 bytes short   -->  closed forms, with 20 bytes more of each device  -->  estimate: fits

If the estimate has refused a plan and closed forms find none with less memory, the middle is tried. If all that fails, the
last attempt assumes unlimited memory: its best plan may still fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Protocol, TypeVar

from whale.errors import OutOfMemory, raise_faults
from whale.estimate import StepEstimate
from whale.ir.cluster import Cluster, Device
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.verify.verify import host_faults, memory_fault, overfull


class Estimated(Protocol):
    @property
    def step(self) -> StepEstimate: ...


T = TypeVar("T", bound=Estimated)

Decide = Callable[[Mapping[Device, int]], T]
"""Makes a plan that leaves so many bytes free on each device type."""

MAX_ROUNDS = 4  # attempts per plan

KEEPING_ROUNDS = 2  # attempts without recomputation before the plan that recomputes as needed is made

WORTH_KEEPING = 0.9  # the others follow if a plan without recomputation that does not fit takes at most this part of its step

CLOSED_FORM_EXCESS = 0.3
"""Share of a device's memory by which closed forms may exceed the estimate: they add all gradients to all activations, and gradients are
a quarter of Adam's state in float32. A larger shortage goes straight to unlimited memory, one above the device's memory fails.
"""

FULL = 0.93  # a plan without recomputation that fills a device beyond this may have been cut for memory: with some it may be faster

UNLIMITED_BYTES = 2**50


class Refused(MemoryShortage):
    """The estimate of a plan does not fit; `lacking`: per device type, the missing bytes."""

    lacking: Mapping[Device, int] = {}
    step_seconds = 0.0  # of the plan


def refuse_overfull(step: StepEstimate, cluster: Cluster) -> None:
    """Raises `Refused` where a step does not fit in memory."""
    lacking, faults = dict[Device, int](), list[OutOfMemory]()
    for each, short in overfull(step):
        kind = cluster.by_name[each.devices[0]].kind
        lacking[kind] = max(lacking.get(kind, 0), short)
        faults.append(memory_fault(each, short))
    if faults:
        refused = Refused("\n".join(fault.message for fault in faults), hint=faults[0].hint)
        refused.num_bytes, refused.lacking, refused.step_seconds = max(lacking.values()), lacking, step.step_seconds
        raise refused
    raise_faults(list(host_faults(step, cluster)))


def decide_in_memory(
    rooms: Mapping[Device, int],
    as_needed: Decide[T],
    keeping: Decide[T] | None = None,
    least: Decide[T] | None = None,
) -> T:
    """The plan that fits by the estimate.

    Args:
        rooms: per device type, the bytes that a plan may fill.
        as_needed: makes a plan with so many of them left free, and raises `Refused` where it does not fit.
        keeping: the same without recomputation, where memory decides on that; taken if it fits, and compared with the one as needed if
            it fills a device, or fits only after more than two attempts, which must promise a tenth of the step.
        least: the same with most recomputation; taken where the one as needed does not fit.

    Raises:
        MemoryShortage: nothing fits; after a refusal, with the estimate's figures of the first plan as needed.
    """
    attempts: Iterator[T | MemoryShortage] = iter(()) if keeping is None else _attempts(rooms, keeping, is_unlimited_soon=True)
    kept, refused_seconds = list[T](), 0.0
    for found in islice(attempts, KEEPING_ROUNDS):
        if isinstance(found, Refused):
            refused_seconds = found.step_seconds
        elif not isinstance(found, MemoryShortage):
            kept.append(found)
    if kept and all(each.peak.total <= FULL * each.capacity for each in kept[0].step.devices):
        return kept[0]
    try:
        needed = _decide_in_rounds(rooms, as_needed)
    except MemoryShortage:
        kept = kept or _fitting(attempts)
        if kept:
            return kept[0]
        if least is not None:
            with suppress(MemoryShortage):
                return _decide_in_rounds(rooms, least)
        raise
    if refused_seconds < WORTH_KEEPING * needed.step.step_seconds:
        kept = kept or _fitting(attempts)
    return min((*kept, needed), key=lambda each: each.step.step_seconds)


def _fitting(attempts: Iterable[T | MemoryShortage]) -> list[T]:
    return [found for found in attempts if not isinstance(found, MemoryShortage)]


def _decide_in_rounds(rooms: Mapping[Device, int], decide: Decide[T]) -> T:
    """The first plan of the attempts that fits."""
    faults = list[MemoryShortage]()
    for found in _attempts(rooms, decide):
        if not isinstance(found, MemoryShortage):
            return found
        faults.append(found)
    raise next((fault for fault in faults if isinstance(fault, Refused)), faults[0])


def _attempts(rooms: Mapping[Device, int], decide: Decide[T], *, is_unlimited_soon: bool = False) -> Iterator[T | MemoryShortage]:
    """The plan with all memory, with less or more of it, as the estimate demands, and at last with unlimited memory.

    Each attempt's fault, and the plan that fits. `is_unlimited_soon`: whether unlimited memory comes right after a first shortage by
    closed forms: its plan is the fastest of all, whether it fits or not.
    """
    unlimited = dict.fromkeys(rooms, -UNLIMITED_BYTES)
    spared, too_little, too_much = dict.fromkeys(rooms, 0), dict[Device, int](), dict[Device, int]()
    when, is_end, is_refused = 1 if is_unlimited_soon else MAX_ROUNDS, False, False
    for attempt in range(MAX_ROUNDS + 1):
        is_unlimited = attempt == when
        try:
            yield decide(unlimited if is_unlimited else spared)
            return
        except Refused as fault:
            yield fault
            if is_unlimited and is_end:
                return
            if is_unlimited:
                continue
            is_refused, too_little, when = True, spared, MAX_ROUNDS
            spared = {kind: number + fault.lacking.get(kind, 0) for kind, number in spared.items()}
        except MemoryShortage as fault:
            yield fault
            if is_unlimited or (not is_refused and _is_hopeless(fault, rooms)):
                return
            too_much = spared
            spared = {kind: number - fault.num_bytes for kind, number in spared.items()}
            if not is_refused and fault.num_bytes > CLOSED_FORM_EXCESS * min(rooms.values()):
                when, is_end = attempt + 1, True
        if too_little and too_much:
            middle = {kind: (too_little[kind] + too_much[kind]) // 2 for kind in rooms}
            if middle in (too_little, too_much):
                when, is_end = attempt + 1, True
            spared = middle


def _is_hopeless(fault: MemoryShortage, rooms: Mapping[Device, int]) -> bool:
    """Whether closed forms miss what no attempt with more memory makes up for."""
    return not 0 < fault.num_bytes <= min(rooms.values())
