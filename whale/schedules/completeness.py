"""What a schedule lacks: computations, communication along its edges, SYNC and STEP; and what is too much."""

from __future__ import annotations

from collections.abc import Iterator

from whale.ir.schedule import Action, Kind
from whale.schedules.edges import Edges
from whale.schedules.positions import ABSENT, Fault, Positions


def missing_computations(positions: Positions) -> Iterator[Fault]:
    """Every stage runs each micro-batch forward and, when training, backward: B, or both I and W."""
    trains = positions.trains
    for stage in range(len(positions.stage_rank)):
        yield from _lacking(positions, stage, Kind.FORWARD)
        if trains:
            yield from _backward(positions, stage)
    if trains:
        yield from _missing_ends(positions)


def _missing_ends(positions: Positions) -> Iterator[Fault]:
    for stage, found in enumerate(positions.syncs):
        if not found:
            rank = positions.stage_rank[stage]
            yield rank, f"{Action(Kind.SYNC, stage)} is missing on rank {rank}"
    for rank, found in enumerate(positions.steps):
        if not found:
            yield rank, f"STEP is missing on rank {rank}"


def _backward(positions: Positions, stage: int) -> Iterator[Fault]:
    whole = positions.of(Kind.BACKWARD, stage)
    inputs, weights = positions.of(Kind.BACKWARD_INPUT, stage), positions.of(Kind.BACKWARD_WEIGHT, stage)
    splits = max(*inputs, *weights) > ABSENT
    if not splits and ABSENT not in whole:
        return
    rank = positions.stage_rank[stage]
    for micro_batch, found in enumerate(zip(whole, inputs, weights, strict=True)):
        has_whole, has_input, has_weight = (position > ABSENT for position in found)
        at = f"of stage {stage}, micro-batch {micro_batch}"
        if has_whole and (has_input or has_weight):
            yield rank, f"the backward {at} is there twice on rank {rank}: whole ({stage}B{micro_batch}) and in parts"
        elif has_whole:
            continue
        elif not has_input and not has_weight and not splits:
            yield rank, f"{stage}B{micro_batch} is missing on rank {rank}"
        else:
            wanted = ((Kind.BACKWARD_INPUT, has_input), (Kind.BACKWARD_WEIGHT, has_weight))
            for kind in (kind for kind, there in wanted if not there):
                yield rank, f"{Action(kind, stage, micro_batch)} is missing on rank {rank}"


def communication_faults(positions: Positions, edges: Edges) -> Iterator[Fault]:
    """Every edge between ranks is sent along and received from, each micro-batch once; nothing else is."""
    crossing = edges.crossing()
    into, out_of = {target for _, target in crossing}, {source for source, _ in crossing}
    into_back, out_of_back = (out_of, into) if positions.trains else (set[int](), set[int]())
    for kind, stages in (
        (Kind.RECV_FORWARD, into),
        (Kind.SEND_FORWARD, out_of),
        (Kind.RECV_BACKWARD, into_back),
        (Kind.SEND_BACKWARD, out_of_back),
    ):
        for stage in range(len(positions.stage_rank)):
            if stage in stages:
                yield from _lacking(positions, stage, kind)
            else:
                yield from _surplus(positions, stage, kind)
    yield from _post_faults(positions, edges)
    if crossing:
        for rank, found in enumerate(positions.losses):
            if not found:
                yield rank, f"LOSS is missing on rank {rank}"


def _post_faults(positions: Positions, edges: Edges) -> Iterator[Fault]:
    """What comes to a rank from a stage of another is posted there, once for all the rank's stages; nothing else is."""
    wanted = tuple(set[tuple[Kind, int]]() for _ in positions.posts)
    for kind, sender, receiver in edges.messages():
        if kind is Kind.POST_FORWARD or positions.trains:
            wanted[positions.stage_rank[receiver]].add((kind, sender))
    for rank, (own, posts) in enumerate(zip(wanted, positions.posts, strict=True)):
        none = [ABSENT] * positions.num_micro_batch
        missing = [Action(*key, number) for key in own for number, position in enumerate(posts.get(key, none)) if position == ABSENT]
        surplus = {Action(*key, number): position for key in posts.keys() - own for number, position in enumerate(posts[key])}
        for action in sorted(missing, key=str):
            yield rank, f"{action} is missing on rank {rank}"
        for action in sorted((each for each, position in surplus.items() if position > ABSENT), key=str):
            yield rank, f"{action} (action {surplus[action] + 1} of rank {rank}) has no edge between ranks to come along"


def _lacking(positions: Positions, stage: int, kind: Kind) -> Iterator[Fault]:
    found = positions.of(kind, stage)
    if ABSENT in found:
        rank = positions.stage_rank[stage]
        for micro_batch, position in enumerate(found):
            if position == ABSENT:
                yield rank, f"{Action(kind, stage, micro_batch)} is missing on rank {rank}"


def _surplus(positions: Positions, stage: int, kind: Kind) -> Iterator[Fault]:
    rank = positions.stage_rank[stage]
    for micro_batch, position in enumerate(positions.of(kind, stage)):
        if position > ABSENT:
            action = Action(kind, stage, micro_batch)
            yield rank, f"{action} (action {position + 1} of rank {rank}) has no edge between ranks to go along"
