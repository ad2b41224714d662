"""The event engine: workers compute tasks in order; transfers start when all their parties are ready and share links.

    worker 0   |task|  task  |                      ready: sent
    transfer        |===========>|                  a share of every link that it passes; then the latency
    worker 1     |  task   |     |  task  |         ready: its receive is posted; the next task needs what arrives

A message may take time of the workers at its ends (handling). It has priority: the task running when it starts ends
that much later; a task that begins afterwards waits for the rest of it.

Of a link that k transfers use at once each gets 1/k, and a transfer is as fast as its narrowest share. The run is
deterministic: simultaneous events are processed in the order in which they were caused.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Task(NamedTuple):  # there are tens of thousands
    """One computation of a worker. Transfers are given by index."""

    seconds: float
    needs: tuple[int, ...] = ()  # must have arrived before it starts
    posts: tuple[int, ...] = ()  # may begin to arrive once the worker reaches it
    sends: tuple[int, ...] = ()  # ready when it ends
    joins: tuple[tuple[int, float], ...] = ()  # (transfer, share): ready after this share of it, 0 to 1
    awaits: tuple[tuple[int, float], ...] = ()  # (transfer, share): must have arrived before it continues after this share; sorted


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message, or a collective."""

    num_bytes: float
    latency: float  # seconds from the last byte to its arrival
    parties: int  # number of ready calls before it starts: by sender and receiver, or by all participants
    links: tuple[tuple[int, float], ...] = ()  # (link, count): how often its bytes pass the link; several simultaneous transfers add up
    queue: int | None = None  # transfers of one queue run one after another, by index; None for no queue
    handled: tuple[tuple[int, float], ...] = ()  # (worker, seconds) of handling, from its start on
    ways: tuple[tuple[int, ...], ...] = ()  # if it stands for several transfers over different links, the links of each


class Uneven(Exception):
    """Transfers that are simulated as one differ in speed at some time."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker that can never continue: its task, and what it waits for."""

    worker: int
    task: int
    transfer: int


@dataclass(frozen=True, slots=True)
class EventTimes:
    """When everything happened."""

    tasks: tuple[list[tuple[float, float]], ...]  # per worker, start and end of each task that ran
    transfers: list[tuple[float, float]]  # start and arrival of each; -1 where there is none
    stuck: tuple[Stuck, ...]  # workers that did not reach their end
    paused: tuple[list[tuple[float, float]], ...]  # per worker, start and end of its waits inside tasks


def run(workers: Sequence[Sequence[Task]], transfers: Sequence[Transfer], bandwidths: Sequence[float]) -> EventTimes:
    """Runs all tasks, each as early as possible.

    Args:
        workers: the tasks of each, in order.
        transfers: between them.
        bandwidths: bytes per second of each link.

    Raises:
        Uneven: the ways of a transfer are not equally fast.
    """
    return _Engine(workers, transfers, bandwidths).run()


_TASK_ENDS, _JOINS, _LAST_BYTE, _ARRIVES, _REACHES = range(5)

_EQUAL = 1e-12  # relative difference below which rates are equal: loads are sums of fractions


class _Engine:
    """One run. Events in the heap: (time, number, what, worker or transfer, version, or which of a task's `awaits`)."""

    def __init__(self, workers: Sequence[Sequence[Task]], transfers: Sequence[Transfer], bandwidths: Sequence[float]) -> None:
        self._workers, self._transfers = workers, transfers
        self._events: list[tuple[float, int, int, int, int]] = []
        self._num_events = 0
        self._links = _Links(transfers, bandwidths)
        self._tasks: tuple[list[tuple[float, float]], ...] = tuple([] for _ in workers)
        self._clocks = [0.0] * len(workers)
        self._at_work = [False] * len(workers)  # has a task that has started, or is to start at a known time
        self._handles_until = [0.0] * len(workers)
        self._missing = [transfer.parties for transfer in transfers]
        self._started = [-1.0] * len(transfers)
        self._arrived = [-1.0] * len(transfers)
        self._awaited: dict[int, list[int]] = {}
        self._awaited_within: dict[int, list[tuple[int, int, float]]] = {}  # workers, where in their task, and since when
        self._paused: tuple[list[tuple[float, float]], ...] = tuple([] for _ in workers)
        self._num_awaited = [0] * len(workers)
        self._queues: dict[int, list[int]] = {}
        for index in reversed(range(len(transfers))):
            queue = transfers[index].queue
            if queue is not None:
                self._queues.setdefault(queue, []).append(index)  # the next one last

    def run(self) -> EventTimes:
        for worker in range(len(self._workers)):
            self._stand_before(worker, 0, 0.0)
        while self._events:
            time, _, what, subject, version = heapq.heappop(self._events)
            if what == _TASK_ENDS:
                end = self._tasks[subject][-1][1]
                if end > time:  # messages have come in between
                    self._push(end, _TASK_ENDS, subject)
                else:
                    self._end_task(subject, time)
            elif what == _JOINS:
                self._call_ready(subject, time)
            elif what == _REACHES:
                self._reach(subject, version, time)
            elif what == _ARRIVES:
                self._leave_queue(subject, time)
            elif self._links.versions[subject] == version:
                self._push_all(self._links.remove(subject, time))
                self._arrive(subject, time + self._transfers[subject].latency)
        stuck = [Stuck(worker, len(self._tasks[worker]), number) for number, waiting in self._awaited.items() for worker in waiting]
        within = ((worker, number) for number, waiting in self._awaited_within.items() for worker, *_ in waiting)
        stuck += [Stuck(worker, len(self._tasks[worker]) - 1, number) for worker, number in within]
        return EventTimes(
            self._tasks,
            list(zip(self._started, self._arrived, strict=True)),
            tuple(sorted(stuck, key=lambda fault: (fault.worker, fault.transfer))),
            self._paused,
        )

    def _push(self, time: float, what: int, subject: int, version: int = 0) -> None:
        heapq.heappush(self._events, (time, self._num_events, what, subject, version))
        self._num_events += 1

    def _push_all(self, ends: Sequence[tuple[int, float]]) -> None:
        for transfer, time in ends:
            self._push(time, _LAST_BYTE, transfer, self._links.versions[transfer])

    def _stand_before(self, worker: int, position: int, now: float) -> None:
        """A worker reaches the task at `position`."""
        tasks = self._workers[worker]
        if position == len(tasks):
            return
        task = tasks[position]
        for transfer in task.posts:
            self._call_ready(transfer, now)
        self._clocks[worker] = now
        absent = [transfer for transfer in task.needs if self._arrived[transfer] < 0.0]
        self._num_awaited[worker] = len(absent)
        for transfer in absent:
            self._awaited.setdefault(transfer, []).append(worker)
        if not absent:
            self._start_task(worker, task)

    def _start_task(self, worker: int, task: Task) -> None:
        start = max([self._clocks[worker], *(self._arrived[transfer] for transfer in task.needs)])
        seconds = task.seconds + max(0.0, self._handles_until[worker] - start)
        self._at_work[worker] = True
        self._tasks[worker].append((start, start + seconds))
        for transfer, share in task.joins:
            self._push(start + share * seconds, _JOINS, transfer)
        if task.awaits:
            self._push(start + task.awaits[0][1] * seconds, _REACHES, worker, 0)
        else:
            self._push(start + seconds, _TASK_ENDS, worker)

    def _reach(self, worker: int, index: int, now: float) -> None:
        """A worker reaches a point inside its task that needs something."""
        transfer, _ = self._workers[worker][len(self._tasks[worker]) - 1].awaits[index]
        if self._arrived[transfer] < 0.0:
            self._awaited_within.setdefault(transfer, []).append((worker, index, now))
        else:
            self._go_on(worker, index, now, max(now, self._arrived[transfer]))

    def _go_on(self, worker: int, index: int, since: float, now: float) -> None:
        """What a worker waits for inside its task has arrived."""
        start, end = self._tasks[worker][-1]
        if now > since:
            end += now - since
            self._tasks[worker][-1] = start, end
            self._paused[worker].append((since, now))
        task = self._workers[worker][len(self._tasks[worker]) - 1]
        if index + 1 == len(task.awaits):
            self._push(end, _TASK_ENDS, worker)
        else:
            share = task.awaits[index + 1][1] - task.awaits[index][1]
            self._push(now + share * task.seconds, _REACHES, worker, index + 1)

    def _handle(self, worker: int, seconds: float, now: float) -> None:
        """A message takes time of a worker: of its task, except what passes before that starts."""
        begin = max(now, self._handles_until[worker])
        self._handles_until[worker] = begin + seconds
        if self._at_work[worker]:
            start, end = self._tasks[worker][-1]
            self._tasks[worker][-1] = start, end + max(0.0, seconds - max(0.0, start - begin))

    def _end_task(self, worker: int, now: float) -> None:
        self._at_work[worker] = False
        position = len(self._tasks[worker])
        for transfer in self._workers[worker][position - 1].sends:
            self._call_ready(transfer, now)
        self._stand_before(worker, position, now)

    def _call_ready(self, number: int, now: float) -> None:
        self._missing[number] -= 1
        if self._missing[number] == 0:
            queue = self._queues.get(self._transfers[number].queue)  # type: ignore[arg-type]
            if queue is None or queue[-1] == number:
                self._start_transfer(number, now)

    def _start_transfer(self, number: int, now: float) -> None:
        transfer = self._transfers[number]
        self._started[number] = now
        for worker, seconds in transfer.handled:
            self._handle(worker, seconds, now)
        if transfer.links and transfer.num_bytes > 0:
            self._push_all(self._links.add(number, now))
        else:
            self._arrive(number, now + transfer.latency)

    def _arrive(self, number: int, time: float) -> None:
        """A transfer arrives at `time`, now or in the future."""
        self._arrived[number] = time
        if self._transfers[number].queue is not None:
            self._push(time, _ARRIVES, number)
        for worker, index, since in self._awaited_within.pop(number, ()):
            self._go_on(worker, index, since, max(since, time))
        for worker in self._awaited.pop(number, ()):
            self._num_awaited[worker] -= 1
            if self._num_awaited[worker] == 0:
                self._start_task(worker, self._workers[worker][len(self._tasks[worker])])

    def _leave_queue(self, number: int, now: float) -> None:
        queue = self._queues[self._transfers[number].queue]  # type: ignore[index]
        queue.pop()
        if queue and self._missing[queue[-1]] == 0:
            self._start_transfer(queue[-1], now)


class _Links:
    """Which transfers use which links, and how fast."""

    def __init__(self, transfers: Sequence[Transfer], bandwidths: Sequence[float]) -> None:
        self._transfers, self._bandwidths = transfers, bandwidths
        self._loads = [0.0] * len(bandwidths)
        self._on: list[dict[int, None]] = [{} for _ in bandwidths]
        self._left: dict[int, tuple[float, float, float]] = {}  # bytes left, since when, at what rate
        self.versions = [0] * len(transfers)

    def add(self, number: int, now: float) -> list[tuple[int, float]]:
        """Starts a transfer; returns new ends of it and of others that slow down."""
        self._left[number] = self._transfers[number].num_bytes, now, 0.0
        for link, count in self._transfers[number].links:
            self._loads[link] += count
            self._on[link][number] = None
        return self._new_ends(number, now)

    def remove(self, number: int, now: float) -> list[tuple[int, float]]:
        """Ends a transfer; returns new ends of others that speed up."""
        del self._left[number]
        for link, count in self._transfers[number].links:
            self._loads[link] -= count
            del self._on[link][number]
        return self._new_ends(number, now)

    def _new_ends(self, number: int, now: float) -> list[tuple[int, float]]:
        """New ends of the transfers on these links whose rates change."""
        touched = {other: None for link, _ in self._transfers[number].links for other in self._on[link]}
        ends = []
        for other in touched:
            left, since, rate = self._left[other]
            fair = self._rate(self._transfers[other])
            if abs(fair - rate) > _EQUAL * rate:
                left = max(0.0, left - (now - since) * rate)
                self._left[other] = left, now, fair
                self.versions[other] += 1
                ends.append((other, now + left / fair))
        return ends

    def _rate(self, transfer: Transfer) -> float:
        if not transfer.ways:
            return min([self._bandwidths[link] / self._loads[link] for link, _ in transfer.links])
        rates = [min([self._bandwidths[link] / self._loads[link] for link in way]) for way in transfer.ways]
        if max(rates) - min(rates) > _EQUAL * max(rates):
            raise Uneven
        return min(rates)
