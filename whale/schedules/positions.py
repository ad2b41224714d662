"""Where each action of a schedule stands, found once, with what stands there wrongly or twice."""

from __future__ import annotations

from dataclasses import dataclass

from whale.ir.schedule import COMPUTE, POSTS, RECEIVES, SENDS, Action, Kind, Schedule

Fault = tuple[int | None, str]  # the rank in whose line it is, if in one; what is wrong

ABSENT = -1


@dataclass(frozen=True)
class Positions:
    """Positions within the owner's actions.

    Attributes:
        num_micro_batch: micro-batches of the schedule.
        stage_rank: per stage, its rank.
        slots: per kind, at ``stage * num_micro_batch + micro_batch``; `ABSENT` where there is none.
        syncs: per stage, positions of its SYNC.
        posts: per rank, and per kind and sending stage of its POSTs, their positions by micro-batch; `ABSENT` where there is none.
        losses, steps: per rank, positions of its LOSS and of its STEP.
    """

    num_micro_batch: int
    stage_rank: tuple[int, ...]
    slots: dict[Kind, list[int]]
    syncs: tuple[list[int], ...]
    posts: tuple[dict[tuple[Kind, int], list[int]], ...]
    losses: tuple[list[int], ...]
    steps: tuple[list[int], ...]

    def of(self, kind: Kind, stage: int) -> list[int]:
        """Per micro-batch, the position of a stage's action."""
        return self.slots[kind][stage * self.num_micro_batch : (stage + 1) * self.num_micro_batch]

    def posted(self, kind: Kind, sender: int, receiver: int) -> list[int]:
        """Per micro-batch, the position of the POST on the receiving stage's rank for what the sending stage hands over."""
        return self.posts[self.stage_rank[receiver]].get((kind, sender), [ABSENT] * self.num_micro_batch)

    def last_backward(self, stage: int) -> int:
        """The position of the last action of a stage that adds to its gradients."""
        kinds = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        return max(max(self.of(kind, stage), default=ABSENT) for kind in kinds)

    def any(self, *kinds: Kind) -> bool:
        """Whether the schedule has an action of one of these kinds."""
        return any(max(self.slots[kind], default=ABSENT) > ABSENT for kind in kinds)

    @property
    def trains(self) -> bool:
        """Whether there is any backward, SYNC or STEP; a schedule without is forward only."""
        backward = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE)
        return self.any(*backward) or any(self.syncs) or any(self.steps)


def locate(schedule: Schedule) -> tuple[Positions, list[Fault]]:
    """Finds every action's position; reports those on a wrong rank, of a stage or micro-batch out of range, or doubled."""
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
    """Places a POST, SYNC, LOSS or STEP, or says what is wrong with an action that has no place."""
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
    return rank, f"{action} is there twice on rank {rank}: actions {first + 1} and {second + 1}"


def _misplaced(schedule: Schedule, rank: int, action: Action) -> str:
    ends = (Kind.LOSS, Kind.STEP)
    if (action.stage is None) != (action.kind in ends) or (action.micro_batch is None) != (action.kind in (Kind.SYNC, *ends)):
        return "is no action: all but LOSS and STEP have a stage, all but SYNC, LOSS and STEP a micro-batch"
    if action.stage is not None and action.stage >= schedule.num_stages:
        return f"is of a stage that is not there (stages: {schedule.num_stages})"
    if action.kind in POSTS and schedule.stage_rank[action.stage or 0] == rank:
        return f"is on the rank of stage {action.stage} itself: nothing comes to it from there"
    if action.kind not in POSTS and action.stage is not None and schedule.stage_rank[action.stage] != rank:
        return f"is on the wrong rank: stage {action.stage} is on rank {schedule.stage_rank[action.stage]}"
    if action.micro_batch is not None and action.micro_batch >= schedule.num_micro_batch:
        return f"is of a micro-batch that is not there (micro-batches: {schedule.num_micro_batch})"
    return ""
