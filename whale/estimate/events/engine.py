"""The event engine: workers compute one task after another; transfers start when all their parties are ready and share links.

    worker 0   |task|  task  |                      ready: sent
    transfer        |===========>|                  at work: its part of every link that it passes; then the latency
    worker 1     |  task   |     |  task  |         ready: its receive is posted; the next task needs what arrives

A message may take time of the workers at its ends. It goes first: what a worker computes when the message starts ends so much later; what
it begins after that waits for what is left of it.

Links are shared fairly: of a link that k transfers use at once each has one k-th, and a transfer is as fast as the
narrowest of its parts. Nothing is decided by chance: equal times come in the order in which they were caused.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Task(NamedTuple):  # there are tens of thousands
    """One computation of a worker. Transfers are named by their index.

    Attributes:
        seconds: how long it takes.
        needs: what must have arrived before it starts.
        posts: what may begin to arrive once the worker stands before it.
        sends: what is ready when it ends.
        joins: what is ready after a share of it, 0 to 1.
        awaits: what must have arrived before it goes on after a share of it, in order of the shares.
    """

    seconds: float
    needs: tuple[int, ...] = ()
    posts: tuple[int, ...] = ()
    sends: tuple[int, ...] = ()
    joins: tuple[tuple[int, float], ...] = ()
    awaits: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message, or a collective.

    Attributes:
        num_bytes: of it.
        latency: seconds from the last byte to its arrival.
        parties: how often it must be called ready before it starts: by sender and receiver, by all who take part.
        links: that it passes, each with how often its bytes do: of several equal transfers at the same time once for each.
        queue: transfers of one queue run one after another, in order of their indices; None for no queue.
        handled: seconds that it takes of workers at its ends, from its start on, each with the worker.
        ways: where several transfers that are taken to be alike pass unlike links, those of each; none where all pass the same.
    """

    num_bytes: float
    latency: float
    parties: int
    links: tuple[tuple[int, float], ...] = ()
    queue: int | None = None
    handled: tuple[tuple[int, float], ...] = ()
    ways: tuple[tuple[int, ...], ...] = ()


class Uneven(Exception):
    """Transfers that were taken to be alike are not equally fast at some time."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker that can never go on: its task, and what it waits for."""

    worker: int
    task: int
    transfer: int


@dataclass(frozen=True, slots=True)
class EventTimes:
    """When everything happened.

    Attributes:
        tasks: per worker, start and end of its tasks up to where it came.
        transfers: start and arrival of each; of one that never started or arrived, -1.
        stuck: workers that did not come to their end.
        paused: per worker, start and end of its waits in the midst of tasks.
    """

    tasks: tuple[list[tuple[float, float]], ...]
    transfers: list[tuple[float, float]]
    stuck: tuple[Stuck, ...]
    paused: tuple[list[tuple[float, float]], ...]


def run(workers: Sequence[Sequence[Task]], transfers: Sequence[Transfer], bandwidths: Sequence[float]) -> EventTimes:
    """Runs all tasks, each as early as can be.

    Args:
        workers: the tasks of each, in order.
        transfers: between them.
        bandwidths: bytes per second of each link.

    Raises:
        Uneven: the ways of a transfer are not equally fast.
    """
    return _Engine(workers, transfers, bandwidths).run()


_TASK_ENDS, _JOINS, _LAST_BYTE, _ARRIVES, _REACHES = range(5)

_EQUAL = 1e-12
"""Rates that differ by less, by a share, are one: loads are sums of fractions."""


class _Engine:
    """One run. Events stand in a heap as (time, number, what, worker or transfer, version, or which of a task's `awaits`)."""

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
        """A worker has ended what was before a task."""
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
        """A worker has come to where its task needs something."""
        transfer, _ = self._workers[worker][len(self._tasks[worker]) - 1].awaits[index]
        if self._arrived[transfer] < 0.0:
            self._awaited_within.setdefault(transfer, []).append((worker, index, now))
        else:
            self._go_on(worker, index, now, max(now, self._arrived[transfer]))

    def _go_on(self, worker: int, index: int, since: float, now: float) -> None:
        """What a worker waits for in the midst of its task is there."""
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
        """A message takes time of a worker: of its task, but for what is left until that starts."""
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
        """States when a transfer arrives: now, or in the future."""
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
    """What is at work on which links, and how fast."""

    def __init__(self, transfers: Sequence[Transfer], bandwidths: Sequence[float]) -> None:
        self._transfers, self._bandwidths = transfers, bandwidths
        self._loads = [0.0] * len(bandwidths)
        self._on: list[dict[int, None]] = [{} for _ in bandwidths]
        self._left: dict[int, tuple[float, float, float]] = {}  # bytes left, since when, at what rate
        self.versions = [0] * len(transfers)

    def add(self, number: int, now: float) -> list[tuple[int, float]]:
        """Puts a transfer to work; returns when it, and others that became slower, would end."""
        self._left[number] = self._transfers[number].num_bytes, now, 0.0
        for link, count in self._transfers[number].links:
            self._loads[link] += count
            self._on[link][number] = None
        return self._new_ends(number, now)

    def remove(self, number: int, now: float) -> list[tuple[int, float]]:
        """Ends a transfer; returns when others that became faster would end."""
        del self._left[number]
        for link, count in self._transfers[number].links:
            self._loads[link] -= count
            del self._on[link][number]
        return self._new_ends(number, now)

    def _new_ends(self, number: int, now: float) -> list[tuple[int, float]]:
        """The transfers on the links of one whose rates change, with the times at which they now end."""
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
