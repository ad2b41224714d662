"""Proves that a schedule is complete, in order, free of deadlock, and within the peak memory it promises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import lt

from whale.errors import ScheduleError, raise_faults
from whale.ir.schedule import COMPUTE, LAUNCHES, POSTS, RECEIVES, RECV_OF, SEND_OF, SENDS, Action, Kind, Schedule
from whale.schedules.execution import Edges, execute, replay
from whale.schedules.holding import count_in_flight

Fault = tuple[int | None, str]  # the rank in whose line it is, if in one; what is wrong

ABSENT = -1


def verify(schedule: Schedule, edges: Iterable[tuple[int, int]] | None = None, *, places: Sequence[str] = ()) -> None:
    """Checks a schedule and reports all its faults at once.

    Every action once and on its stage's rank; F before R before B (or I before W); communication complete along the edges
    and in one order at both ends; SYNC and STEP at their ends; no deadlock, with non-blocking sends and with launches that
    block until the other end arrives; peak in flight as promised. Deadlocks are looked for only if nothing is missing or
    out of order, which would be reported twice.

    Args:
        schedule: with communication, or as a builder made it.
        edges: pairs of stages; communication along them is then required. None means a chain, and no communication is
            required of a schedule without any SEND.
        places: per rank, ``file:line`` of its actions, for the messages.

    Raises:
        ScheduleError: all the faults.
    """
    by_rank = sorted(_faults(schedule, edges), key=lambda fault: -1 if fault[0] is None else fault[0])
    raise_faults([ScheduleError(message, where=None if rank is None or rank >= len(places) else places[rank]) for rank, message in by_rank])


def _faults(schedule: Schedule, pairs: Iterable[tuple[int, int]] | None) -> list[Fault]:
    faults = list(_shape_faults(schedule))
    if faults:
        return faults
    edges = Edges.of(schedule, pairs)
    positions, faults = _locate(schedule)
    faults += _missing_computations(positions)
    communicates = pairs is not None or positions.any(Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    if communicates:
        faults += _communication_faults(positions, edges)
    faults += _order_faults(positions)
    faults += _end_faults(positions, schedule)
    if communicates:
        faults += _late_posts(positions, edges)
        faults += _bucket_faults(positions, schedule)
    if faults:
        return faults
    if communicates:
        faults += _channel_faults(positions, edges)
    deadlocks = list(_deadlocks(schedule, edges))
    if communicates and not faults and not deadlocks:
        deadlocks = list(_rendezvous_deadlocks(schedule))
    return [*faults, *deadlocks, *_broken_promises(schedule)]


def _shape_faults(schedule: Schedule) -> Iterator[Fault]:
    num_ranks = len(schedule.ranks)
    for stage, rank in enumerate(schedule.stage_rank):
        if rank >= num_ranks:
            yield None, f"stage {stage} is on rank {rank}, but there are {num_ranks} ranks"
    if schedule.num_micro_batch < 1 or not schedule.stage_rank:
        yield (
            None,
            f"the schedule has {schedule.num_micro_batch} micro-batches and {schedule.num_stages} stages; it needs at least 1 of each",
        )
    if schedule.peak_in_flight and len(schedule.peak_in_flight) != num_ranks:
        yield None, f"peak in flight has {len(schedule.peak_in_flight)} figures for {num_ranks} ranks"


def _deadlocks(schedule: Schedule, edges: Edges) -> Iterator[Fault]:
    stuck = execute(schedule, edges).stuck
    at = {fault.rank: schedule.ranks[fault.rank][fault.position] for fault in stuck}
    for fault in stuck:
        peer = schedule.stage_rank[fault.awaited.stage or 0]
        behind = f"which comes after {at[peer]} on rank {peer}, itself stuck" if peer in at else f"which rank {peer} never runs"
        if peer == fault.rank:
            behind = "which comes later on the same rank"
        action = f"{at[fault.rank]} (action {fault.position + 1} of rank {fault.rank})"
        yield fault.rank, f"deadlock: {action} waits for {fault.awaited}, {behind}"


def _rendezvous_deadlocks(schedule: Schedule) -> Iterator[Fault]:
    blocked = replay(schedule)
    at = {fault.rank: schedule.ranks[fault.rank][fault.position] for fault in blocked}
    for fault in blocked:
        action = f"{at[fault.rank]} (action {fault.position + 1} of rank {fault.rank})"
        behind = " and ".join(f"rank {rank}, which stays at {at[rank]}" for rank in fault.absent)
        yield fault.rank, f"deadlock where a launch waits for its other end: {action} waits for {behind}"


def _broken_promises(schedule: Schedule) -> Iterator[Fault]:
    for rank, (promised, found) in enumerate(zip(schedule.peak_in_flight, count_in_flight(schedule), strict=False)):
        if found > promised:
            yield rank, f"rank {rank} holds more activations at once than promised ({found}, promised {promised})"


@dataclass(frozen=True)
class Positions:
    """Positions within each rank's actions; `ABSENT` where there is none."""

    num_micro_batch: int
    stage_rank: tuple[int, ...]
    slots: dict[Kind, list[int]]  # per kind, at ``stage * num_micro_batch + micro_batch``
    syncs: tuple[list[int], ...]  # per stage, positions of its SYNC
    posts: tuple[dict[tuple[Kind, int], list[int]], ...]  # per rank, kind and sending stage: positions by micro-batch
    losses: tuple[list[int], ...]  # per rank
    steps: tuple[list[int], ...]  # per rank

    def of(self, kind: Kind, stage: int) -> list[int]:
        return self.slots[kind][stage * self.num_micro_batch : (stage + 1) * self.num_micro_batch]

    def posted(self, kind: Kind, sender: int, receiver: int) -> list[int]:
        """Per micro-batch, the position of the POST on the receiving stage's rank for what `sender` sends."""
        return self.posts[self.stage_rank[receiver]].get((kind, sender), [ABSENT] * self.num_micro_batch)

    def last_backward(self, stage: int) -> int:
        """The position of the stage's last action that adds to its gradients."""
        kinds = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        return max(max(self.of(kind, stage), default=ABSENT) for kind in kinds)

    def any(self, *kinds: Kind) -> bool:
        return any(max(self.slots[kind], default=ABSENT) > ABSENT for kind in kinds)

    @property
    def trains(self) -> bool:
        """Whether there is any backward, SYNC or STEP."""
        backward = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE)
        return self.any(*backward) or any(self.syncs) or any(self.steps)


def _locate(schedule: Schedule) -> tuple[Positions, list[Fault]]:
    """Finds every action's position; reports those on a wrong rank, of a stage or micro-batch out of range, or duplicate."""
    m, owners = schedule.num_micro_batch, schedule.stage_rank
    slots = {kind: [ABSENT] * (len(owners) * m) for kind in (*COMPUTE, *SENDS, *RECEIVES)}
    found = Positions(
        m,
        owners,
        slots,
        syncs=tuple([] for _ in owners),
        posts=tuple({} for _ in schedule.ranks),
        losses=tuple([] for _ in schedule.ranks),
        steps=tuple([] for _ in schedule.ranks),
    )
    faults: list[Fault] = []
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            stage, micro_batch = action.stage, action.micro_batch
            elsewhere = stage is None or stage >= len(owners) or owners[stage] != rank
            if elsewhere or stage is None or micro_batch is None or micro_batch >= m or action.kind in POSTS:
                faults += _place_rare(schedule, rank, position, found)
                continue
            table, slot = slots[action.kind], stage * m + micro_batch
            if table[slot] == ABSENT:
                table[slot] = position
            else:
                faults.append(_doubled(action, rank, table[slot], position))
    return found, faults


def _place_rare(schedule: Schedule, rank: int, position: int, found: Positions) -> list[Fault]:
    """Places a POST, SYNC, LOSS or STEP, or reports an action that has no place."""
    action = schedule.ranks[rank][position]
    wrong = _misplaced(schedule, rank, action)
    if wrong:
        return [(rank, f"{action} (action {position + 1} of rank {rank}) {wrong}")]
    if action.kind in POSTS:
        assert action.stage is not None and action.micro_batch is not None
        own = found.posts[rank].setdefault((action.kind, action.stage), [ABSENT] * schedule.num_micro_batch)
        first = own[action.micro_batch] = position if own[action.micro_batch] == ABSENT else own[action.micro_batch]
    else:
        ends = found.losses if action.kind is Kind.LOSS else found.steps
        seen = ends[rank] if action.stage is None else found.syncs[action.stage]
        seen.append(position)
        first = seen[0]
    return [] if first == position else [_doubled(action, rank, first, position)]


def _doubled(action: Action, rank: int, first: int, second: int) -> Fault:
    return rank, f"{action} occurs twice on rank {rank}: actions {first + 1} and {second + 1}"


def _misplaced(schedule: Schedule, rank: int, action: Action) -> str:
    ends = (Kind.LOSS, Kind.STEP)
    if (action.stage is None) != (action.kind in ends) or (action.micro_batch is None) != (action.kind in (Kind.SYNC, *ends)):
        return "is not an action: all but LOSS and STEP have a stage, all but SYNC, LOSS and STEP a micro-batch"
    if action.stage is not None and action.stage >= schedule.num_stages:
        return f"is of a stage that does not exist (stages: {schedule.num_stages})"
    if action.kind in POSTS and schedule.stage_rank[action.stage or 0] == rank:
        return f"is on the rank of stage {action.stage} itself, which sends nothing to itself"
    if action.kind not in POSTS and action.stage is not None and schedule.stage_rank[action.stage] != rank:
        return f"is on the wrong rank: stage {action.stage} is on rank {schedule.stage_rank[action.stage]}"
    if action.micro_batch is not None and action.micro_batch >= schedule.num_micro_batch:
        return f"is of a micro-batch that does not exist (micro-batches: {schedule.num_micro_batch})"
    return ""


def _missing_computations(positions: Positions) -> Iterator[Fault]:
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
            yield rank, f"the backward {at} occurs twice on rank {rank}: whole ({stage}B{micro_batch}) and in parts"
        elif has_whole:
            continue
        elif not has_input and not has_weight and not splits:
            yield rank, f"{stage}B{micro_batch} is missing on rank {rank}"
        else:
            wanted = ((Kind.BACKWARD_INPUT, has_input), (Kind.BACKWARD_WEIGHT, has_weight))
            for kind in (kind for kind, there in wanted if not there):
                yield rank, f"{Action(kind, stage, micro_batch)} is missing on rank {rank}"


def _communication_faults(positions: Positions, edges: Edges) -> Iterator[Fault]:
    """Every edge between ranks has one SEND and one RECV per micro-batch, and there are no others."""
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
            yield from (_lacking if stage in stages else _surplus)(positions, stage, kind)
    yield from _post_faults(positions, edges)
    if crossing:
        for rank, found in enumerate(positions.losses):
            if not found:
                yield rank, f"LOSS is missing on rank {rank}"


def _post_faults(positions: Positions, edges: Edges) -> Iterator[Fault]:
    """What a rank receives from a stage of another rank is posted once for all its stages, and nothing else is."""
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
            yield rank, f"{action} (action {surplus[action] + 1} of rank {rank}) receives along an edge that is not between ranks"


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
            action, verb = Action(kind, stage, micro_batch), "receives" if kind in RECEIVES else "sends"
            yield rank, f"{action} (action {position + 1} of rank {rank}) {verb} along an edge that is not between ranks"


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


def _order_faults(positions: Positions) -> Iterator[Fault]:
    """F before R before B or I before W; received before used, made before sent."""
    present = {kind for kind in positions.slots if positions.any(kind)}
    for first, second in _PAIRS:
        if first in present and second in present:
            for stage in range(len(positions.stage_rank)):
                before, after = positions.of(first, stage), positions.of(second, stage)
                yield from _reversed(positions.stage_rank[stage], before, after, (first, stage), (second, stage))


def _reversed(rank: int, before: Sequence[int], after: Sequence[int], first: tuple[Kind, int], second: tuple[Kind, int]) -> Iterator[Fault]:
    """Micro-batches for which the second action stands before the first; both as (kind, stage), with positions."""
    if all(map(lt, before, after)):
        return
    for micro_batch, (a, b) in enumerate(zip(before, after, strict=True)):
        if a > b > ABSENT:
            early, late = Action(*second, micro_batch), Action(*first, micro_batch)
            yield rank, f"{early} (action {b + 1} of rank {rank}) comes before {late} (action {a + 1})"


def _end_faults(positions: Positions, schedule: Schedule) -> Iterator[Fault]:
    """SYNC after the stage's last backward, STEP last of all."""
    for stage, found in enumerate(positions.syncs):
        rank = positions.stage_rank[stage]
        last = positions.last_backward(stage)
        if found and found[0] < last:
            late = schedule.ranks[rank][last]
            yield rank, f"{stage}SYNC (action {found[0] + 1} of rank {rank}) comes before {late} (action {last + 1})"
    for rank, found in enumerate(positions.steps):
        last = len(schedule.ranks[rank]) - 1
        if found and found[0] != last:
            yield rank, f"STEP (action {found[0] + 1} of rank {rank}) is not the last of its {last + 1} actions"


def _late_posts(positions: Positions, edges: Edges) -> Iterator[Fault]:
    """Each RECV stands after the POSTs of all that it waits for."""
    for post, sender, receiver in edges.messages():
        rank, kind = positions.stage_rank[receiver], RECV_OF[post]
        posted, taken = positions.posted(post, sender, receiver), positions.of(kind, receiver)
        yield from _reversed(rank, posted, taken, (post, sender), (kind, receiver))


def _bucket_faults(positions: Positions, schedule: Schedule) -> Iterator[Fault]:
    """No launch stands between a stage's last backward, which starts buckets of gradients, and its SYNC."""
    for stage, found in enumerate(positions.syncs):
        rank = positions.stage_rank[stage]
        last = positions.last_backward(stage)
        between = schedule.ranks[rank][last + 1 : found[0]] if found else ()
        for action in between:
            if action.kind in LAUNCHES:
                yield rank, f"{action} is between {schedule.ranks[rank][last]} and {stage}SYNC on rank {rank}, where buckets start"


def _channel_faults(positions: Positions, edges: Edges) -> Iterator[Fault]:
    """Both ends of an edge agree on the order of its micro-batches: each channel is first in, first out."""
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
