"""Which messages lie on a device, and how long: those that have come before their use, and gradients that may still be needed to send.

received   from its POST to the computation that uses it
sent       from the computation that made it until an answer shows that its taker has it (`whale.schedules.holding`), else to the STEP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whale.estimate.events.computations import Computation
from whale.estimate.events.engine import EventTimes
from whale.estimate.step.gather import Gathered
from whale.estimate.step.memory_over_time import Waiting
from whale.estimate.step.program import Program
from whale.estimate.step.wires import Crosses
from whale.estimate.step.workers import Worker
from whale.ir.schedule import Action, Kind


def waiting(number: int, gathered: Gathered, program: Program, found: EventTimes) -> tuple[list[Waiting], list[Waiting]]:
    """What a device has received, and what gradients it has sent, each from one time to another.

    Args:
        number: of its class.
        gathered, program: the step.
        found: its times.
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
    gathered: Gathered, worker: Worker, order: Sequence[Computation], times: Sequence[tuple[float, float]]
) -> Mapping[tuple[Action, int], float]:
    """Per SEND, and rank that it goes to, the time at which it is known to be done."""
    known = {receive: start for each, (start, _) in zip(order, times, strict=True) for receive in each.receives}
    released = gathered.releases_of(worker.schedule, worker.rank)
    return {(send, peer): known[receive] for (receive, peer), sends in released.items() for send in sends}
