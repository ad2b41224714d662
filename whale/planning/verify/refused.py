"""Plans again where the planner's closed forms and the estimate disagree on memory; the estimate decides.

closed forms: fits             -->  estimate: 300 bytes short on T4s  -->  closed forms, with 300 bytes less of each T4  -->  estimate
closed forms: 20 bytes short   -->  closed forms, with 20 bytes more of each device  -->  estimate

Two rounds in one direction, and no search between the two. Where closed forms find none with less, the last attempt assumes unlimited
memory: its best plan may still fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Protocol, TypeVar

from whale.errors import OutOfMemory, raise_faults
from whale.estimate import StepEstimate
from whale.ir.cluster import Cluster, Device
from whale.planning.pipeline.balance import MemoryShortage
from whale.planning.pricing import host_faults
from whale.planning.verify.verify import memory_fault, overfull


class Estimated(Protocol):
    @property
    def step(self) -> StepEstimate: ...


T = TypeVar("T", bound=Estimated)

Decide = Callable[[Mapping[Device, int]], T]
"""Makes a plan that leaves so many bytes free on each device type."""

# Figures below: of 19 searches of examples/benchmarks/constants.py on 2 and 3 devices, memory short in half of them; no step differs.

MAX_ROUNDS = 2  # further attempts in the same direction; 1: 1 % fewer estimates, 4: as many, 0: 22 % fewer

KEEPING_ROUNDS = 2
"""Attempts without recomputation before the plan that recomputes as needed is made; 1: 0.5 % more estimates, 4: as many."""

WORTH_KEEPING = 0.9
"""The others follow if a plan without recomputation that does not fit takes at most this part of its step. Half of it, or none: 0.5 % fewer
estimates; 1: as many.
"""

CLOSED_FORM_EXCESS = 0.3
"""Share of a device's memory by which closed forms may exceed the estimate: they add all gradients to all activations, and gradients are
a quarter of Adam's state in float32. A larger shortage goes straight to unlimited memory, one above the device's memory fails. Halved: 1 %
fewer estimates, doubled: as many, 0: 8 % fewer.
"""

FULL = 0.93
"""A plan without recomputation that fills a device beyond this may have been cut for memory: with some it may be faster. Half of it: 38 %
more estimates, 1: 4 % fewer.
"""

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
    keeping: Sequence[Decide[T]] = (),
    least: Sequence[Decide[T]] = (),
    by_order: Sequence[Decide[T]] = (),
) -> T:
    """The plan that fits by the estimate.

    Args:
        rooms: per device type, the bytes that a plan may fill.
        as_needed: makes a plan with so many of them left free, and raises `Refused` where it does not fit.
        keeping: the same without recomputation, where memory decides on that; taken if it fits, and compared with the one as needed if
            it fills a device, or fits only after more than two attempts, which must promise a tenth of the step.
        least: the same with most recomputation; the first that fits is taken where the one as needed does not.
        by_order: the same with what the order itself recomputes; compared with the one as needed.

    Raises:
        MemoryShortage: nothing fits; after refusals, with the estimate's figures of the plan that lacks least.
    """
    attempts = chain.from_iterable(_attempts(rooms, decide, is_unlimited_soon=True) for decide in keeping)
    kept, refused_seconds, faults = list[T](), 0.0, list[MemoryShortage]()
    for found in islice(attempts, KEEPING_ROUNDS):
        if isinstance(found, Refused):
            refused_seconds = found.step_seconds
            faults.append(found)
        elif not isinstance(found, MemoryShortage):
            kept.append(found)
    if kept and all(each.peak.total <= FULL * each.capacity for each in kept[0].step.devices):
        return kept[0]
    try:
        needed = _decide_in_rounds(rooms, as_needed)
    except MemoryShortage as fault:
        kept = kept or _fitting(attempts)
        if kept:
            return kept[0]
        faults.append(fault)
        for decide in least:
            try:
                return _decide_in_rounds(rooms, decide)
            except MemoryShortage as other:
                faults.append(other)
        raise _nearest(faults) from None
    for decide in by_order:
        with suppress(MemoryShortage):
            kept.append(_decide_in_rounds(rooms, decide))
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
    raise _nearest([*(fault for fault in faults if isinstance(fault, Refused)), faults[0]])  # closed forms were first asked for all memory


def _nearest(faults: Iterable[MemoryShortage]) -> MemoryShortage:
    """The fault that lacks least, by the estimate where it was asked."""
    return min(faults, key=lambda fault: (not isinstance(fault, Refused), fault.num_bytes))


def _attempts(rooms: Mapping[Device, int], decide: Decide[T], *, is_unlimited_soon: bool = False) -> Iterator[T | MemoryShortage]:
    """The plan with all memory; then with what the estimate lacks less of it, or with what closed forms lack more.

    Each attempt's fault, and the plan that fits. `is_unlimited_soon`: whether unlimited memory comes right after a shortage by closed
    forms: its plan is the fastest of all, whether it fits or not.
    """
    unlimited, spared, sign = dict.fromkeys(rooms, -UNLIMITED_BYTES), dict.fromkeys(rooms, 0), 0
    for _ in range(MAX_ROUNDS + 1):
        try:
            yield decide(spared)
            return
        except Refused as fault:
            yield fault
            if sign < 0:
                return
            sign, spared = 1, {kind: number + fault.lacking.get(kind, 0) for kind, number in spared.items()}
        except MemoryShortage as fault:
            yield fault
            if sign == 0 and _is_hopeless(fault, rooms):
                return
            is_large = fault.num_bytes > CLOSED_FORM_EXCESS * min(rooms.values())
            if sign > 0 or (sign == 0 and (is_large or is_unlimited_soon)):
                try:
                    yield decide(unlimited)
                    return
                except MemoryShortage as other:
                    yield other
                if sign > 0 or is_large:
                    return
            sign, spared = -1, {kind: number - fault.num_bytes for kind, number in spared.items()}


def _is_hopeless(fault: MemoryShortage, rooms: Mapping[Device, int]) -> bool:
    """Whether closed forms miss what no attempt with more memory makes up for."""
    return not 0 < fault.num_bytes <= min(rooms.values())
