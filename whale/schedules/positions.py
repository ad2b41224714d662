"""Where each action of a schedule stands, found once, with what stands there wrongly or twice."""

from __future__ import annotations

from dataclasses import dataclass

from whale.ir.schedule import COMMUNICATION, COMPUTE, Action, Kind, Schedule

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
        steps: per rank, positions of its STEP.
    """

    num_micro_batch: int
    stage_rank: tuple[int, ...]
    slots: dict[Kind, list[int]]
    syncs: tuple[list[int], ...]
    steps: tuple[list[int], ...]

    def of(self, kind: Kind, stage: int) -> list[int]:
        """Per micro-batch, the position of a stage's action."""
        return self.slots[kind][stage * self.num_micro_batch : (stage + 1) * self.num_micro_batch]

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
    slots = {kind: [ABSENT] * (len(owners) * m) for kind in (*COMPUTE, *COMMUNICATION)}
    syncs: tuple[list[int], ...] = tuple([] for _ in owners)
    steps: tuple[list[int], ...] = tuple([] for _ in schedule.ranks)
    faults: list[Fault] = []
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            stage, micro_batch = action.stage, action.micro_batch
            if stage is None or micro_batch is None or stage >= len(owners) or owners[stage] != rank or micro_batch >= m:
                faults += _place_rare(schedule, rank, position, syncs, steps)
                continue
            table, slot = slots[action.kind], stage * m + micro_batch
            if table[slot] == ABSENT:
                table[slot] = position
            else:
                faults.append((rank, f"{action} is there twice on rank {rank}: actions {table[slot] + 1} and {position + 1}"))
    return Positions(m, owners, slots, syncs, steps), faults


def _place_rare(schedule: Schedule, rank: int, position: int, syncs: tuple[list[int], ...], steps: tuple[list[int], ...]) -> list[Fault]:
    """Places a SYNC or a STEP, or says what is wrong with an action that has no place."""
    action = schedule.ranks[rank][position]
    wrong = _misplaced(schedule, rank, action)
    if wrong:
        return [(rank, f"{action} (action {position + 1} of rank {rank}) {wrong}")]
    seen = steps[rank] if action.stage is None else syncs[action.stage]
    seen.append(position)
    if len(seen) > 1:
        return [(rank, f"{action} is there twice on rank {rank}: actions {seen[0] + 1} and {position + 1}")]
    return []


def _misplaced(schedule: Schedule, rank: int, action: Action) -> str:
    if (action.stage is None) != (action.kind is Kind.STEP) or (action.micro_batch is None) != (action.kind in (Kind.STEP, Kind.SYNC)):
        return "is no action: all but STEP have a stage, all but SYNC and STEP a micro-batch"
    if action.stage is not None and action.stage >= schedule.num_stages:
        return f"is of a stage that is not there (stages: {schedule.num_stages})"
    if action.stage is not None and schedule.stage_rank[action.stage] != rank:
        return f"is on the wrong rank: stage {action.stage} is on rank {schedule.stage_rank[action.stage]}"
    if action.micro_batch is not None and action.micro_batch >= schedule.num_micro_batch:
        return f"is of a micro-batch that is not there (micro-batches: {schedule.num_micro_batch})"
    return ""
