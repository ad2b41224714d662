"""The table of builders and `build`, which picks one by name; and zero-bubble orders, in which weight gradients (W) wait so that input
gradients (I) reach earlier stages sooner.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from whale.errors import ConfigError, raise_faults
from whale.ir.schedule import Action, Kind, Schedule
from whale.schedules.idle import down_and_up, with_late_weights, with_late_weights_twice_ahead
from whale.schedules.orders import (
    AIAO,
    AIAO_EARLY_LOSS,
    EAGER_ONE_F_ONE_B,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    Builder,
    ScheduleShape,
    num_warm_up,
    with_sync_and_step,
)
from whale.schedules.recomputing import LAST_NO_RECOMPUTE, RECOMPUTE_EARLY, SHIFTED_CRITICAL_PATH
from whale.units import counted

# ZB-H1, with as many forwards ahead as 1F1B has; F, I and W equally long; p activations on every stage
#
# rank 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
# rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
# rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
#
# ZB-H2: twice the forwards ahead, so that weight gradients fill the bubble, wholly where 2 W = F + I; 2 p - 1 activations on every stage
#
# rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
# rank 1     F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
# rank 2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5


def _with_late_weights(shape: ScheduleShape, rank: int, num_ahead: int, lag: int) -> Iterator[Action]:
    """Warm-up forwards, then F and I in turn; the first W after backward number `lag`, then one after each backward."""
    m = shape.num_micro_batch
    for micro_batch in range(num_ahead):
        yield Action(Kind.FORWARD, rank, micro_batch)
    for micro_batch in range(m):
        if micro_batch + num_ahead < m:
            yield Action(Kind.FORWARD, rank, micro_batch + num_ahead)
        yield Action(Kind.BACKWARD_INPUT, rank, micro_batch)
        if micro_batch >= lag:
            yield Action(Kind.BACKWARD_WEIGHT, rank, micro_batch - lag)
    for micro_batch in range(max(0, m - lag), m):
        yield Action(Kind.BACKWARD_WEIGHT, rank, micro_batch)


def _zb_h1(shape: ScheduleShape, rank: int) -> Iterator[Action]:
    return _with_late_weights(shape, rank, num_warm_up(shape, rank), rank)


def _zb_h2(shape: ScheduleShape, rank: int) -> Iterator[Action]:
    return _with_late_weights(shape, rank, num_warm_up(shape, rank, ahead=2), 2 * rank)


ZB_H1 = Builder(
    "zb_h1",
    _zb_h1,
    peak=lambda shape, rank: min(shape.num_ranks, shape.num_micro_batch),
    waiting=lambda shape, rank: min(rank + 1, shape.num_micro_batch),
    idle=with_late_weights,
    tried=(1,),
)
ZB_H2 = Builder(
    "zb_h2",
    _zb_h2,
    peak=lambda shape, rank: min(2 * shape.num_ranks - 1, shape.num_micro_batch),
    waiting=lambda shape, rank: min(2 * rank + 1, shape.num_micro_batch),
    idle=with_late_weights_twice_ahead,
    tried=(1,),
)

# ZB-V: two chunks per rank in the shape of a V, no bubble where F = I = W, in the memory of 1F1B's first stage; 2 p chunk activations on
# every rank
#
# rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
# rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2


def _zb_v(shape: ScheduleShape, rank: int) -> Iterator[Action]:
    """Capitals are the chunk on the way down (stage r), small letters the one on the way up (stage 2p - 1 - r).

    Each letter is the next micro-batch of its kind. W follows its I except at the end, where W fills the gaps. The order
    is laid out for at least 2 p - 1 micro-batches, which it needs to be full; with fewer, missing actions are skipped.
    """
    p, m = shape.num_ranks, _num_laid_out(shape)
    num_ahead = 2 * p - 1 - rank  # forwards of the chunk down when all fill: the chunk up has done p of them
    letters = "F" * (2 * (p - rank) - 1)  # until the first micro-batch is back from the turn
    letters += "fF" * rank + "fiw" * (p - rank)
    letters += "FIWfiw" * (m - num_ahead) + "IWfiw" * (num_ahead - p)
    letters += "Ii" * rank + "IW" * (p - rank) + "w" * rank + "W" * rank
    kinds = {"F": Kind.FORWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}
    counts = dict.fromkeys(letters, 0)
    for letter in letters:
        if counts[letter] < shape.num_micro_batch:
            yield Action(kinds[letter.upper()], rank if letter.isupper() else 2 * p - 1 - rank, counts[letter])
        counts[letter] += 1


def _num_laid_out(shape: ScheduleShape) -> int:
    return max(shape.num_micro_batch, 2 * shape.num_ranks - 1)


def _v_shape(shape: ScheduleShape) -> tuple[int, ...]:
    """Two stages per rank, down and up again: rank r has stages r and 2p - 1 - r."""
    down = tuple(range(shape.num_ranks))
    return down + down[::-1]


def _peak_v(shape: ScheduleShape, rank: int) -> int:
    """In chunks, each half a stage of 1F1B."""
    return min(2 * shape.num_ranks, 2 * shape.num_micro_batch, shape.num_micro_batch + rank + 1)


def _waiting_v(shape: ScheduleShape, rank: int) -> int:
    """The peak is at the end, where W of the chunk on the way down fills the gaps of the last p micro-batches."""
    num_of_last = shape.num_ranks - (_num_laid_out(shape) - shape.num_micro_batch)
    return max(1, min(rank + 1, num_of_last))


ZB_V = Builder("zb_v", _zb_v, _peak_v, _v_shape, chunks=2, waiting=_waiting_v, idle=down_and_up, tried=(2,))


_ALL = (
    GPIPE,
    ONE_F_ONE_B,
    EAGER_ONE_F_ONE_B,
    INTERLEAVED,
    AIAO,
    AIAO_EARLY_LOSS,
    ZB_H1,
    ZB_H2,
    ZB_V,
    RECOMPUTE_EARLY,
    LAST_NO_RECOMPUTE,
    SHIFTED_CRITICAL_PATH,
)

BUILDERS: dict[str, Builder] = {builder.name: builder for builder in _ALL}


def build(name: str, *, num_ranks: int, num_micro_batch: int, num_chunks: int = 1, group_size: int | None = None) -> Schedule:
    """Builds a schedule: computations in order, each stage's SYNC right after its last backward, STEP last.

    Args:
        name: one of `BUILDERS`.
        num_ranks: pipeline ranks (virtual devices).
        num_micro_batch: micro-batches of a step.
        num_chunks: stages per rank. 1 also means the schedule's own number (2 for zb_v).
        group_size: of interleaving; None for the number of ranks.

    Raises:
        ConfigError: there is no such schedule, or it cannot be built in this shape; all reasons at once.
    """
    builder = _builder(name)
    shape = _shape(builder, num_ranks, num_micro_batch, num_chunks, group_size)
    return Schedule(
        name,
        num_micro_batch,
        builder.placement(shape),
        tuple(with_sync_and_step(builder.order(shape, rank)) for rank in range(num_ranks)),
        _peaks(builder, shape),
    )


def most_held(
    name: str, *, num_ranks: int, num_micro_batch: int, num_chunks: int = 1, group_size: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What `build` promises, without building; arguments and errors as there.

    Returns:
        Per rank, the most chunk activations alive, and the most micro-batches of one stage whose weight gradients wait for W.
    """
    builder = _builder(name)
    shape = _shape(builder, num_ranks, num_micro_batch, num_chunks, group_size)
    return _peaks(builder, shape), tuple(builder.waiting(shape, rank) for rank in range(num_ranks))


def placement(name: str, *, num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """The rank of each stage as `build` places them; raises ConfigError as `build`."""
    builder = _builder(name)
    return builder.placement(_shape(builder, num_ranks, num_ranks, num_chunks, None))


def _builder(name: str) -> Builder:
    if name in BUILDERS:
        return BUILDERS[name]
    near = difflib.get_close_matches(name, BUILDERS, n=1)
    raise ConfigError(f"schedule {name!r} is not one of {', '.join(BUILDERS)}", hint=f"did you mean {near[0]}?" if near else None)


def _peaks(builder: Builder, shape: ScheduleShape) -> tuple[int, ...]:
    return tuple(builder.peak(shape, rank) for rank in range(shape.num_ranks))


def _shape(builder: Builder, num_ranks: int, num_micro_batch: int, num_chunks: int, group_size: int | None) -> ScheduleShape:
    counts = {"ranks": num_ranks, "micro-batches": num_micro_batch, "chunks": num_chunks}
    faults = [ConfigError(f"the schedule has {count} {what}; it needs at least 1") for what, count in counts.items() if count < 1]
    chunks = num_chunks if builder.chunks is None or num_chunks != 1 else builder.chunks
    if builder.chunks not in (None, chunks) and num_chunks >= 1:
        faults.append(
            ConfigError(
                f"chunks: {num_chunks} cannot be used with schedule {builder.name}, which has {counted(builder.chunks, 'chunk')} per rank",
                hint=f"schedules with any number of chunks: {', '.join(name for name, other in BUILDERS.items() if other.chunks is None)}",
            )
        )
    if group_size is not None and not builder.takes_group:
        groups = ", ".join(name for name, other in BUILDERS.items() if other.takes_group)
        faults.append(ConfigError(f"group size {group_size} cannot be used with schedule {builder.name}; it is for {groups}"))
    shape = ScheduleShape(num_ranks, num_micro_batch, chunks, num_ranks if group_size is None else group_size)
    raise_faults(faults or builder.check(shape))
    return shape
