"""`Builder`: the order of one rank's computations as a pure function of a few numbers, and the peak memory it promises.

Orders with whole backward passes: GPipe, 1F1B, eager and interleaved 1F1B, all-in-all-out; and forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from whale.errors import ConfigError
from whale.ir.schedule import Action, Kind, Schedule
from whale.schedules.idle import Floats, RankPasses, by_chunks, by_groups
from whale.schedules.idle import in_turn as idle_in_turn


@dataclass(frozen=True, slots=True)
class ScheduleShape:
    """The numbers that a schedule is built from."""

    num_ranks: int  # pipeline ranks (virtual devices), p
    num_micro_batch: int  # micro-batches of a step, m
    num_chunks: int = 1  # stages per rank, v
    group_size: int = 1  # micro-batches that pass one chunk before the next chunk runs, g

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks


def round_robin(shape: ScheduleShape) -> tuple[int, ...]:
    """Stage k on rank k mod p: chunk c of rank r is stage c p + r."""
    return tuple(stage % shape.num_ranks for stage in range(shape.num_stages))


_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Builder:
    """One kind of schedule: all that is said of it.

    A RECV_B between R and B in `order` marks an R that does not wait for the gradient. `peak` and `waiting` are promises, `idle` is what
    the search ranks by.
    """

    name: str  # as recipes name it
    order: Callable[[ScheduleShape, int], Iterable[Action]]  # the computations (F, B or I and W, R) of one rank
    peak: Callable[[ScheduleShape, int], int]  # upper bound of chunk activations that a rank holds at once, from F to the last of B or W
    placement: Callable[[ScheduleShape], tuple[int, ...]] = round_robin  # the rank of each stage
    chunks: int | None = 1  # stages per rank; None for any number
    takes_group: bool = False  # whether it uses `ScheduleShape.group_size`
    check: Callable[[ScheduleShape], list[ConfigError]] = lambda shape: []  # further conditions on the shape
    waiting: Callable[[ScheduleShape, int], int] = lambda shape, rank: 0  # most micro-batches of a stage between I and W
    idle: Callable[[RankPasses], Floats] = idle_in_turn  # closed form of the seconds that each rank waits
    tried: tuple[int, ...] = ()  # stages per rank with which the search tries it; () for those that others are never slower than
    ends_by_chunk: bool = False  # whether a rank ends its later stages before it begins the first one's backwards: sums hide there

    @cached_property
    def recomputes(self) -> bool:
        """Whether it recomputes whole stages by itself."""
        return any(action.kind is Kind.RECOMPUTE for action in self.order(self._example, 0))

    @cached_property
    def delays_weights(self) -> bool:
        """Whether weight gradients wait for idle time, so that the last come after all else."""
        return self.waiting(self._example, 0) > 0

    @property
    def _example(self) -> ScheduleShape:
        return ScheduleShape(2, 2, self.chunks or 1, 2)


def with_sync_and_step(order: Iterable[Action]) -> tuple[Action, ...]:
    """Adds each stage's SYNC right after its last backward, and the STEP at the end."""
    actions = list(order)
    stages = {action.stage for action in actions}
    finished: list[Action] = [Action(Kind.STEP)]
    while actions:
        action = actions.pop()
        if action.stage in stages and action.kind in _BACKWARD:
            stages.remove(action.stage)
            finished.append(Action(Kind.SYNC, action.stage))
        finished.append(action)
        if not stages:
            break
    return (*actions, *reversed(finished))


# GPipe: all forwards, then all backwards; B as long as F
#
# rank 0  F0 F1 F2 F3             B0 B1 B2 B3
# rank 1     F0 F1 F2 F3       B0 B1 B2 B3
# rank 2        F0 F1 F2 F3 B0 B1 B2 B3


def _gpipe(shape: ScheduleShape, rank: int) -> Iterator[Action]:
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for micro_batch in range(shape.num_micro_batch):
            yield Action(kind, rank, micro_batch)


GPIPE = Builder("gpipe", _gpipe, lambda shape, rank: shape.num_micro_batch)

# 1F1B: a few forwards, then forward and backward in turn; B as long as F; stage s keeps p - s activations
#
# rank 0  F0 F1 F2       B0 F3 B1    B2    B3
# rank 1     F0 F1    B0 F2 B1 F3 B2    B3
# rank 2        F0 B0 F1 B1 F2 B2 F3 B3
#
# Eager 1F1B: two forwards ahead for each stage that follows, one on it and one on its way, so that no rank waits for the way of a
# message; stage s keeps 2 (p - s) - 1 activations
#
# rank 0  F0 F1 F2 F3 F4 B0 F5 B1    B2    B3    B4    B5
# rank 1     F0 F1 F2 B0 F3 B1 F4 B2 F5 B3    B4    B5
# rank 2        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5


def num_warm_up(shape: ScheduleShape, rank: int, ahead: int = 1) -> int:
    """Forwards of 1F1B before the first pair: `ahead` for each stage that follows."""
    return min(ahead * (shape.num_ranks - 1 - rank), shape.num_micro_batch)


def in_turn(shape: ScheduleShape, rank: int, ahead: int = 1) -> Iterator[Action]:
    """Computations of one rank with one stage: warm-up forwards, then one forward, one backward."""
    num_ahead = num_warm_up(shape, rank, ahead)
    for micro_batch in range(num_ahead):
        yield Action(Kind.FORWARD, rank, micro_batch)
    for micro_batch in range(shape.num_micro_batch):
        if micro_batch + num_ahead < shape.num_micro_batch:
            yield Action(Kind.FORWARD, rank, micro_batch + num_ahead)
        yield Action(Kind.BACKWARD, rank, micro_batch)


def peak_in_turn(shape: ScheduleShape, rank: int, ahead: int = 1) -> int:
    return min(num_warm_up(shape, rank, ahead) + 1, shape.num_micro_batch)


ONE_F_ONE_B = Builder("1f1b", in_turn, peak_in_turn, tried=(1,))
EAGER_ONE_F_ONE_B = Builder("eager_1f1b", partial(in_turn, ahead=2), partial(peak_in_turn, ahead=2), tried=(1,))

# Interleaved 1F1B: several chunks per rank take turns, group by group, so that the pipeline fills in smaller steps; 2 chunks, groups of 2,
# B as long as F
#
# rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
# rank 1      1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3


def _num_warm_up_interleaved(shape: ScheduleShape, rank: int) -> int:
    """Forwards before the first pair: to the end of the pipeline and back, and a group for each chunk but the last."""
    ahead = 2 * (shape.num_ranks - rank - 1) + (shape.num_chunks - 1) * shape.group_size
    return min(ahead, shape.num_micro_batch * shape.num_chunks)


def _interleaved(shape: ScheduleShape, rank: int) -> Iterator[Action]:
    """Computations of one rank; backwards visit the chunks in reverse.

    A last group that is too small to run (see `num_vacant`) is padded, and the padding left out.
    """
    full = replace(shape, num_micro_batch=shape.num_micro_batch + num_vacant(shape))
    return (action for action in group_by_group(full, rank) if (action.micro_batch or 0) < shape.num_micro_batch)


def num_vacant(shape: ScheduleShape) -> int:
    """Micro-batches that the last group must be padded by to avoid a deadlock.

    With r micro-batches in the last group, its first chunk ends on the last rank only after a backward that waits
    for the first rank, which waits for that chunk, wherever g + r < 2 p - 2 (and r > 1 if there are only two chunks).
    """
    left_over = shape.num_micro_batch % shape.group_size
    least = 1 if shape.num_chunks > 2 else 2
    if shape.num_chunks == 1 or shape.num_micro_batch < shape.group_size or left_over < least:
        return 0
    return max(0, 2 * shape.num_ranks - 2 - shape.group_size - left_over)


def group_by_group(shape: ScheduleShape, rank: int) -> Iterator[Action]:
    starts = range(0, shape.num_micro_batch, shape.group_size)
    groups = [range(start, min(start + shape.group_size, shape.num_micro_batch)) for start in starts]
    table = [(chunk, micro_batch) for group in groups for chunk in range(shape.num_chunks) for micro_batch in group]
    stages = [chunk * shape.num_ranks + rank for chunk in range(shape.num_chunks)]
    forwards = [Action(Kind.FORWARD, stages[chunk], micro_batch) for chunk, micro_batch in table]
    num_ahead = _num_warm_up_interleaved(shape, rank)
    yield from forwards[:num_ahead]
    for number, (chunk, micro_batch) in enumerate(table):
        yield from forwards[number + num_ahead : number + num_ahead + 1]
        yield Action(Kind.BACKWARD, stages[-1 - chunk], micro_batch)


def _peak_interleaved(shape: ScheduleShape, rank: int) -> int:
    return min(_num_warm_up_interleaved(shape, rank) + 1, shape.num_micro_batch * shape.num_chunks)


def _check_interleaved(shape: ScheduleShape) -> list[ConfigError]:
    """A smaller group would return to the first rank before its first micro-batch does: a deadlock."""
    least = min(shape.num_ranks, shape.num_micro_batch)
    if shape.group_size >= least:
        return []
    rule = f"it must be at least {least}, the smaller of ranks and micro-batches"
    return [
        ConfigError(
            f"group size {shape.group_size} is too small for interleaving ({shape.num_ranks} ranks, {shape.num_micro_batch} "
            f"micro-batches); {rule}",
            hint=f"the usual group size is {shape.num_ranks}; {2 * shape.num_ranks} hides the latency of the links",
        )
    ]


INTERLEAVED = Builder(
    "interleaved",
    _interleaved,
    _peak_interleaved,
    chunks=None,
    takes_group=True,
    check=_check_interleaved,
    idle=by_groups,
    tried=(2, 3, 4),
    ends_by_chunk=True,
)

# All in, all out: every micro-batch passes a chunk before the next chunk has its turn, oldest first. 2 chunks, B as long as F: the later
# stage of a rank is done with its gradients, and may sync them, while the earlier one still runs backward.
#
# rank 0  0F0 0F1 0F2 2F0 2F1 2F2         2B0 2B1 2B2 0B0 0B1 0B2
# rank 1      1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
#
# The same with early loss, where on the last stage of all each backward follows its forward at once: stage 3 keeps one micro-batch's
# logits only
#
# rank 0  0F0 0F1 0F2 2F0 2F1 2F2 2B0     2B1     2B2 0B0 0B1 0B2
# rank 1      1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2


def _aiao(shape: ScheduleShape, rank: int, *, early_loss: bool) -> Iterator[Action]:
    stages = [chunk * shape.num_ranks + rank for chunk in range(shape.num_chunks)]
    micro_batches = range(shape.num_micro_batch)
    early = stages.pop() if early_loss and rank == shape.num_ranks - 1 else None
    for stage in stages:
        yield from (Action(Kind.FORWARD, stage, micro_batch) for micro_batch in micro_batches)
    if early is not None:
        for micro_batch in micro_batches:
            yield Action(Kind.FORWARD, early, micro_batch)
            yield Action(Kind.BACKWARD, early, micro_batch)
    for stage in reversed(stages):
        yield from (Action(Kind.BACKWARD, stage, micro_batch) for micro_batch in micro_batches)


def _peak_aiao(shape: ScheduleShape, rank: int, *, early_loss: bool) -> int:
    """All micro-batches are in flight at the turn; with early loss the last stage holds only one."""
    if early_loss and rank == shape.num_ranks - 1:
        return shape.num_micro_batch * (shape.num_chunks - 1) + 1
    return shape.num_micro_batch * shape.num_chunks


AIAO = Builder(
    "aiao",
    partial(_aiao, early_loss=False),
    partial(_peak_aiao, early_loss=False),
    chunks=None,
    idle=by_chunks,
    tried=(2,),
    ends_by_chunk=True,
)
AIAO_EARLY_LOSS = Builder(
    "aiao_early_loss",
    partial(_aiao, early_loss=True),
    partial(_peak_aiao, early_loss=True),
    chunks=None,
    idle=by_chunks,
    ends_by_chunk=True,
)


def forward_only(num_ranks: int, num_micro_batch: int, stage_rank: Sequence[int]) -> Schedule:
    """Forwards only, micro-batch after micro-batch through all stages, without SYNC or STEP: for evaluation and prediction."""
    order = [(micro_batch, stage, rank) for micro_batch in range(num_micro_batch) for stage, rank in enumerate(stage_rank)]
    ranks = tuple(tuple(Action(Kind.FORWARD, stage, i) for i, stage, owner in order if owner == rank) for rank in range(num_ranks))
    return Schedule("forward_only", num_micro_batch, tuple(stage_rank), ranks)
