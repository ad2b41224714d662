"""What the event engine runs for a plan: the tasks of one device per class, and one transfer per class.

First everything that takes part is gathered: devices with their work, links, messages and collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from whale.estimate.events.engine import Task, Transfer
from whale.estimate.events.simulate import Computation, computations
from whale.estimate.prices.prices import Prices
from whale.estimate.step.alike import EquitablePartition, Path, Role, Wire, classify
from whale.estimate.step.sync import buckets, deferred
from whale.estimate.step.wires import Crosses, Links, Sums, message_wires, sum_wires
from whale.estimate.step.work import Work
from whale.estimate.step.workers import SimulatedWorker, Workers
from whale.ir.plan import Plan
from whale.ir.schedule import Action, Kind, Schedule
from whale.schedules import Edges, alike_schedules, edge_pairs, forward_schedules_of, releases, schedules_of
from whale.schedules.holding import Releases


@dataclass(frozen=True)
class Gathered:
    """The whole step, device by device."""

    devices: tuple[str, ...]  # names, in the order of the plan's ranks
    workers: tuple[SimulatedWorker, ...]  # of the devices
    links: tuple[tuple[str, float], ...]  # name and bytes per second of each
    wires: tuple[Wire, ...]  # all transfers; their `kind` is a `Crosses` or a `Sums`
    schedules: tuple[Schedule, ...]  # the distinct ones
    pairs: tuple[tuple[tuple[int, int], ...], ...]  # per schedule, the pairs of stages joined by an edge

    def releases_of(self, schedule: int, rank: int) -> Releases:
        """When a rank of a schedule knows that its sends were received, cached."""
        if (schedule, rank) not in self._releases:
            own = self.schedules[schedule]
            self._releases[schedule, rank] = releases(own, Edges.of(own, self.pairs[schedule]), rank)
        return self._releases[schedule, rank]

    @cached_property
    def _releases(self) -> dict[tuple[int, int], Releases]:
        return {}

    @cached_property
    def summed_stages(self) -> Mapping[int, tuple[int, ...]]:
        """Per collective wire, the stages whose gradients it sums."""
        found = {}
        for number, wire in enumerate(self.wires):
            if isinstance(wire.kind, Sums):
                found[number] = tuple(sorted({stage for stages, *_ in set(wire.roles) for stage in stages}))  # type: ignore[attr-defined]
        return found


def gather(plan: Plan, prices: Prices) -> Gathered:
    """Collects a plan's workers, links and wires.

    Raises:
        ScheduleError: a schedule of the plan would not run to its end.
    """
    shared = buckets(plan, prices)
    schedules = schedules_of(plan) if prices.training else forward_schedules_of(plan)
    makers, found = Workers(plan, prices, shared, schedules), dict[str, SimulatedWorker]()
    alike = alike_schedules(plan)
    for replica, schedule, number in zip(plan.replicas, schedules, alike, strict=True):
        found |= makers.of(replica, schedule, number)
    links = Links(prices)
    rank = plan.rank_of
    wires = (*message_wires(plan, prices, links, rank), *sum_wires(plan, prices, links, deferred(shared.published, prices), shared.summed))
    workers = tuple(found[device] for device in plan.devices)
    if prices.everyones_buffers:
        from whale.estimate.step.library_buffers import library_buffers  # needed here alone

        workers = tuple(_with_buffers(workers, library_buffers(plan, prices, shared.groups, wires, schedules)))
    followed = tuple(dict(zip(alike, schedules, strict=True)).values())
    pairs = tuple({number: edge_pairs(replica) for number, replica in zip(alike, plan.replicas, strict=True)}.values())
    return Gathered(plan.devices, workers, tuple(links.found), wires, followed, pairs)


def _with_buffers(workers: Iterable[SimulatedWorker], buffers: Iterable[int]) -> Iterator[SimulatedWorker]:
    """Workers with the bytes of their communicators; equal ones share theirs."""
    known: dict[tuple[int, int], SimulatedWorker] = {}
    for worker, num_bytes in zip(workers, buffers, strict=True):
        if not num_bytes:
            yield worker
            continue
        key = id(worker), num_bytes
        if key not in known:
            known[key] = replace(worker, held=replace(worker.held, communicators=float(num_bytes)))
        yield known[key]


_HANDING_BACK = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
_TOWARDS_SOURCE = _HANDING_BACK | {Kind.SEND_BACKWARD, Kind.RECV_BACKWARD, Kind.POST_BACKWARD}


def work_of(worker: SimulatedWorker, action: Action) -> Work:
    assert action.stage is not None and action.micro_batch is not None
    return worker.work[action.stage, worker.rows[action.micro_batch]]


def seconds_of(worker: SimulatedWorker, action: Action) -> float:
    """Seconds of a computation, or of the optimizer's STEP."""
    if action.kind is Kind.STEP:
        return worker.optimizer
    work = work_of(worker, action)
    if action.kind is Kind.BACKWARD_INPUT:
        return work.backward_input
    if action.kind is Kind.BACKWARD_WEIGHT:
        return work.backward_weight
    return work.backward_input + work.backward_weight if action.kind is Kind.BACKWARD else work.forward


def own_seconds_of(worker: SimulatedWorker, action: Action) -> float:
    """Seconds of a computation's own ops, without exchanges and waits; I counts all of I and W."""
    if action.kind in (Kind.STEP, Kind.BACKWARD_WEIGHT):
        return 0.0
    work = work_of(worker, action)
    return work.own_backward if action.kind in _HANDING_BACK else work.own_forward


class Sent(NamedTuple):  # there are tens of thousands
    """One transfer of the program."""

    wire: int  # the first of the wires that it stands for
    ends: tuple[int, ...]  # the classes of devices that send and receive it, or take part
    met: tuple[tuple[int, ...], ...]  # per end, its wires at the simulated device of the class; several if equivalent devices send to one
    micro_batch: int | None = None  # of a message


@dataclass(frozen=True)
class Program:
    """What is run."""

    members: tuple[tuple[int, ...], ...]  # per class of devices, their indices; the first is simulated
    computations: tuple[tuple[Computation, ...], ...]  # per class, in order
    tasks: tuple[tuple[Task, ...], ...]  # per class, one per computation
    transfers: tuple[Transfer, ...]  # one per class of wires and micro-batch
    sent: tuple[Sent, ...]  # what each transfer is
    bandwidths: tuple[float, ...]  # of one link of each class
    links: tuple[tuple[int, ...], ...]  # per class of links, their indices

    @cached_property
    def at(self) -> tuple[Mapping[int, tuple[int, ...]], ...]:
        """Per class of devices, its transfers, each with the wires at the simulated device."""
        found: list[dict[int, tuple[int, ...]]] = [{} for _ in self.members]
        for number, sent in enumerate(self.sent):
            for end, wires in zip(sent.ends, sent.met, strict=True):
                found[end][number] = (*found[end].get(number, ()), *wires)
        return tuple(found)


def make_program(gathered: Gathered, *, by_links: bool) -> Program:
    """Finds the classes, and makes the tasks of one device each; `by_links` as for `classify`: without, `run` may raise `Uneven`."""
    classes = classify(gathered.workers, [bandwidth for _, bandwidth in gathered.links], gathered.wires, by_links=by_links)
    members, links = _members(classes.workers), _members(classes.links)
    wires = _Wires(gathered, classes, members, links)
    tasks, done = [], []
    orders = [[tuple(computations(actions)) for actions in schedule.ranks] for schedule in gathered.schedules]
    places = [[tuple(map(_Places.of, order)) for order in ranks] for ranks in orders]
    for number, own in enumerate(members):
        worker = gathered.workers[own[0]]
        done.append(orders[worker.schedule][worker.rank])
        tasks.append(tuple(_tasks(worker, done[-1], places[worker.schedule][worker.rank], wires.at[number])))
    return Program(
        members,
        tuple(done),
        tuple(tasks),
        tuple(wires.transfers),
        tuple(wires.sent),
        tuple(gathered.links[own[0]][1] for own in links),
        links,
    )


def _members(classes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    found: dict[int, list[int]] = {}
    for index, number in enumerate(classes):
        found.setdefault(number, []).append(index)
    return tuple(tuple(found[number]) for number in sorted(found))


_Place = tuple[int, int, bool, bool]
"""Stage (of the device; for POSTs that at the other end), micro-batch, whether backward, whether local."""


@dataclass
class _Ends:
    """Transfers of one class of devices: messages by place, and collectives."""

    posted: dict[_Place, list[int]] = field(default_factory=dict)
    arriving: dict[_Place, list[int]] = field(default_factory=dict)
    leaving: dict[_Place, list[int]] = field(default_factory=dict)
    sums: dict[int, Role] = field(default_factory=dict)
    given: dict[int, Role] = field(default_factory=dict)


class _Wires:
    """Transfers, each of which stands for all wires of a class."""

    def __init__(
        self, gathered: Gathered, classes: EquitablePartition, members: Sequence[Sequence[int]], links: Sequence[Sequence[int]]
    ) -> None:
        self.transfers: list[Transfer] = []
        self.sent: list[Sent] = []
        self.at = [_Ends() for _ in members]
        self._handling = [gathered.workers[own[0]].handling for own in members]
        self._queues: dict[tuple[tuple[int, ...], int], int] = {}
        loads = _loads(gathered.wires, classes, {own[0] for own in links})
        first = {own[0]: number for number, own in enumerate(members)}
        for number, own in enumerate(_members(classes.wires)):
            wire, passed = gathered.wires[own[0]], tuple(sorted(loads.get(number, {}).items()))
            ways = _ways((gathered.wires[index].links for index in own), classes.links)
            if isinstance(wire.kind, Crosses):
                ends = tuple(classes.workers[party] for party in wire.parties)
                met = tuple(
                    tuple(index for index in own if gathered.wires[index].parties[side] == members[end][0]) for side, end in enumerate(ends)
                )
                self._add_messages(wire.kind, Sent(own[0], ends, met), gathered.workers[wire.parties[0]].rows, passed, ways)
            else:
                assert isinstance(wire.kind, Sums)
                roles: dict[int, Role] = {}
                at: dict[int, list[int]] = {}
                for index in own:
                    for party, role in gathered.wires[index].with_roles:
                        if party in first:
                            roles[first[party]] = role
                            at.setdefault(first[party], []).append(index)
                ends = tuple(sorted(roles))
                met = tuple(tuple(at[end]) for end in ends)
                self._add_sum(wire.kind, Sent(own[0], ends, met), roles, passed, ways)

    def _add_messages(self, kind: Crosses, sent: Sent, rows: Sequence[int], links: tuple[tuple[int, float], ...], ways: _Ways) -> None:
        """One message per micro-batch of its number of rows."""
        sender, receiver = (self.at[end] for end in sent.ends)
        transfer = Transfer(kind.num_bytes, kind.latency, 2, links, handled=self._handled(kind, sent), ways=ways)
        for micro_batch, num_rows in enumerate(rows):
            if num_rows == kind.num_rows:
                number = len(self.transfers)
                self.transfers.append(transfer)
                self.sent.append(Sent(sent.wire, sent.ends, sent.met, micro_batch))
                left = kind.source, micro_batch, kind.is_backward, kind.is_local
                receiver.posted.setdefault(left, []).append(number)
                sender.leaving.setdefault(left, []).append(number)
                receiver.arriving.setdefault((kind.target, micro_batch, kind.is_backward, kind.is_local), []).append(number)

    def _handled(self, kind: Crosses | Sums, sent: Sent) -> tuple[tuple[int, float], ...]:
        """Handling at the simulated device of each class at its ends."""
        own = ((end, self._handling[end], len(wires)) for end, wires in zip(sent.ends, sent.met, strict=True))
        return tuple((end, count * kind.volume.seconds(handling)) for end, handling, count in own if handling)

    def _add_sum(self, kind: Sums, sent: Sent, roles: Mapping[int, Role], links: tuple[tuple[int, float], ...], ways: _Ways) -> None:
        queue = self._queues.setdefault((sent.ends, kind.num_owners), len(self._queues))
        for end, role in roles.items():
            (self.at[end].given if kind.gives else self.at[end].sums)[len(self.transfers)] = role
        self.transfers.append(Transfer(kind.num_bytes, kind.latency, len(sent.ends), links, queue, self._handled(kind, sent), ways))
        self.sent.append(sent)


_Ways = tuple[tuple[int, ...], ...]
"""Classes of links."""


def _ways(paths: Iterable[Path], classes: Sequence[int]) -> _Ways:
    """Link classes of the paths of one class of wires, each distinct path once; empty if all are the same."""
    unlike = dict.fromkeys(paths)
    found = dict.fromkeys(tuple(sorted({classes[link] for link, _ in path})) for path in unlike) if len(unlike) > 1 else {}
    return tuple(found) if len(found) > 1 else ()


def _loads(wires: Sequence[Wire], classes: EquitablePartition, first_links: set[int]) -> dict[int, dict[int, float]]:
    """Per class of wires and class of links, how often its bytes pass one of the links."""
    found: dict[int, dict[int, float]] = {}
    passed: dict[Path, list[tuple[int, float]]] = {}  # the buckets of one ring pass the same
    for number, wire in zip(classes.wires, wires, strict=True):
        if wire.links not in passed:
            passed[wire.links] = [(classes.links[link], load) for link, load in wire.links if link in first_links]
        for link, load in passed[wire.links]:
            loads = found.setdefault(number, {})
            loads[link] = loads.get(link, 0.0) + load
    return found


@dataclass(frozen=True)
class _Places:
    """Where the messages of one computation are found, in any device that runs it."""

    local: tuple[_Place, ...]
    posts: tuple[_Place, ...]
    receives: tuple[_Place, ...]
    sends: tuple[_Place, ...]

    @staticmethod
    def of(each: Computation) -> _Places:
        """Those of its actions; transfers between devices of one virtual device have no actions of their own."""
        here = [each.action] if each.action.kind is Kind.FORWARD or each.action.kind in _HANDING_BACK else []
        posts, receives, sends = (_places(actions, is_local=False) for actions in (each.posts, each.receives, each.sends))
        return _Places(_places(here, is_local=True), posts, receives, sends)


def _places(actions: Iterable[Action], *, is_local: bool) -> tuple[_Place, ...]:
    return tuple((each.stage, each.micro_batch, each.kind in _TOWARDS_SOURCE, is_local) for each in actions)  # type: ignore[misc]


def _tasks(worker: SimulatedWorker, order: Sequence[Computation], places: Sequence[_Places], ends: _Ends) -> Iterator[Task]:
    """The tasks of one device.

    Receives start at their POSTs; those from devices of its own virtual device when they are needed.
    """
    joined, awaited = _joins(order, ends), _awaits(order, ends)
    has_local = any(is_local for at in (ends.arriving, ends.leaving) for *_, is_local in at)
    for position, (each, at) in enumerate(zip(order, places, strict=True)):
        local = _met(at.local, ends.arriving) if has_local else ()
        needs = (*_met(at.receives, ends.arriving), *local)
        if each.action.kind is Kind.STEP:
            needs = (*needs, *ends.sums, *ends.given)
        sends = (*(_met(at.local, ends.leaving) if has_local else ()), *_met(at.sends, ends.leaving))
        posts = (*_met(at.posts, ends.posted), *local, *(ends.given if position == 0 else ()))
        yield Task(seconds_of(worker, each.action), needs, posts, sends, tuple(joined.get(position, ())), tuple(awaited.get(position, ())))


def _awaits(order: Sequence[Computation], ends: _Ends) -> dict[int, list[tuple[int, float]]]:
    """Per computation, the weights needed inside it: in the first forward pass of a stage that reads them."""
    first = {each.action.stage: position for position, each in reversed([*enumerate(order)]) if each.action.kind is Kind.FORWARD}
    found: dict[int, list[tuple[int, float]]] = {}
    for number, (stages, share, _) in ends.given.items():
        assert isinstance(stages, tuple) and isinstance(share, float)
        position = min((first[stage] for stage in stages if stage in first), default=None)
        if position is not None:
            found.setdefault(position, []).append((number, share))
    return {position: sorted(own, key=lambda each: each[1]) for position, own in found.items()}


def _met(places: Sequence[_Place], at: Mapping[_Place, Sequence[int]]) -> Sequence[int]:
    if not places:
        return ()
    if len(places) == 1:
        return at.get(places[0], ())
    return [number for place in places for number in at.get(place, ())]


def _joins(order: Sequence[Computation], ends: _Ends) -> dict[int, list[tuple[int, float]]]:
    """Per computation, the sums that become ready inside it or at its end."""
    last = {stage: position for position, each in enumerate(order) for stage in each.synced}
    found: dict[int, list[tuple[int, float]]] = {}
    for number, (stages, share, is_last) in ends.sums.items():
        assert isinstance(stages, tuple) and isinstance(share, float)
        if is_last:
            position = len(order) - 2  # the last before STEP
        else:
            position = last[stages[0]]
            share = share if order[position].action.kind is Kind.BACKWARD else 1.0
        found.setdefault(position, []).append((number, share))
    return found
