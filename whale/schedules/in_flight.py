"""How many activations a schedule keeps alive: counted from each F to the B or W that frees it."""

from __future__ import annotations

from whale.ir.schedule import Action, Kind, Schedule


def count_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most chunk activations alive at once. Zero where no backward follows: nothing is kept for it."""
    return tuple(_peak(actions) for actions in schedule.ranks)


def count_recomputed(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most recomputed activations alive at once, from R to the last of B or W; 0 where nothing is recomputed."""
    alive, peak = [0] * schedule.num_stages, [0] * schedule.num_stages
    for action in (action for actions in schedule.ranks for action in actions if action.stage is not None):
        stage = action.stage
        assert stage is not None
        if action.kind is Kind.RECOMPUTE:
            alive[stage] += 1
            peak[stage] = max(peak[stage], alive[stage])
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            alive[stage] -= 1
    return tuple(peak)


def _peak(actions: tuple[Action, ...]) -> int:
    alive = peak = 0
    freed = False
    for action in actions:
        kind = action.kind
        if kind is Kind.FORWARD:
            alive += 1
            if alive > peak:
                peak = alive
        elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_WEIGHT:
            alive -= 1
            freed = True
    return peak if freed else 0
