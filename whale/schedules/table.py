"""The table of builders, and `build`, which picks one by its name."""

from __future__ import annotations

import difflib

from whale.errors import ConfigError, raise_faults
from whale.ir.schedule import Schedule
from whale.schedules.builder import Builder, ScheduleShape, with_sync_and_step
from whale.schedules.orders import AIAO, AIAO_EARLY_LOSS, EAGER_ONE_F_ONE_B, GPIPE, INTERLEAVED, ONE_F_ONE_B
from whale.schedules.recomputing import LAST_NO_RECOMPUTE, RECOMPUTE_EARLY, SHIFTED_CRITICAL_PATH
from whale.schedules.zero_bubble import ZB_H1, ZB_H2, ZB_V
from whale.units import counted

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
        num_chunks: stages per rank. 1 also stands for "as many as the schedule has", which are 2 for zb_v.
        group_size: of interleaving; None for as many micro-batches as there are ranks.

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


def peak_in_flight(
    name: str, *, num_ranks: int, num_micro_batch: int, num_chunks: int = 1, group_size: int | None = None
) -> tuple[int, ...]:
    """What `build` would promise, without building: per rank, the most chunk activations alive at once.

    Args and errors are those of `build`.
    """
    builder = _builder(name)
    return _peaks(builder, _shape(builder, num_ranks, num_micro_batch, num_chunks, group_size))


def most_waiting(name: str, *, num_ranks: int, num_micro_batch: int, num_chunks: int = 1, group_size: int | None = None) -> tuple[int, ...]:
    """Per rank, the most micro-batches of one of its stages whose weight gradients wait for their W at once; 0 where B computes them.

    Args and errors are those of `build`.
    """
    builder = _builder(name)
    shape = _shape(builder, num_ranks, num_micro_batch, num_chunks, group_size)
    return tuple(builder.waiting(shape, rank) for rank in range(num_ranks))


def placement(name: str, *, num_ranks: int, num_chunks: int = 1) -> tuple[int, ...]:
    """The rank of each stage, as `build` would place them; its length is the number of stages that the schedule runs.

    Raises:
        ConfigError: there is no such schedule, or not with so many chunks.
    """
    builder = _builder(name)
    return builder.placement(_shape(builder, num_ranks, num_ranks, num_chunks, None))


def _builder(name: str) -> Builder:
    if name in BUILDERS:
        return BUILDERS[name]
    near = difflib.get_close_matches(name, BUILDERS, n=1)
    raise ConfigError(f"a schedule is one of {', '.join(BUILDERS)} (schedule: {name})", hint=f"did you mean {near[0]}?" if near else None)


def _peaks(builder: Builder, shape: ScheduleShape) -> tuple[int, ...]:
    return tuple(builder.peak(shape, rank) for rank in range(shape.num_ranks))


def _shape(builder: Builder, num_ranks: int, num_micro_batch: int, num_chunks: int, group_size: int | None) -> ScheduleShape:
    counts = {"ranks": num_ranks, "micro-batches": num_micro_batch, "chunks": num_chunks}
    faults = [ConfigError(f"a schedule needs at least 1 of its {what} ({what}: {count})") for what, count in counts.items() if count < 1]
    chunks = num_chunks if builder.chunks is None or num_chunks != 1 else builder.chunks
    if builder.chunks not in (None, chunks) and num_chunks >= 1:
        faults.append(
            ConfigError(
                f"schedule {builder.name} has {counted(builder.chunks, 'chunk')} per rank (chunks: {num_chunks})",
                hint=f"schedules with any number of chunks: {', '.join(name for name, other in BUILDERS.items() if other.chunks is None)}",
            )
        )
    if group_size is not None and not builder.takes_group:
        groups = ", ".join(name for name, other in BUILDERS.items() if other.takes_group)
        faults.append(ConfigError(f"a group size is for {groups} (schedule {builder.name}, group size: {group_size})"))
    shape = ScheduleShape(num_ranks, num_micro_batch, chunks, num_ranks if group_size is None else group_size)
    raise_faults(faults or builder.check(shape))
    return shape
