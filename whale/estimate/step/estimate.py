"""`estimate`: time and memory of a step of a plan, by running its own schedule with its own communication.

plan, graph, cluster, costs
   | gather       each device's work; messages and collectives, and their links
   | alike        classes of equivalent devices, links and messages
   | program      the schedule's actions of one device of each class, as tasks and transfers
   | engine       events: who computes what when, what is in flight
   | memory       what each device holds over time
StepEstimate
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from whale.axes import Axes
from whale.estimate.costs.costs import Costs
from whale.estimate.events.engine import EventTimes, Task, Uneven, run
from whale.estimate.events.simulate import Computation, bubble_rate
from whale.estimate.prices.prices import Prices
from whale.estimate.step.memory_over_time import Waiting, memory_over_time
from whale.estimate.step.program import Gathered, Program, gather, make_program, own_seconds_of
from whale.estimate.step.step import DeviceEstimate, LinkUse, StepEstimate
from whale.estimate.step.sync import averaging_seconds
from whale.estimate.step.wires import Crosses, Sums
from whale.estimate.step.workers import SimulatedWorker
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.schedule import COMPUTE, Action, Kind
from whale.ir.timeline import Message, Span, Stretch, Sync, Timeline

if TYPE_CHECKING:
    from whale.estimate.step.redundancy import Redundancy


def estimate(plan: Plan, graph: ModelGraph, cluster: Cluster, costs: Costs | None = None, *, axes: Axes | None = None) -> StepEstimate:
    """Estimates one step of a plan.

    Args:
        plan: verified, except for memory.
        graph: the model that it is for.
        cluster: the devices that it names.
        costs: assumptions besides the figures of devices and links; None for the defaults.
        axes: of the graph, where already known.
    """
    prices = Prices(graph, cluster, Costs() if costs is None else costs)
    if axes is not None:
        vars(prices)["axes"] = axes
    return estimate_with(prices, plan)


def estimate_with(prices: Prices, plan: Plan) -> StepEstimate:
    """Estimates one step of a plan from prices that may have cached answers."""
    gathered = gather(plan, prices)
    program, found = _run(gathered)
    assert not found.stuck, f"a verified schedule ends: {program.computations[found.stuck[0].worker][found.stuck[0].task]}"
    carried = _Carried(gathered, program, found)
    devices = tuple(_device(numbers, gathered, program, found, carried) for numbers in _at_the_same_times(gathered, program, found))
    copies = _redundancy(prices, plan)
    averaging = averaging_seconds(plan, prices)
    beside = averaging + (copies.step_seconds if copies is not None else 0.0)
    seconds = max((times[-1][1] for times in found.tasks if times), default=0.0) + beside
    spans = tuple(tuple(span for span in each.compute if span.action.kind in COMPUTE) for each in devices)
    links = tuple(_links(gathered, program, seconds))
    return StepEstimate(seconds, devices, links, bubble_rate(Timeline(spans)), copies, averaging)


def _redundancy(prices: Prices, plan: Plan) -> Redundancy | None:
    if not prices.costs.copies_every:
        return None
    from whale.estimate.step.redundancy import redundancy_of  # needed here alone

    return redundancy_of(plan, prices, prices.costs.copies_every)


def _run(gathered: Gathered) -> tuple[Program, EventTimes]:
    """Runs the program with the coarser classes; if they turn out wrong, with the exact ones."""
    program = make_program(gathered, by_links=False)
    try:
        return program, run(program.tasks, program.transfers, program.bandwidths)
    except Uneven:
        program = make_program(gathered, by_links=True)
        return program, run(program.tasks, program.transfers, program.bandwidths)


def _at_the_same_times(gathered: Gathered, program: Program, found: EventTimes) -> Iterator[Sequence[int]]:
    """Merges classes of devices that do the same at the same times, because their different links do not slow them down."""

    def look(number: int) -> Hashable:
        carried = (
            (_look(gathered.wires[wires[0]].kind, program.sent[transfer].ends.index(number)), len(wires), *found.transfers[transfer])
            for transfer, wires in program.at[number].items()
        )
        return gathered.workers[program.members[number][0]], tuple(found.tasks[number]), tuple(carried)

    classes: dict[Hashable, list[int]] = {}
    for number in range(len(program.members)):
        classes.setdefault(look(number), []).append(number)
    yield from classes.values()


def _look(kind: Hashable, end: int) -> Hashable:
    """What a device sees at one end of a message (one object for equal replicas), or of a sum."""
    return (kind.num_bytes, kind.gives) if isinstance(kind, Sums) else (id(kind), end)


def _device(numbers: Sequence[int], gathered: Gathered, program: Program, found: EventTimes, carried: _Carried) -> DeviceEstimate:
    number = numbers[0]
    members, times = sorted(index for each in numbers for index in program.members[each]), found.tasks[number]
    worker, order = gathered.workers[members[0]], program.computations[number]
    memory = memory_over_time(worker, order, times, *waiting(number, gathered, program, found))
    messages, syncs = carried.by(number)
    return DeviceEstimate(
        devices=tuple(gathered.devices[index] for index in members),
        stages=worker.stages,
        compute=tuple(Span(each.action, start, end) for each, (start, end) in zip(order, times, strict=True)),
        messages=messages,
        syncs=syncs,
        exposed=sum(_exposed(program.tasks[number], times, found)) + sum(end - start for start, end in found.paused[number]),
        memory=memory.points,
        peak=memory.peak,
        stage_peaks=memory.stages,
        stage_bytes=worker.stage_bytes,
        capacity=worker.capacity,
        on_host=worker.on_host,
        num_given=worker.num_given,
        own_seconds=sum(own_seconds_of(worker, each.action) for each in order),
        waits=tuple(Stretch("weights", start, end) for start, end in found.paused[number]),
    )


class _Carried:
    """Messages and gradient sums with their times, one object for all ends of each."""

    def __init__(self, gathered: Gathered, program: Program, found: EventTimes) -> None:
        self._gathered, self._program, self._found = gathered, program, found
        self._known: dict[tuple[int, int], Message | Sync] = {}

    def by(self, number: int) -> tuple[tuple[Message, ...], tuple[Sync, ...]]:
        """The messages and sums that the devices of a class take part in."""
        found = []
        for place in ((transfer, wire) for transfer, wires in self._program.at[number].items() for wire in wires):
            if place not in self._known:
                self._known[place] = self._value(*place)
            found.append(self._known[place])
        return tuple(each for each in found if isinstance(each, Message)), tuple(each for each in found if isinstance(each, Sync))

    def _value(self, transfer: int, number: int) -> Message | Sync:
        wire, times = self._gathered.wires[number], self._found.transfers[transfer]
        if isinstance(wire.kind, Sums):
            own, (start, end) = self._gathered.summed_stages[number], times
            return Sync(own, len(wire.parties), wire.kind.num_bytes, start, end, "weights" if wire.kind.gives else "gradients")
        assert isinstance(wire.kind, Crosses)
        source, target = (self._gathered.devices[party] for party in wire.parties)
        way = "B" if wire.kind.is_backward else "F"
        name = f"{wire.kind.source} -> {wire.kind.target} {way}{self._program.sent[transfer].micro_batch}"
        return Message(name, source, target, wire.kind.num_bytes, *times)


def _exposed(tasks: Sequence[Task], times: Sequence[tuple[float, float]], found: EventTimes) -> Iterator[float]:
    """Per task, seconds of waiting during which something that it needs is in flight."""
    before = 0.0
    for task, (start, end) in zip(tasks, times, strict=True):
        if start > before:
            reached = before
            for sent, arrived in sorted(found.transfers[transfer] for transfer in task.needs):
                low, high = max(sent, reached), min(arrived, start)
                if high > low:
                    yield high - low
                    reached = high
        before = end


def _links(gathered: Gathered, program: Program, seconds: float) -> Iterator[LinkUse]:
    """The links of each class, the most used first."""
    num_bytes = [0.0] * len(program.links)
    for transfer in program.transfers:
        for link, count in transfer.links:
            num_bytes[link] += count * transfer.num_bytes
    for number in sorted(range(len(program.links)), key=lambda link: -num_bytes[link] / program.bandwidths[link]):
        name, bandwidth = gathered.links[program.links[number][0]]
        share = num_bytes[number] / bandwidth / seconds if seconds > 0 else 0.0
        yield LinkUse(name, len(program.links[number]), num_bytes[number], share)


def waiting(number: int, gathered: Gathered, program: Program, found: EventTimes) -> tuple[list[Waiting], list[Waiting]]:
    """The messages that occupy a device: received ahead of their use, and gradients that may still be needed for sending.

    Received: from its POST to the computation that uses it. Sent: from the computation that made it until an answer shows
    that the receiver has it (`whale.schedules.holding`), else to the STEP.
    """
    times, received, sent = found.tasks[number], list[Waiting](), list[Waiting]()
    posted, used = dict[int, float](), dict[int, float]()
    ended = 0.0
    for task, (start, end) in zip(program.tasks[number], times, strict=True):
        for transfer in task.posts:
            posted[transfer] = ended
        for transfer in task.needs:
            used[transfer] = start
        ended = end
    worker = gathered.workers[program.members[number][0]]
    let_go = _let_go(gathered, worker, program.computations[number], times)
    for transfer in program.at[number]:
        sent_as = program.sent[transfer]
        kind = gathered.wires[sent_as.wire].kind
        if not isinstance(kind, Crosses):
            continue
        (source, target), (leaving, arriving) = sent_as.ends, sent_as.met
        if target == number:
            received.append(Waiting(kind.target, len(arriving) * kind.num_bytes, posted[transfer], used[transfer]))
        if source == number and kind.is_backward:
            peer = gathered.schedules[worker.schedule].stage_rank[kind.target]
            start, arrived = found.transfers[transfer]
            end = let_go.get((Action(Kind.SEND_BACKWARD, kind.source, sent_as.micro_batch), peer), times[-1][0])
            sent.append(Waiting(kind.source, len(leaving) * kind.num_bytes, start, max(end, arrived)))
    return received, sent


def _let_go(
    gathered: Gathered, worker: SimulatedWorker, order: Sequence[Computation], times: Sequence[tuple[float, float]]
) -> Mapping[tuple[Action, int], float]:
    """Per SEND and destination rank, the time at which it is known to be done."""
    known = {receive: start for each, (start, _) in zip(order, times, strict=True) for receive in each.receives}
    released = gathered.releases_of(worker.schedule, worker.rank)
    return {(send, peer): known[receive] for (receive, peer), sends in released.items() for send in sends}
