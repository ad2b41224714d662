"""What stands in the wrong order: within a rank, and between the two ends of an edge."""

from __future__ import annotations

from collections.abc import Iterator
from operator import lt

from whale.ir.schedule import Action, Kind, Schedule
from whale.schedules.edges import Edges
from whale.schedules.positions import ABSENT, Fault, Positions

# Each pair: the first stands before the second wherever a stage has both for a micro-batch.
_PAIRS = (
    (Kind.RECV_FORWARD, Kind.FORWARD),
    (Kind.FORWARD, Kind.SEND_FORWARD),
    (Kind.FORWARD, Kind.BACKWARD),
    (Kind.FORWARD, Kind.BACKWARD_INPUT),
    (Kind.FORWARD, Kind.RECOMPUTE),
    (Kind.RECOMPUTE, Kind.BACKWARD),
    (Kind.RECOMPUTE, Kind.BACKWARD_INPUT),
    (Kind.RECV_BACKWARD, Kind.BACKWARD),
    (Kind.RECV_BACKWARD, Kind.BACKWARD_INPUT),
    (Kind.BACKWARD, Kind.SEND_BACKWARD),
    (Kind.BACKWARD_INPUT, Kind.SEND_BACKWARD),
    (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
)


def order_faults(positions: Positions) -> Iterator[Fault]:
    """F before R before B or I before W; received before used, made before sent."""
    present = {kind for kind in positions.slots if positions.any(kind)}
    for first, second in _PAIRS:
        if first in present and second in present:
            for stage in range(len(positions.stage_rank)):
                yield from _pair_faults(positions, stage, first, second)


def _pair_faults(positions: Positions, stage: int, first: Kind, second: Kind) -> Iterator[Fault]:
    before, after = positions.of(first, stage), positions.of(second, stage)
    if all(map(lt, before, after)):
        return
    rank = positions.stage_rank[stage]
    for micro_batch, (a, b) in enumerate(zip(before, after, strict=True)):
        if a > b > ABSENT:
            early, late = Action(second, stage, micro_batch), Action(first, stage, micro_batch)
            yield rank, f"{early} (action {b + 1} of rank {rank}) stands before {late} (action {a + 1})"


def end_faults(positions: Positions, schedule: Schedule) -> Iterator[Fault]:
    """SYNC after the stage's last backward, STEP last of all."""
    for stage, found in enumerate(positions.syncs):
        rank = positions.stage_rank[stage]
        last = max(max(positions.of(kind, stage), default=ABSENT) for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))
        if found and found[0] < last:
            late = schedule.ranks[rank][last]
            yield rank, f"{stage}SYNC (action {found[0] + 1} of rank {rank}) stands before {late} (action {last + 1})"
    for rank, found in enumerate(positions.steps):
        last = len(schedule.ranks[rank]) - 1
        if found and found[0] != last:
            yield rank, f"STEP (action {found[0] + 1} of rank {rank}) is not the last of its {last + 1} actions"


def channel_faults(positions: Positions, edges: Edges) -> Iterator[Fault]:
    """Both ends of an edge agree on the order of its micro-batches, so that each channel is first in, first out."""
    for source, target in edges.crossing():
        for send, sender, receive, receiver in (
            (Kind.SEND_FORWARD, source, Kind.RECV_FORWARD, target),
            (Kind.SEND_BACKWARD, target, Kind.RECV_BACKWARD, source),
        ):
            sent, received = positions.of(send, sender), positions.of(receive, receiver)
            order, taken = (sorted(range(len(found)), key=found.__getitem__) for found in (sent, received))
            if order != taken:
                at = next(number for number, pair in enumerate(zip(order, taken, strict=True)) if pair[0] != pair[1])
                first, second = Action(send, sender, order[at]), Action(receive, receiver, taken[at])
                rank = positions.stage_rank[receiver]
                yield (
                    rank,
                    f"{second} (action {received[taken[at]] + 1} of rank {rank}) meets {first} "
                    f"(action {sent[order[at]] + 1} of rank {positions.stage_rank[sender]}): message {at + 1} of that channel",
                )
