"""What stands in the wrong order: within a rank, and between the two ends of an edge."""

from __future__ import annotations

from collections.abc import Iterator
from operator import lt

from whale.ir.schedule import LAUNCHES, RECV_OF, SEND_OF, Action, Kind, Schedule
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
        last = positions.last_backward(stage)
        if found and found[0] < last:
            late = schedule.ranks[rank][last]
            yield rank, f"{stage}SYNC (action {found[0] + 1} of rank {rank}) stands before {late} (action {last + 1})"
    for rank, found in enumerate(positions.steps):
        last = len(schedule.ranks[rank]) - 1
        if found and found[0] != last:
            yield rank, f"STEP (action {found[0] + 1} of rank {rank}) is not the last of its {last + 1} actions"


def post_faults(positions: Positions, edges: Edges) -> Iterator[Fault]:
    """Each RECV stands after the POSTs of all that it waits for."""
    for post, sender, receiver in edges.messages():
        rank, kind = positions.stage_rank[receiver], RECV_OF[post]
        posted, taken = positions.posted(post, sender, receiver), positions.of(kind, receiver)
        if all(map(lt, posted, taken)):
            continue
        for micro_batch, (before, after) in enumerate(zip(posted, taken, strict=True)):
            if before > after > ABSENT:
                early, late = Action(kind, receiver, micro_batch), Action(post, sender, micro_batch)
                yield rank, f"{early} (action {after + 1} of rank {rank}) stands before {late} (action {before + 1})"


def bucket_faults(positions: Positions, schedule: Schedule) -> Iterator[Fault]:
    """No launch stands between a stage's last backward, during which buckets of gradients start, and its SYNC."""
    for stage, found in enumerate(positions.syncs):
        rank = positions.stage_rank[stage]
        last = positions.last_backward(stage)
        between = schedule.ranks[rank][last + 1 : found[0]] if found else ()
        for action in between:
            if action.kind in LAUNCHES:
                yield rank, f"{action} stands between {schedule.ranks[rank][last]} and {stage}SYNC on rank {rank}, where buckets start"


def channel_faults(positions: Positions, edges: Edges) -> Iterator[Fault]:
    """Both ends of an edge agree on the order of its micro-batches, so that each channel is first in, first out."""
    for post, sender, receiver in edges.messages():
        send, rank = SEND_OF[post], positions.stage_rank[receiver]
        sent, taken = positions.of(send, sender), positions.posted(post, sender, receiver)
        order, order_taken = (sorted(range(len(found)), key=found.__getitem__) for found in (sent, taken))
        if order != order_taken:
            at = next(number for number, pair in enumerate(zip(order, order_taken, strict=True)) if pair[0] != pair[1])
            first, second = Action(send, sender, order[at]), Action(post, sender, order_taken[at])
            yield (
                rank,
                f"{second} (action {taken[order_taken[at]] + 1} of rank {rank}) meets {first} "
                f"(action {sent[order[at]] + 1} of rank {positions.stage_rank[sender]}): message {at + 1} of that channel",
            )
